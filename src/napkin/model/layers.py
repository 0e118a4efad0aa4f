"""The small layers: linear ones (x · Wᵀ + b), the factory that makes all of a model's by one rule, embedding, dropout.

Initial values of parameters are a pure function of a generator's state, the same numbers on every device.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from napkin.kernels.products.linear import linear

Module = TypeVar("Module", bound=nn.Module)

Device = torch.device | str | None
"""Place of a layer's parameters; None is torch's current default device."""

_CUT = 3.0


def truncated_normal(
    *shape: int,
    std: float,
    generator: torch.Generator | None = None,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> nn.Parameter:
    """A new parameter, each number drawn from a normal distribution cut off at ±3 std.

    Without `device` and `dtype` it is on the current default device and in the current default dtype. The numbers are
    drawn on the CPU in fp32 with `generator` (a CPU generator; None is torch's global one), so they do not depend on
    the device. On the meta device and under FakeTensorMode nothing is drawn; inside of `deferred_draws` it is later.
    """
    deferred = _deferred.get()
    if deferred is not None and not is_fake(torch.empty((), device=device)):
        parameter = nn.Parameter(torch.empty(shape, device="meta", dtype=dtype))
        deferred.append(Draw(parameter, std, generator))
        return parameter
    empty = torch.empty(shape, device=device, dtype=dtype)
    parameter = nn.Parameter(empty)
    if empty.is_meta or is_fake(empty):
        return parameter
    draws = torch.empty(shape, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        parameter.copy_(cut_off_normal_(uniform_(draws, generator), std))
    return parameter


def uniform_(draws: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill a tensor with the next uniform numbers, each of which becomes one normal number.

    The number of draws does not depend on what is drawn, so that a part of a parameter can be drawn alone.
    """
    limit = math.erf(_CUT / math.sqrt(2))
    return draws.uniform_(-limit, limit, generator=generator)


def cut_off_normal_(draws: Tensor, std: float) -> Tensor:
    """Turn uniform numbers into normal ones, by the inverse of their distribution function."""
    return draws.erfinv_().mul_(std * math.sqrt(2))


class Draw(NamedTuple):
    """A parameter on the meta device whose initial values are still to be drawn."""

    parameter: nn.Parameter
    std: float
    generator: torch.Generator | None


_deferred: ContextVar[list[Draw] | None] = ContextVar("deferred", default=None)


@contextmanager
def deferred_draws() -> Iterator[list[Draw]]:
    """Within the block, randomly initialised parameters are created on the meta device; the list collects them in the
    order in which they have to be drawn. Under FakeTensorMode nothing changes, and the list stays empty."""
    token = _deferred.set([])
    try:
        yield cast(list[Draw], _deferred.get())
    finally:
        _deferred.reset(token)


@contextmanager
def default_device_and_dtype(device: Device, dtype: torch.dtype | None) -> Iterator[None]:
    """Make what is made inside on that device and in that dtype; None leaves torch's defaults."""
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        if device is not None:
            stack.enter_context(torch.device(device))
        if dtype is not None:
            stack.callback(torch.set_default_dtype, before)
            torch.set_default_dtype(dtype)
        yield


def moved(module: Module, device: Device, dtype: torch.dtype | None) -> Module:
    """The module on that device and in that dtype; itself if neither is given."""
    return module if device is None and dtype is None else module.to(device=device, dtype=dtype)


def fan_in_std(inputs: int, outputs: int) -> float:
    """1/sqrt(inputs): keeps the variance in the forward pass (LeCun et al. 1998)."""
    return inputs**-0.5


def glorot_std(inputs: int, outputs: int) -> float:
    """sqrt(2/(inputs + outputs)): a compromise between forward and backward pass (Glorot & Bengio 2010)."""
    return (2 / (inputs + outputs)) ** 0.5


INITIAL_STDS: dict[str, Callable[[int, int], float]] = {"fan_in": fan_in_std, "glorot": glorot_std}


Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x · Wᵀ + b of x, W and b."""


class Linear(nn.Module):
    """A matrix applied to the last dimension, and optionally a bias, which starts at 0.

    The matrix starts truncated-normal at ±3 std; std defaults to 1/sqrt(in_features), which keeps the variance of its
    input (LeCun et al. 1998).
    """

    weight: Float[Tensor, "out_features in_features"]
    bias: Float[Tensor, " out_features"] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        std: float | None = None,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        initial = in_features**-0.5 if std is None else std
        self.weight = truncated_normal(
            out_features, in_features, std=initial, generator=generator, device=device, dtype=dtype
        )
        zeros = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", zeros)
        self.multiply: Multiply = linear
        """The product, which may be taken in another format."""
        self.adapter: Any = None
        """A `napkin.model.adapters.Adapter` that is trained in place of the matrix."""

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        if self.adapter is not None:
            return self.adapter(x, self.weight, self.bias, self.multiply)
        return self.multiply(x, self.weight, self.bias)

    @property
    def matrix(self) -> Float[Tensor, "out_features in_features"]:
        """The matrix that the layer multiplies by: its weight or, with an adapter, that with what the adapter adds."""
        return self.weight if self.adapter is None else self.adapter.merged(self.weight)


class MuPLinear(Linear):
    """A linear layer that multiplies by `multiplier` times its matrix: µP's hidden layers (Yang et al. 2022).

    The matrix starts larger by 1/multiplier, so the layer's output starts as in any other. But Adam moves each number
    by about the learning rate, whatever its size: the layer then learns `multiplier` times as fast (table 8 and
    lemma J.1), which for a multiplier of 1/width is equally fast at every width.
    """

    def __init__(self, in_features: int, out_features: int, *, multiplier: float, std: float, **settings: Any) -> None:
        super().__init__(in_features, out_features, std=std / multiplier, **settings)
        self.multiplier = multiplier

    def forward(self, x: Float[Tensor, "*batch in_features"]) -> Float[Tensor, "*batch out_features"]:
        return super().forward(x * self.multiplier)


class LinearFactory:
    """Makes linear layers that start by one rule.

    `std` is a function of a matrix's inputs and outputs. `residual_scale` multiplies the initial std of layers that
    write into the residual stream. `mup_multiplier` is µP's base width over width; None makes plain layers.
    """

    def __init__(
        self,
        *,
        std: Callable[[int, int], float] = fan_in_std,
        residual_scale: float = 1.0,
        mup_multiplier: float | None = None,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.std = std
        self.residual_scale = residual_scale
        self.mup_multiplier = mup_multiplier
        self.generator = generator
        self.device = device
        self.dtype = dtype

    def on(self, device: Device, dtype: torch.dtype | None) -> "LinearFactory":
        """The factory, or if a device or dtype is given, another that makes its layers there."""
        if device is None and dtype is None:
            return self
        factory = copy.copy(self)
        factory.device, factory.dtype = device or self.device, dtype or self.dtype
        return factory

    def linear(self, inputs: int, *outputs: int, bias: bool = False) -> Linear:
        """Matrices that read the same input, stacked: one product to launch, under autocast one cast of the input."""
        return self._make(inputs, sum(outputs), bias=bias, std=self.std(inputs, outputs[0]))

    def residual_output(self, inputs: int, outputs: int, *, bias: bool = False) -> Linear:
        """A matrix that writes into the residual stream."""
        return self._make(inputs, outputs, bias=bias, std=self.residual_scale * self.std(inputs, outputs))

    def expert_stack(
        self, n: int, inputs: int, outputs: int, *, into_residual: bool = False, parts: int = 1
    ) -> nn.Parameter:
        """n matrices in one parameter [n, parts · outputs, inputs], for experts."""
        std = self.std(inputs, outputs) * (self.residual_scale if into_residual else 1.0)
        return truncated_normal(n, parts * outputs, inputs, std=std, **self._made_with())

    def _make(self, inputs: int, outputs: int, *, bias: bool, std: float) -> Linear:
        if self.mup_multiplier is None:
            return Linear(inputs, outputs, bias=bias, std=std, **self._made_with())
        return MuPLinear(inputs, outputs, multiplier=self.mup_multiplier, std=std, bias=bias, **self._made_with())

    def _made_with(self) -> dict[str, Any]:
        return {"generator": self.generator, "device": self.device, "dtype": self.dtype}


class Scale(nn.Module):
    """x times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        return x * self.factor


def make_scale(factor: float) -> nn.Module:
    """A scale, or an identity for a factor of 1."""
    return nn.Identity() if factor == 1 else Scale(factor)


class Embedding(nn.Module):
    """A learned vector for each of vocab_size ids, initialized truncated-normal at ±3 std."""

    weight: Float[Tensor, "vocab_size d_model"]

    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        *,
        std: float = 1.0,
        generator: torch.Generator | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = truncated_normal(vocab_size, d_model, std=std, generator=generator, device=device, dtype=dtype)
        self.look_up: Callable[[Tensor, Tensor], Tensor] = F.embedding
        """Takes rows of the matrix; tensor parallelism replaces it."""

    @property
    def dtype(self) -> torch.dtype:
        """The number format of the vectors."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        """The device of the matrix."""
        return self.weight.device

    def forward(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch d_model"]:
        """Look up each id; an id outside the vocabulary is an IndexError on the CPU, an assert on a GPU."""
        return self.look_up(tokens, self.weight)


class Dropout(nn.Module):
    """In training each number is set to 0 with probability p, else divided by 1 - p: the mean stays (Srivastava et al.
    2014).

    The numbers are drawn from torch's global generator of x's device.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch"]:
        if not self.training:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self.p)
        return x * kept.div_(1 - self.p)


def make_dropout(p: float) -> nn.Module:
    """A dropout, or an identity for p = 0."""
    return Dropout(p) if p else nn.Identity()
