"""A program's own step on fake tensors: twins of its model and optimizer, and the values of its batch.

Nothing of the program is changed: what the step changes are the twins. Tensors of integers and booleans (ids, labels,
masks) keep their values beside the fake ones, so that a step may ask whether a mask is full, or pick what it marks, and
is counted as it runs on this batch. Of other numbers a trace has no values: where the step reads one, it reads a 1.
"""

import contextlib
import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, no_type_check
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from napkin.accounting.counting import count, uncompile_parts
from napkin.accounting.ledger import Ledger
from napkin.errors import NapkinError, first_line
from napkin.hooks.sharded_twin import is_fully_sharded, of_fully_sharded

aten = torch.ops.aten

MOST_VALUES = 2**20
"""The most elements of a tensor whose values are kept beside the fake one."""
MOST_SECONDS = 120.0
"""The longest that a step is traced: one that samples until some token comes would never end, as none has a value."""
FEWEST_TRACED = 3
"""Micro-batches that are traced; of more that are alike, the others are like the last but one."""


class Twins:
    """Fake copies of a program's objects; what they share, their twins share."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.values = Values()
        self.warm_up = 1
        """Steps that are traced before the one that is counted: DDP makes its buckets anew in the second."""
        self._storages: dict[int, Tensor] = {}
        self._memo: dict[int, Any] = {}
        self._kept: list[Any] = []

    def of_module(self, module: nn.Module) -> nn.Module:
        """A copy of `module` with fake parameters and buffers. Raises NapkinError where it cannot be copied.

        Of DistributedDataParallel it is one of its own, around the copy, on the ranks of the default process group.
        """
        if isinstance(module, DistributedDataParallel):
            inner = self.of_module(module.module)
            self.warm_up = 2
            with self.mode:
                return DistributedDataParallel(
                    inner,
                    broadcast_buffers=module.broadcast_buffers,
                    bucket_cap_mb=max(1, module.bucket_bytes_cap // 2**20),
                    find_unused_parameters=module.find_unused_parameters,
                    gradient_as_bucket_view=module.gradient_as_bucket_view,
                    static_graph=module.static_graph,
                )
        sharded = is_fully_sharded(module)
        with self.mode, _no_copy_of(module):
            for buffer in module.buffers():
                self._fake(buffer)
            for parameter in module.parameters():
                if id(parameter) not in self._memo and not sharded:
                    fake = self._of_storage(parameter)
                    self._memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
            if sharded:
                twin = of_fully_sharded(module, partial(self._copy, module), self._memo)
            else:
                twin = uncompile_parts(self._copy(module))
        twin.zero_grad(set_to_none=True)
        return twin

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """A copy of the optimizer for the twins of its parameters, with a fake copy of its state."""
        with self.mode:
            for tensor in pytree.tree_leaves(list(optimizer.state.values())):
                if isinstance(tensor, Tensor):
                    self._fake(tensor)
            return self._copy(optimizer)

    def of_batch(self, batch: Any) -> Any:
        """The batch with fake tensors, on the CPU; of those of integers and booleans, the values are remembered."""

        def fake(tensor: Tensor) -> Tensor:
            with self.mode:
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex and tensor.numel() <= MOST_VALUES:
                self.values.remember(made, tensor.detach().cpu().clone())
            return made

        return pytree.tree_map_only(Tensor, fake, batch)

    def replaced(self, original: object, twin: object) -> None:
        """Let copies made from now on refer to `twin` where they refer to `original`."""
        self._memo[id(original)] = twin
        self._kept.append(original)

    def _copy(self, value: Any) -> Any:
        try:
            return copy.deepcopy(value, self._memo)
        except NapkinError:
            raise
        except Exception as error:
            raise NapkinError(f"{type(value).__name__} cannot be copied ({first_line(error)})") from error

    def _fake(self, tensor: Tensor) -> None:
        if id(tensor) not in self._memo:
            self._memo[id(tensor)] = self._of_storage(tensor)

    def _of_storage(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)  # an id is one object's as long as that lives
        if type(tensor) not in (Tensor, nn.Parameter):
            raise NapkinError(
                f"a tensor is a {type(tensor).__name__}, of which a trace of one process knows too little"
            )
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
        numbers = self._storages[storage._cdata].view(tensor.dtype)
        return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def count_fake_step(
    twins: Twins,
    module: nn.Module,
    step: Callable[[Sequence[Any]], Any],
    micro_batches: Sequence[Any],
    *,
    on_cuda: bool,
) -> Ledger:
    """Count `step`, a function of the micro-batches that trains the twin `module` once.

    Of more than three micro-batches whose tensors have the same shapes, three are traced. The global random states are
    left as they were. Raises NapkinError where the step fails on fake tensors.
    """
    more = 0
    if len({signature_of(each) for each in micro_batches}) == 1:
        more = max(0, len(micro_batches) - FEWEST_TRACED)
    traced, held = micro_batches[: len(micro_batches) - more], micro_batches
    fakes = [twins.of_batch(each) for each in held]
    deadline = time.monotonic() + MOST_SECONDS

    def stop_in_time(n_calls: int) -> None:
        if time.monotonic() > deadline:
            raise NapkinError(f"the step was traced for {MOST_SECONDS:.0f} s, {n_calls:,} operators, without an end")

    with random_states_kept(), twins.mode, twins.values:
        try:
            ledger = count(
                module,
                fakes,
                lambda _, batches: step(batches[: len(traced)]),
                target="cuda" if on_cuda else "cpu",
                warm_up=twins.warm_up,
                progress=stop_in_time,
            )
        except NapkinError:
            raise
        except Exception as error:
            raise NapkinError(
                f"the step fails on fake tensors ({type(error).__name__}: {first_line(error)})"
            ) from error
    if more:
        ledger = ledger.with_more_micro_batches(more)
    read = twins.values.read
    if read:
        said = f"{read:,} numbers that the step reads are 1"
        ledger = replace(ledger, assumption="; ".join(filter(None, (ledger.assumption, said))))
    return ledger


Signature = tuple[tuple[tuple[int, ...], str], ...]
"""Shapes and number formats of the tensors of a batch: steps of the same signature do the same work."""


def signature_of(batch: Any) -> Signature:
    return tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))


def tokens_of(batch: Any) -> int:
    """Tokens of a batch: elements of its first tensor of integers; 0 where it has none, or they have no positions."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dtype in (torch.int64, torch.int32) and leaf.dim() >= 2:
            return leaf.numel()
    return 0


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put back the random states of Python, NumPy and torch, on all devices that are in use."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


