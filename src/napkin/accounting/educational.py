"""The accountant's heart in one file: what `napkin.count` does, without what makes it exact everywhere.

A training step runs on *fake* tensors: they have shapes, number formats and storages, but no data, so nothing is
allocated and nothing is computed. Four observations make a ledger of it:

1.  Every operator that torch calls passes through a `TorchDispatchMode`. Its arguments say how many FLOPs it costs.
2.  A storage is alive from the call that makes it until its last reference is gone. A weak reference reports that
    moment, so births and deaths can be replayed: the largest sum on the way is the peak.
3.  What is alive at the peak has a category: parameters, gradients, optimizer state, activations kept for the backward
    pass, inputs, or temporaries.
4.  An operator takes at least the time of its FLOPs at the device's FLOP/s, and at least the time of its bytes at the
    device's bytes/s: the roofline. The sum over all operators is a lower bound of the step's seconds.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(*(nn.Linear(64, width, bias=False) for width in (64, 64, 1)))
    >>> ledger = educational_ledger(model, torch.zeros(8, 64), torch.optim.AdamW)
    >>> ledger.parameters, ledger.flops, 6 * ledger.parameters * 8
    (8256, 330752, 396288)

The rule of 6 FLOPs per parameter and token is 20% over here, because the first layer needs no gradient of its input.
The rule of 16 bytes per parameter for AdamW in fp32 leaves out activations, inputs and what the update makes:

    >>> 16 * ledger.parameters, ledger.peak_bytes, max(ledger.peak_by_category, key=ledger.peak_by_category.get)
    (132096, 183344, 'optimizer state')

Left out here, and done by the engine (`counting.py`, `recording.py`): scratch that kernels take while they run, CUDA's
kernels and its caching allocator, operators of compiled and divided models, collectives, tables of operators that cost
no FLOPs (an unknown one is reported there, never counted as 0), and measured ceilings in place of a datasheet's.
"""

import copy
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


@dataclass(frozen=True)
class OperatorRow:
    """One call of an operator."""

    operator: str
    phase: str
    """"forward", "backward", "recompute" or "optimizer"."""
    flops: int
    """FLOPs of products of matrices and of attention: a multiply and an add for each triple of indices."""
    bytes_read: int
    bytes_written: int

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The roofline: the longer of computing and of moving bytes.

        >>> product = OperatorRow("mm", "forward", flops=2 * 1024**3, bytes_read=4 * 1024**2, bytes_written=2 * 1024**2)
        >>> f"{1e6 * product.seconds(989.5e12, 3.35e12):.2f} µs, bound by FLOPs"
        '2.17 µs, bound by FLOPs'
        """
        return max(self.flops / flops_per_second, (self.bytes_read + self.bytes_written) / bytes_per_second)


@dataclass(frozen=True)
class EducationalLedger:
    """One training step: a row per operator call, and what was alive when most bytes were."""

    rows: tuple[OperatorRow, ...]
    parameters: int
    peak_bytes: int
    peak_by_category: dict[str, int]

    @property
    def flops(self) -> int:
        """FLOPs of the model: those that activation checkpointing computes again are left out, as MFU has it."""
        return sum(row.flops for row in self.rows if row.phase != "recompute")

    def flops_of(self, phase: str) -> int:
        return sum(row.flops for row in self.rows if row.phase == phase)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """A lower bound of the step's seconds on a device with these ceilings: the sum of its operators' rooflines."""
        return sum(row.seconds(flops_per_second, bytes_per_second) for row in self.rows)


def educational_ledger(
    module: nn.Module, batch: Any, optimizer: Callable[..., torch.optim.Optimizer] | None = None
) -> EducationalLedger:
    """The ledger of one step (forward, loss, backward, update) of `module` on `batch`, a tensor or a tuple of tensors.

    The loss is what `module` returns if that is one number, otherwise its mean. `module` is not touched: a fake copy
    of it is trained. Two steps are traced, and the second is the ledger: the optimizer's state is born in the first.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        twin = fake_copy(module)
        inputs = pytree.tree_map_only(Tensor, lambda x: torch.empty_like(x).requires_grad_(x.requires_grad), batch)
        recorder = Recorder(twin, optimizer(twin.parameters()) if optimizer else None)
        with recorder:
            train_once(twin, inputs, recorder.update)
            recorder.begin()
            train_once(twin, inputs, recorder.update)
            return recorder.ledger()


