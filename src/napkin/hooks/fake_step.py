"""A program's own step on fake tensors: twins of its model and optimizer, and the values of its batch.

The program is not changed: the step changes the twins. Tensors of integers and booleans (ids, labels, masks) keep their
values beside the fake ones, so that a step may ask whether a mask is full, or pick what it marks, and is counted as it
runs on this batch. A trace has no values of other numbers: if the step reads one, it reads 1.
"""

import copy
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from napkin.accounting.counting import count, uncompile_parts
from napkin.accounting.known_values import MOST_VALUES, Values
from napkin.accounting.ledger import Ledger
from napkin.errors import NapkinError, first_line
from napkin.hooks.sharded_twin import is_fully_sharded, of_fully_sharded

MOST_SECONDS = 120.0
"""The longest that a step is traced: one that samples until some token comes would never end, as none has a value."""
FEWEST_TRACED = 3
"""The number of micro-batches that are traced; of more equal ones, the others are taken to be like the last but one."""


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

        A DistributedDataParallel module becomes a new one, around the copy, on the ranks of the default process group.
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
    values, said = twins.values, [ledger.assumption]
    if values.read:
        said.append(f"{values.read:,} numbers that the step reads are 1")
    if values.full_masks:
        said.append(f"{values.full_masks:,} masks made of such numbers pick all")
    return replace(ledger, assumption="; ".join(filter(None, said)))


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