# Runs for every operator of a step: the type checks that are on during tests would take half of their time.
@no_type_check
class Values(TorchDispatchMode):
    """The values of fake tensors of integers and booleans, as far as operators compute them from such alone."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0
        """How many numbers were read whose value is not known."""
        self._fakes: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._real: dict[int, Tensor] = {}

    def remember(self, fake: Tensor, real: Tensor) -> None:
        if len(self._real) > 2 * len(self._fakes) + 64:
            self._real = {key: value for key, value in self._real.items() if key in self._fakes}
        self._fakes[id(fake)] = fake
        self._real[id(fake)] = real

    def of(self, fake: Tensor) -> Tensor | None:
        return self._real.get(id(fake)) if self._fakes.get(id(fake)) is fake else None

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        if operator is aten._local_scalar_dense.default:
            return self._number(args[0])
        if operator is aten.index.Tensor and any(each is not None and each.dtype == torch.bool for each in args[1]):
            args = (args[0], self._positions(args[1]), *args[2:])
        real = self._compute(operator, args, kwargs)
        if real is not None and operator.overloadpacket in (aten.nonzero, aten.masked_select, aten.unique_consecutive):
            result = pytree.tree_map_only(Tensor, lambda each: torch.empty_like(each, device="cpu"), real)
        else:
            result = operator(*args, **kwargs)
        if real is not None:
            for fake, value in zip(pytree.tree_leaves(result), pytree.tree_leaves(real), strict=False):
                if isinstance(fake, Tensor) and isinstance(value, Tensor) and value.shape == fake.shape:
                    self.remember(fake, value)
        return result

    def _number(self, fake):
        real = self.of(fake)
        if real is not None:
            with _disable_current_modes():
                return real.item()
        with contextlib.suppress(DataDependentOutputException):
            # Of a number that Python gave, such as an optimizer's count of steps, the fake tensor knows the value.
            return aten._local_scalar_dense.default(fake)
        self.read += 1
        if fake.dtype == torch.bool:
            return False
        return 1 if not fake.dtype.is_floating_point else 1.0

    def _positions(self, indices):
        """Masks of known values as the positions that they mark: their number is the shape of what is picked."""
        found = []
        for index in indices:
            real = None if index is None or index.dtype != torch.bool else self.of(index)
            if real is None:
                found.append(index)
                continue
            with _disable_current_modes():
                positions = real.nonzero(as_tuple=True)
            for each in positions:
                found.append(torch.empty(each.shape, dtype=torch.int64, device="cpu"))
                self.remember(found[-1], each)
        return found

    def _compute(self, operator, args, kwargs):
        """What the operator computes of known values; None where it is given others, or makes a large or real one."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if operator.namespace != "aten" or not (tensors or operator.overloadpacket in _MAKING):
            return None
        found = [self.of(tensor) for tensor in tensors]
        values = [value for value in found if value is not None]
        if len(values) < len(tensors) or sum(value.numel() for value in values) > MOST_VALUES:
            if operator._schema.is_mutable and found[0] is not None:
                self._forget(found[0])
            return None
        known = {id(tensor): value for tensor, value in zip(tensors, values, strict=True)}
        real_args, real_kwargs = pytree.tree_map_only(Tensor, lambda tensor: known[id(tensor)], (args, kwargs))
        if "device" in real_kwargs:
            real_kwargs["device"] = torch.device("cpu")
        with _disable_current_modes(), contextlib.suppress(RuntimeError, NotImplementedError):
            real = operator(*real_args, **real_kwargs)
            leaves = [leaf for leaf in pytree.tree_leaves(real) if isinstance(leaf, Tensor)]
            return real if tensors or not any(leaf.dtype.is_floating_point for leaf in leaves) else None
        return None

    def _forget(self, changed):
        """Something unknown was written to a known tensor: its views are not known either."""
        storage = changed.untyped_storage()._cdata
        for key in [key for key, real in self._real.items() if real.untyped_storage()._cdata == storage]:
            del self._real[key]


_MAKING = {aten.arange, aten.full, aten.zeros, aten.ones, aten.scalar_tensor}


@contextmanager
def _no_copy_of(module: nn.Module) -> Iterator[None]:
    """Keep gradients out of copies: the twins begin a step without."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters() if parameter.grad is not None]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def is_on_cuda(parameters: Iterable[Tensor]) -> bool:
    return any(parameter.device.type == "cuda" for parameter in parameters)