def train_once(module: nn.Module, inputs: Any, update: Callable[[], None]) -> None:
    """One training step."""
    output = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
    loss = output if output.dim() == 0 else output.float().mean()
    loss.backward()
    update()
    module.zero_grad(set_to_none=True)


def fake_copy(module: nn.Module) -> nn.Module:
    """A copy of `module` with fake parameters and buffers; to be called under a `FakeTensorMode`."""
    memo: dict[int, Any] = {id(buffer): torch.empty_like(buffer, device="cpu") for buffer in module.buffers()}
    for parameter in module.parameters():
        fake = torch.empty_like(parameter, device="cpu")
        memo[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    return copy.deepcopy(module, memo)


# --- 1. FLOPs ---------------------------------------------------------------------------------------------------------


def product_flops(m: int, k: int, n: int, batch: int = 1) -> int:
    """FLOPs of [m, k] times [k, n].

    >>> product_flops(1024, 512, 256)
    268435456
    """
    return 2 * batch * m * k * n


def attention_flops(query: torch.Size, key: torch.Size, value: torch.Size) -> int:
    """FLOPs of attention: the scores, then the values that they weigh. All pairs count, whether masked or not.

    >>> attention_flops(torch.Size([1, 12, 1024, 64]), torch.Size([1, 12, 1024, 64]), torch.Size([1, 12, 1024, 64]))
    3221225472
    """
    *batch, queries, width = query
    return product_flops(queries, width, key[-2], math.prod(batch)) + product_flops(
        queries, key[-2], value[-1], math.prod(batch)
    )


def flops_of(operator: Any, args: tuple, result: Any) -> int:
    """FLOPs of one call; 0 for all that is neither a product of matrices nor attention.

    >>> flops_of(aten.mm, (torch.empty(2, 3), torch.empty(3, 4)), torch.empty(2, 4))
    48
    """
    if operator in (aten.mm, aten.bmm):
        left, right = args[0].shape, args[1].shape
    elif operator in (aten.addmm, aten.baddbmm):
        left, right = args[1].shape, args[2].shape
    elif operator is aten._scaled_dot_product_flash_attention_for_cpu:
        return attention_flops(*(tensor.shape for tensor in args[:3]))
    elif operator is aten._scaled_dot_product_flash_attention_for_cpu_backward:
        # The gradients of query, key, value and probabilities. The scores were not stored, and are computed again:
        # that is recomputation, which is no part of a model's FLOPs.
        return 2 * attention_flops(*(tensor.shape for tensor in args[1:4]))
    else:
        return 0
    m, k = left[-2:]
    return product_flops(m, k, right[-1], left[0] if len(left) == 3 else 1)


# --- 2. The peak ------------------------------------------------------------------------------------------------------


class Storages:
    """The storages that are alive, and the events in which they were born and died."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.category: list[str] = []
        self.alive: dict[int, int] = {}
        """The number of each storage that is alive, by its address."""
        self.references: dict[int, weakref.ref] = {}
        self.begin()

    def begin(self) -> None:
        """Begin the step with what is alive now."""
        self.events: list[tuple[int, int]] = []
        """(number, +1 for a birth or -1 for a death)"""
        self.first_event = 0
        """The first event of the call that runs."""
        self.at_start = set(self.alive.values())

    def follow(self, tensors: Iterable[Tensor], category: str, *, is_new: bool) -> None:
        """Follow the storages of `tensors`; those that are followed keep their category. Views share a storage."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address in self.alive:
                continue
            number = self.alive[address] = len(self.bytes)
            self.bytes.append(storage.nbytes())
            self.category.append(category)
            self.references[number] = weakref.ref(storage, self._on_death(address, number))
            if is_new:
                self.events.append((number, +1))
            else:
                self.at_start.add(number)

    def _on_death(self, address: int, number: int) -> Callable[[weakref.ref], None]:
        def died(_: weakref.ref) -> None:
            del self.alive[address], self.references[number]
            self.events.append((number, -1))

        return died

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Give the storages of `tensors` another category."""
        for tensor in tensors:
            number = self.alive.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.category[number] = category

    def mark_activations(self) -> None:
        """The backward pass begins: what the forward pass made and is still alive, it keeps for the backward pass."""
        for number in set(self.alive.values()) - self.at_start:
            if self.category[number] == "temporaries":
                self.category[number] = "activations"

    def summed_in_place(self) -> None:
        """Autograd adds a gradient to another in place, unless a dispatch mode watches, as here.

        Watched, it makes a third tensor and frees the first. Unwatched, the first has become the sum: its death is put
        before the birth of an equally large one.
        """
        for birth in range(self.first_event, len(self.events)):
            for death in range(birth + 1, len(self.events)):
                (born, is_birth), (dead, is_death) = self.events[birth], self.events[death]
                same_size = self.bytes[born] == self.bytes[dead]
                if (is_birth, is_death) == (+1, -1) and same_size and born in self.alive.values():
                    self.events.insert(birth, self.events.pop(death))
                    return

    def peak(self) -> tuple[int, set[int]]:
        """The most bytes that were alive at once, and the storages that were."""
        alive, now = set(self.at_start), sum(self.bytes[number] for number in self.at_start)
        peak, at_peak = now, set(alive)
        for number, change in self.events:
            now += change * self.bytes[number]
            (alive.add if change > 0 else alive.discard)(number)
            if now > peak:
                peak, at_peak = now, set(alive)
        return peak, at_peak


# --- 3. The step, operator by operator --------------------------------------------------------------------------------

SUMMING = (aten.add, aten.scatter, aten.scatter_add, aten.index_put, aten.index_add)
"""Operators that autograd would call in place if nothing watched."""


@no_type_check
class Recorder(TorchDispatchMode):
    """Sees every operator of a step: its phase, its FLOPs and bytes, and the storages that it makes."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__()
        self.module, self.optimizer = module, optimizer
        self.storages, self.rows = Storages(), []
        self.in_optimizer, self.phase, self.sums = False, "forward", False
        self.storages.follow([*module.parameters(), *module.buffers()], "parameters", is_new=False)

    def update(self) -> None:
        """The optimizer's step, whose operators are told apart from the next forward pass by this."""
        if self.optimizer is not None:
            self.in_optimizer = True
            self.optimizer.step()
            self.in_optimizer = False

    def begin(self) -> None:
        """The step to be counted begins: all that the optimizer has made and kept is its state."""
        self._end_call()
        if self.optimizer is not None:
            state = [x for x in pytree.tree_leaves(dict(self.optimizer.state)) if isinstance(x, Tensor)]
            self.storages.mark(state, "optimizer state")
        self.rows.clear()
        self.phase = "forward"
        self.storages.begin()

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._end_call()
        phase = self._phase_now()
        if self.phase == "forward" and phase in ("backward", "recompute"):
            self.storages.mark_activations()
        elif phase == "optimizer" != self.phase:
            self.storages.mark([p.grad for p in self.module.parameters() if p.grad is not None], "gradients")
        self.phase = phase
        inputs = tensors_in((args, kwargs))
        self.storages.follow(inputs, "inputs", is_new=False)
        result = operator(*args, **(kwargs or {}))
        outputs = tensors_in(result)
        packet = operator.overloadpacket
        self.sums = phase == "backward" and packet in SUMMING and bool(inputs) and not inputs[0]._is_view()
        self.storages.first_event = len(self.storages.events)
        self.storages.follow(outputs, "temporaries", is_new=True)
        known = {tensor.untyped_storage()._cdata for tensor in inputs}
        is_view = bool(outputs) and all(output.untyped_storage()._cdata in known for output in outputs)
        if not is_view:
            read, written = (sum(tensor.nbytes for tensor in group) for group in (inputs, outputs))
            flops = flops_of(packet, args, result)
            self.rows.append(OperatorRow(packet.__name__, phase, flops, read, written))
        return result

    def _end_call(self) -> None:
        """Book what dies between the end of one call and the beginning of the next as part of the first."""
        if self.sums:
            self.storages.summed_in_place()
        self.sums = False

    def _phase_now(self) -> str:
        if torch._C._current_graph_task_id() != -1:
            # A backward pass builds no graph. What builds one inside of it is a forward pass that runs again, because
            # activation checkpointing has kept nothing of it.
            return "recompute" if torch.is_grad_enabled() else "backward"
        return "optimizer" if self.in_optimizer else "forward"

    def ledger(self) -> EducationalLedger:
        """The ledger of the step that began at `begin`."""
        self._end_call()
        peak, at_peak = self.storages.peak()
        by_category: Counter[str] = Counter()
        for number in at_peak:
            by_category[self.storages.category[number]] += self.storages.bytes[number]
        return EducationalLedger(
            tuple(self.rows), sum(p.numel() for p in self.module.parameters()), peak, dict(by_category)
        )


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
