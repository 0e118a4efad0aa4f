"""What every optimizer here shares: fp32 state, a counted step, buckets, and the forms of one update."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.optim.host_state import fetch, host_copy, put_back
from napkin.optim.parameter_groups import decay_groups
from napkin.optim.rounding import StochasticRounding
from napkin.optim.shards import gathered, is_sharded, like, local, rows_of

Group = dict[str, Any]

_BUCKET_NUMEL = 2**20
_WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Forms:
    """One update rule, up to three times, with the same numbers.

    `readable(parameter, gradient, *state, group)` is the rule as one would write it, for one tensor, and the
    specification of the others. `foreach` takes lists in place of tensors and does each operation once for all of
    them: on a GPU one launch instead of one a tensor. `fused` takes the same lists to torch's own kernel, which
    reads and writes each number once; where torch has none, it is None.

    All change parameter and state in place, and leave the gradient as it is.
    """

    readable: Callable[..., None]
    foreach: Callable[..., None]
    fused: Callable[..., None] | None = None

    def pick(self, form: str) -> Callable[..., None]:
        """The form of that name, on lists; foreach stands in for a kernel that does not exist."""
        if form == "readable":
            return self._one_by_one
        return self.fused if form == "fused" and self.fused else self.foreach

    def _one_by_one(self, *lists: Any) -> None:
        *tensors, group = lists
        for one in zip(*tensors, strict=True):
            self.readable(*one, group)


class Optimizer(torch.optim.Optimizer):
    """The base of napkin's optimizers.

    State: `state[parameter]` holds tensors, fp32 whatever the parameter's dtype, because a bf16 average stops moving
    once its updates fall below its resolution. They are born at the first step with a gradient. `group["step"]` is
    the number of steps taken, a Python int: exact after a restart, stored with the group's other numbers, and never a
    reason to wait for a GPU. It counts for the whole group; a parameter without a gradient sits the step out.

    A step works in buckets: as many whole tensors as hold 2^20 numbers together, or one that is larger alone.
    Temporary memory is that of one bucket: 4 bytes per number where the rule needs an intermediate result, and 8 more
    to widen parameters and gradients narrower than fp32; the parameter then takes the fp32 result, rounded once.

    `foreach=False` is the readable form, `fused=True` torch's kernel: see `Forms`.

    The learning rate is read from `group["lr"]` at each step: a schedule writes it there.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    """The state's tensors, each in the parameter's shape."""

    forms: ClassVar[Forms]

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        defaults: Group,
        *,
        foreach: bool = True,
        fused: bool = False,
    ) -> None:
        if fused and self.forms.fused is None:
            raise NapkinError(f"fused is True, but there is no fused kernel for {type(self).__name__}: leave it out")
        super().__init__(params, {**defaults, "step": 0})
        for group in self.param_groups:
            refuse_impossible(group)
        self.form = "fused" if fused else "foreach" if foreach else "readable"
        self.rounding: StochasticRounding | None = None
        """How parameters narrower than fp32 take their update; None rounds to the nearest."""
        self.state_on_host = False
        """Whether state that is born from now on lives in the host's memory, page-locked, and visits the GPU."""

    @classmethod
    def for_model(cls, model: nn.Module, *, weight_decay: float, products: torch.dtype, **settings: Any) -> "Optimizer":
        """The optimizer of a model's parameters, in the groups that suit it.

        `products` is the format of matrix products, for a rule that has some.
        """
        return cls(decay_groups(model, weight_decay), **settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; with a closure, call it first and return its loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] += 1
            self.update_group([p for p in group["params"] if p.grad is not None], group)
        return loss

    def update_group(self, parameters: list[Tensor], group: Group) -> None:
        """Apply the rule to those of a group's parameters that have a gradient."""
        for bucket in buckets(parameters):
            self.apply(self.forms, bucket, group)

    def apply(self, forms: Forms, parameters: list[Tensor], group: Group, *, whole: bool = False) -> None:
        """Apply one rule to one bucket, in fp32; of sharded tensors, to the rows that are here.

        A rule that looks at tensors as a `whole` has sharded ones gathered, and of what it makes the own rows are kept.
        """
        # A model of a few million numbers is updated in a millisecond: what is done for each tensor counts.
        states = [list(self.state_in(group, p).values()) for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        at_hand, rows = parameters, []
        sharded = is_sharded(parameters[0])
        whole = whole and sharded
        if sharded:
            seen = gathered if whole else local
            states = [list(map(local, state)) for state in states]
            gradients = list(map(seen, gradients))
            rows = [slice(*rows_of(p)) for p in parameters] if whole else []
            parameters, at_hand = list(map(local, parameters)), list(map(seen, parameters))
        # Nothing that is wide already is copied: in fp32 these are the parameters and gradients themselves.
        narrow = any(p.dtype not in _WIDE for p in at_hand)
        wide = [p.to(wide_dtype(p)) for p in at_hand] if narrow else at_hand
        if any(gradient.dtype != w.dtype for gradient, w in zip(gradients, wide, strict=True)):
            gradients = [gradient.to(w.dtype) for gradient, w in zip(gradients, wide, strict=True)]
        at_work = fetch(states, parameters[0].device) if self.state_on_host else states
        forms.pick(self.form)(wide, gradients, *map(list, zip(*at_work, strict=True)), group)
        if self.state_on_host:
            put_back(states, at_work)
        if whole:
            wide = [tensor[own] for tensor, own in zip(wide, rows, strict=True)]
        if narrow and self.rounding is not None:
            self.rounding(parameters, wide)
        elif narrow or whole:
            torch._foreach_copy_(parameters, wide)  # pyright: ignore[reportPrivateImportUsage]

    def new_state(self, parameter: Tensor, group: Group) -> dict[str, Tensor]:
        """A parameter's state before its first step: zeros."""
        return {name: zeros_wide(parameter) for name in self.state_names}

    def state_in(self, group: Group, parameter: Tensor) -> dict[str, Tensor]:
        """A parameter's state, made where there is none yet."""
        state = self.state[parameter]
        if not state:
            state |= self._at_home(self.new_state(parameter, group))
        return state

    def all_state(self) -> dict[Tensor, dict[str, Tensor]]:
        """The state of every parameter, made where there is none yet: what a checkpoint holds."""
        return {p: self.state_in(group, p) for group in self.param_groups for p in group["params"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over state and settings of another optimizer over the same parameters, in the same order."""
        super().load_state_dict(state_dict)
        # The base class has cast the state to the parameters' dtypes.
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, saved in state_dict["state"].items():
            p = parameters[index]
            state = {name: tensor.to(p.device, wide_dtype(p), copy=True) for name, tensor in saved.items()}
            self.state[p] = self._at_home(state)

    def _at_home(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        if not self.state_on_host:
            return state
        return {name: like(tensor, host_copy(local(tensor))) for name, tensor in state.items()}


def buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of parameters of at most 2^20 numbers together, or of one parameter.

    A bucket bounds the temporary memory, and keeps what a CPU reads seven times over in its cache: AdamW takes 7 ms
    for 4.3 million parameters so, and 12 ms at once.
    """
    bucket: list[Tensor] = []
    numel = 0
    for parameter in parameters:
        more = parameter.numel()
        if bucket and numel + more > _BUCKET_NUMEL:
            yield bucket
            bucket, numel = [], 0
        bucket.append(parameter)
        numel += more
    if bucket:
        yield bucket


def zeros_wide(parameter: Tensor) -> Tensor:
    """Zeros like a parameter, in fp32 or wider."""
    return torch.zeros_like(parameter, dtype=wide_dtype(parameter))


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """The format that a parameter is updated in."""
    return torch.promote_types(parameter.dtype, torch.float32)


def counted(group: Group, parameters: list[Tensor]) -> list[Tensor]:
    """The group's step as the fused kernels want it: a number in a tensor, beside each parameter."""
    return [torch.full((), float(group["step"]), device=parameters[0].device)] * len(parameters)


def refuse_impossible(group: Group) -> None:
    """Raise NapkinError where a group's settings are outside of what the rules are defined for."""
    for name in ("lr", "eps", "weight_decay"):
        if name in group and not group[name] >= 0:
            raise NapkinError(f"{name} is {group[name]}: use 0 or more")
    for name in ("momentum", "beta2"):
        if name in group and not 0 <= group[name] < 1:
            raise NapkinError(f"{name} is {group[name]}: use 0 to below 1")
    if "clip" in group and not group["clip"] > 0:
        raise NapkinError(f"clip is {group['clip']}: use more than 0")
    for beta in group.get("betas", ()):
        if not 0 <= beta < 1:
            raise NapkinError(f"betas are {group['betas']}: use two numbers from 0 to below 1")
