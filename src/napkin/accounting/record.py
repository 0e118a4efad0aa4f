"""Watches a training step, operator by operator, and writes its ledger; on fake tensors or on real ones.

Memory is followed by storage, not by tensor: views share a storage and count once, and a storage is alive until
its last reference is gone, wherever it is held (a variable, the autograd graph, autocast's cache). A storage keeps
its Python object for as long as it lives, so that a weak reference to it reports its end exactly.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr  # pyright: ignore[reportMissingImports]
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.accounting.ledger import Category, Ledger, Phase, Row
from napkin.accounting.operators import UnknownOperator, work_of
from napkin.accounting.scratch import scratch_bytes

aten = torch.ops.aten

FORMATS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8-e4m3",
    torch.float8_e5m2: "fp8-e5m2",
    torch.int8: "int8",
}


def record(module: nn.Module, step: Callable[[], Any], *, warm_up: int = 0) -> Ledger:
    """Run `step` `warm_up` + 1 times and return the ledger of the last run.

    `step` trains `module` once. One step of warm-up shows the steady state: the optimizer's state is born in the
    first step, after its peak.
    """
    recorder = _Recorder(module)
    with recorder.attached():
        for _ in range(warm_up):
            step()
        recorder.begin()
        step()
        return recorder.ledger()


@dataclass(slots=True)
class _Draft:
    """A row before it is known what outlives the forward pass."""

    fields: dict[str, Any]
    sums_gradients: bool
    """Whether this is autograd adding two gradients that meet. It adds into the first if nobody else holds it (a view
    holds its base); except under a watch like this one, where it makes a third and then lets the first go."""
    allocated: list[int] = field(default_factory=list)
    kept: int = 0


@dataclass(slots=True)
class _Storage:
    """What is known of one storage."""

    bytes: int
    category: Category
    draft: _Draft | None
    phase: Phase | None


class _Recorder(TorchDispatchMode):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.parameters = list(module.parameters())
        self.paths = {id(child): name for name, child in module.named_modules()}
        self.stack: list[str] = []
        self.path_of_node: dict[int, str] = {}
        self.storages: list[_Storage] = []
        self.alive: dict[int, int] = {}  # address of the storage -> its number
        self.references: dict[int, weakref.ref] = {}
        self.in_optimizer = self.seen_backward = False
        self.previous_phase: Phase = "forward"
        self.recording = False
        self.drafts: list[_Draft] = []
        self.events: list[tuple[int, int, int]] = []  # (row, storage, bytes gained or lost)
        self.reusing: set[int] = set()  # events that unwatched would follow the next one
        self.unknown: dict[str, int] = {}
        self.claim((*self.parameters, *module.buffers()))

    @contextmanager
    def attached(self) -> Iterator[None]:
        hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self) -> None:
        """Forget the rows so far; what is alive stays, and is what the step starts from."""
        self.drafts, self.events, self.reusing, self.unknown = [], [], set(), {}
        self._claim_gradients()
        self.recording, self.seen_backward, self.previous_phase = True, False, "forward"
        for number in self.alive.values():
            self.storages[number].draft = None
        self.start_bytes = sum(self.storages[number].bytes for number in self.alive.values())
        self.start_alive = set(self.alive.values())

    def ledger(self) -> Ledger:
        self._claim_gradients()
        rows = tuple(
            Row(**draft.fields, bytes_allocated=sum(draft.allocated), bytes_kept=draft.kept) for draft in self.drafts
        )
        peak, timeline, alive = self._replay(self._unwatched())
        return Ledger(
            rows=rows,
            parameters=sum(parameter.numel() for parameter in self.parameters),
            peak_bytes=peak,
            resident_bytes=self.start_bytes,
            peak_by_category=self._by_category(alive),
            timeline=timeline,
            unknown_operators=dict(self.unknown),
            watch_bytes=self._replay(self.events)[0] - peak,
        )

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if operator.namespace in ("prim", "profiler"):
            return operator(*args, **kwargs)
        phase = self._phase()
        if phase != self.previous_phase:
            self._turn(phase)
        inputs = list(_tensors((args, kwargs)))
        self.claim(inputs, "inputs")
        try:
            result = operator(*args, **kwargs)
        except DataDependentOutputException:
            # GradScaler asks whether a gradient overflowed, which fake tensors cannot say. In the usual step none does.
            if not _runs_in("torch.amp.grad_scaler"):
                raise
            result = 0.0
        outputs = list(_tensors(result))
        sums_gradients = phase == "backward" and operator is aten.add.Tensor and not inputs[0]._is_view()
        draft = _Draft(self._describe(operator, args, kwargs, inputs, result, outputs, phase), sums_gradients)
        self.drafts.append(draft)
        self.claim(outputs, "temporaries", draft, phase)
        if inputs and inputs[0].device.type == "cpu":
            self._take_and_give_back(scratch_bytes(operator, args, kwargs, inputs))
        return result

    def claim(
        self,
        tensors: Iterable[Tensor],
        category: Category = "parameters",
        draft: _Draft | None = None,
        phase: Phase | None = None,
    ) -> None:
        """Follow the storages of `tensors` that are not followed yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address in self.alive:
                continue
            number = len(self.storages)
            size = storage.nbytes()
            self.storages.append(_Storage(size, category, draft, phase))
            self.alive[address] = number
            self.references[number] = weakref.ref(storage, lambda _, a=address, n=number: self._freed(a, n))
            if self.recording:
                if draft is None:
                    # Made outside of any operator seen here: it was there before the step.
                    self.start_bytes += size
                    self.start_alive.add(number)
                else:
                    draft.allocated.append(size)
                    self.events.append((len(self.drafts) - 1, number, size))

    def _take_and_give_back(self, size: int) -> None:
        if self.recording and size:
            number, row = len(self.storages), len(self.drafts) - 1
            self.storages.append(_Storage(size, "temporaries", None, None))
            self.events += [(row, number, size), (row, number, -size)]

    def _freed(self, address: int, number: int) -> None:
        del self.alive[address], self.references[number]
        if not self.recording:
            return
        row, size = len(self.drafts) - 1, self.storages[number].bytes
        if self.drafts and self.drafts[-1].sums_gradients and self.events and self.events[-1][::2] == (row, size):
            self.reusing.add(len(self.events) - 1)
        self.events.append((row, number, -size))

    def _phase(self) -> Phase:
        if torch._C._current_graph_task_id() != -1:
            # Checkpointing computes a forward pass again; without it, a graph is built here for second derivatives.
            again = torch.is_grad_enabled() and _runs_in("torch.utils.checkpoint")
            return "recompute" if again else "backward"
        # What runs after a backward pass, outside of modules and without a graph, belongs to the update: clipping, say.
        updates = self.seen_backward and not self.stack and not torch.is_grad_enabled()
        return "optimizer" if self.in_optimizer or updates else "forward"

    def _turn(self, phase: Phase) -> None:
        was_backward, is_backward = (name in ("backward", "recompute") for name in (self.previous_phase, phase))
        if is_backward and not was_backward:
            self._mark_kept()
        elif was_backward and not is_backward:
            self._claim_gradients()
        self.seen_backward |= is_backward
        self.previous_phase = phase

    # Hooks return None: anything else would replace the arguments or the output of the module.
    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self.stack.append(self.paths.get(id(module), type(module).__name__))

    def _leave_module(self, *_: Any) -> None:
        self.stack.pop()

    def _enter_optimizer(self, *_: Any) -> None:
        self.in_optimizer = True

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.in_optimizer = False
        self._reclaim(_tensors(list(optimizer.state.values())), "optimizer state")

    def _mark_kept(self) -> None:
        """The backward pass begins: what the forward pass made and is still alive was kept for it."""
        for number in self.alive.values():
            storage = self.storages[number]
            if storage.phase == "forward" and storage.draft is not None and storage.category == "temporaries":
                storage.category = "activations"
                storage.draft.kept += storage.bytes

    def _claim_gradients(self) -> None:
        gradients = (parameter.grad for parameter in self.parameters)
        self._reclaim((gradient for gradient in gradients if gradient is not None), "gradients")

    def _reclaim(self, tensors: Iterable[Tensor], category: Category) -> None:
        """Say what storages turned out to be."""
        for tensor in tensors:
            number = self.alive.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self.storages[number].category = category

    def _module_path(self, phase: Phase) -> str:
        """The forward pass notes which module made which autograd node; the backward pass looks it up.

        A node takes its sequence number just before its operator runs, and keeps it; an operator that makes no node
        finds the number of the last one.
        """
        if phase == "backward":
            node = torch._C._current_autograd_node()
            return self.path_of_node.get(node._sequence_nr(), "") if node is not None else ""
        path = self.stack[-1] if self.stack else ""
        if phase in ("forward", "recompute"):
            self.path_of_node.setdefault(_get_sequence_nr() - 1, path)
        return path

    def _describe(
        self, operator: Any, args: tuple, kwargs: dict, inputs: list, result: Any, outputs: list, phase: Phase
    ) -> dict[str, Any]:
        try:
            work = work_of(operator, args, kwargs, result)
        except UnknownOperator as unknown:
            work = None
            self.unknown[str(unknown)] = self.unknown.get(str(unknown), 0) + 1
        moves = not _is_view_call(inputs, outputs)
        mutated = sum(_bytes(tensor) for tensor in _mutated(operator, args, kwargs)) if not outputs else 0
        sample = (inputs if work else outputs or inputs)[:1]
        return {
            "module": self._module_path(phase),
            "phase": phase,
            "operator": operator.overloadpacket.__name__,
            "format": FORMATS.get(sample[0].dtype, str(sample[0].dtype).removeprefix("torch.")) if sample else "",
            "flops": work.flops if work else 0,
            "causal_flops": work.causal_flops if work else 0,
            "recomputed_flops": work.recomputed_flops if work else 0,
            "contraction": work.contraction if work else None,
            "bytes_read": sum(map(_bytes, inputs)) if moves else 0,
            "bytes_written": (sum(map(_bytes, outputs)) if moves else 0) + mutated,
        }

    def _replay(self, events: list[tuple[int, int, int]]) -> tuple[int, tuple[tuple[int, int], ...], set[int]]:
        """Follow the events once to find the peak, once more up to it to see what was alive there."""
        bytes_alive = peak = self.start_bytes
        peak_event = 0
        timeline: dict[int, int] = {}
        for event, (row, _, change) in enumerate(events, start=1):
            bytes_alive += change
            timeline[row] = max(timeline.get(row, 0), bytes_alive)
            if bytes_alive > peak:
                peak, peak_event = bytes_alive, event
        alive = set(self.start_alive)
        for _, number, change in events[:peak_event]:
            (alive.add if change >= 0 else alive.discard)(number)
        return peak, tuple(timeline.items()), alive

    def _unwatched(self) -> list[tuple[int, int, int]]:
        """The events as they come without the watch."""
        events = list(self.events)
        for first in self.reusing:
            events[first : first + 2] = reversed(events[first : first + 2])
        return events

    def _by_category(self, alive: set[int]) -> dict[Category, int]:
        sums: dict[Category, int] = {}
        for storage in (self.storages[number] for number in alive):
            sums[storage.category] = sums.get(storage.category, 0) + storage.bytes
        return sums


def _runs_in(module_name: str) -> bool:
    """Whether a function of that module is among those that called."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module_name:
        frame = frame.f_back
    return frame is not None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_view_call(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    """Whether the call only looked at a storage in another way: nothing was read, nothing written."""
    shared = {tensor.untyped_storage()._cdata for tensor in inputs}
    return bool(outputs) and all(
        output.untyped_storage()._cdata in shared and not any(output is tensor for tensor in inputs)
        for output in outputs
    )


def _mutated(operator: Any, args: tuple, kwargs: dict) -> Iterator[Tensor]:
    """The tensors that an operator without outputs writes into (the foreach family)."""
    for position, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from _tensors(value)
