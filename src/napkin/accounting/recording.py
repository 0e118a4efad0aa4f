"""Records a training step, operator by operator, as a ledger; on fake tensors or on real ones.

It also sees what changes storages without being an operator: resizing, and waiting for a collective. Each call is
attributed to a module and a component (`napkin.accounting.attribution`). The programs of torch.compile tell it what
they allocate and which kernels they run (`napkin.accounting.compiled.listening`).
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, no_type_check
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.accounting.attribution import Attribution
from napkin.accounting.call_tensors import is_view_call, mutated_tensors, sums_gradients, tensors_in
from napkin.accounting.collectives import collective_of, needs_other_ranks, waits_unseen
from napkin.accounting.compiled.listening import Kernel, Origin, listening
from napkin.accounting.contractions import BATCHED_PRODUCTS, FUSED_ATTENTION, MATRIX_PRODUCTS
from napkin.accounting.cuda.scratch import cuda_scratch_bytes, workspace_bytes
from napkin.accounting.custom_operators import OperatorWork, declared_work
from napkin.accounting.ledger import Ledger, Phase, Row
from napkin.accounting.memory import Memory, resizes_told, tensors_alive
from napkin.accounting.microbenchmark import EVEN_ROUTING, FakeCalls, call_of, runs_in
from napkin.accounting.operators import UnknownOperator, elementwise_flops_of, is_composite, is_no_contraction, work_of
from napkin.accounting.scratch import (
    DEPENDS_ON_VALUES,
    hides_products,
    keep_measured,
    measured_scratch,
    resize_results,
    scratch_bytes,
)
from napkin.hardware.target import CudaTarget
from napkin.kernels.operators import computes_early_gradient
from napkin.optim.saved_state import local
from napkin.tensors import FORMAT_OF

aten = torch.ops.aten

_DEVICE = torch.ops.prim.device.default
CALLS_BETWEEN_PROGRESS = 500

_GATHERING = "torch.distributed.fsdp._fully_shard._fsdp_state"
"""Before a module's forward pass FSDP2 gathers its parameters, without a graph."""


def record(
    module: nn.Module,
    step: Callable[[], Any],
    *,
    warm_up: int | Callable[[], Any] = 0,
    cuda: CudaTarget | None = None,
    progress: Callable[[int], None] | None = None,
) -> Ledger:
    """Run `step` `warm_up` + 1 times and return the ledger of the last run.

    `step` trains `module` once. One step of warm-up leads to the steady state: the first step creates the optimizer's
    state, after its own peak; a function that leaves the same may stand for it. With `cuda`, memory is that of this
    device: blocks of its caching allocator. `progress` is called now and then with the number of operator calls so far.
    """
    recorder = Recorder(module, cuda, progress)
    with recorder.attached():
        if isinstance(warm_up, int):
            for _ in range(warm_up):
                step()
                recorder.forget_compiling()
        else:
            warm_up()
            recorder.take_workspaces()
        recorder.begin()
        step()
        ledger = recorder.ledger()
    keep_measured()
    return ledger


@contextmanager
def recording(module: nn.Module, keep: Callable[[Ledger, Memory], Any]) -> Iterator[None]:
    """Record the block as one training step of `module`; unless it raises, `keep` gets its ledger and its storages.

    Tensors from before the block count as long as they are alive, like gradients that are cleared at the beginning;
    those that the block neither uses nor frees do not count.
    """
    recorder = Recorder(module, None)
    with recorder.attached():
        recorder.begin(follow_all=True)
        yield
        ledger = recorder.ledger()
        keep(ledger, recorder.memory)


# Runs for every operator of a step: the type checks that are on during tests would take half of their time.
@no_type_check
class Recorder(TorchDispatchMode):
    """Records a step of a module; `record` and `recording` use one, and scripts whose module is found later."""

    supports_higher_order_operators = True

    def __init__(
        self, module: nn.Module, cuda: CudaTarget | None, progress: Callable[[int], None] | None = None
    ) -> None:
        super().__init__()
        self.progress, self.n_calls = progress, 0
        self.cuda = cuda
        self.multiplied: set[bool] = set()  # threads that have called cuBLAS: True is autograd's
        self.module = module
        self.parameters = list(module.parameters())
        on_cpu = all(parameter.device.type == "cpu" for parameter in self.parameters)
        self.thread = get_ident() if on_cpu else None
        """The one thread that computes; None on CUDA, where autograd has one of its own."""
        self.attribution = Attribution(module)
        self.recording = self.in_optimizer = self.seen_backward = self.paused = self.compiled = False
        self.origin: Origin | None = None
        self.buffers: list[Tensor] = []
        """Buffers that a program has allocated since its last kernel."""
        self.previous_phase: Phase = "forward"
        self.rows: list[dict[str, Any]] = []  # all fields but those that `memory` knows
        self.unknown: Counter[str] = Counter()
        self.unknown_scratch: Counter[str] = Counter()
        self.memory = Memory(from_birth=cuda is not None)
        self.call = FakeCalls(self.memory.number_of)
        self.declared: OperatorWork | None = None  # of the last call, if its operator is a custom one
        self.memory.claim(map(local, (*self.parameters, *module.buffers())), "parameters")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled while it is recorded: of it, products, attention and copies are seen."""
        return True

    @contextmanager
    def attached(self) -> Iterator[None]:
        hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ]
        in_place = [part for part in self.module.modules() if part._compiled_call_impl is not None]
        try:
            with ExitStack() as stack:
                for part in in_place:
                    # Hooks of a module that was compiled in place are compiled with it.
                    stack.enter_context(patch.object(part, "_compiled_call_impl", self._named(part)))
                for context in (self, listening(self), resizes_told(self.memory.resize), waits_unseen()):
                    stack.enter_context(context)
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, *, follow_all: bool = False) -> None:
        """Begin the step; what came before was warm-up."""
        if follow_all:
            # Unreferenced objects may be freed at any moment of the step, and are not part of it.
            gc.collect()
            self.memory.claim_bystanders(tensors_alive({parameter.device for parameter in self.parameters}))
        self._claim_gradients()
        self.memory.begin()
        self.recording = True

    def ledger(self) -> Ledger:
        self._claim_gradients()
        self.memory.release_bystanders()
        allocated, kept = self.memory.allocated, self.memory.kept()
        replayed = self.memory.replayed() if self.cuda else None
        sizes = replayed.block_bytes if replayed else self.memory.sizes()
        peak, watched = (self.memory.peak(sizes, watched=watched) for watched in (False, True))
        return Ledger(
            rows=tuple(
                Row(**fields, bytes_allocated=allocated[row], bytes_kept=kept[row])
                for row, fields in enumerate(self.rows)
            ),
            parameters=sum(parameter.numel() for parameter in self.parameters),
            peak_bytes=peak.bytes,
            resident_bytes=self.memory.start_bytes(sizes),
            peak_by_category=peak.by_category,
            timeline=peak.timeline,
            unknown_operators=dict(self.unknown),
            reserved_bytes=replayed.reserved_bytes if replayed else None,
            watch_bytes=watched.bytes - peak.bytes,
            unknown_scratch=dict(self.unknown_scratch),
            assumption=EVEN_ROUTING if self.call.routes else "",
            trained_bytes=sum(local(each).nbytes for each in self.parameters if each.requires_grad),
            frozen_bytes=sum(local(each).nbytes for each in self.parameters if not each.requires_grad),
        )

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if operator is _DEVICE and type(args[0]) is FakeTensor:
            # Asked by C++ several times in each call.
            return args[0].fake_device
        if self.paused or TracingContext.try_get() is not None:
            # Code that torch.compile traces does not run.
            return operator(*args, **(kwargs or {}))
        if isinstance(operator, torch._ops.HigherOrderOperator):
            return self._run_higher_order(operator, args, kwargs or {})
        if any(kind.__name__ == "DTensor" for kind in types):
            # One that ranks divide: its own dispatch calls operators on the part that this rank has, which come here.
            return NotImplemented
        kwargs = kwargs or {}
        if self.thread is not None and get_ident() != self.thread:
            # gloo's threads copy what they send, with the modes of the thread that asked for it.
            return operator(*args, **kwargs)
        # A GPU has kernels of its own for some of these.
        if is_composite(operator) and not (self.cuda and is_no_contraction(operator)):
            with self:
                return operator.decompose(*args, **kwargs)
        self.n_calls += 1
        if self.progress and self.n_calls % CALLS_BETWEEN_PROGRESS == 0:
            self.progress(self.n_calls)
        if operator.namespace == "prim":
            return operator(*args, **kwargs)
        if operator.namespace == "profiler":
            # This operator has no tensor, and fake tensors would spend long on it.
            with torch._C._DisableTorchDispatch():
                return operator(*args, **kwargs)
        if not self.recording:
            return self._warm_up(operator, args, kwargs)
        phase = self._phase()
        if phase != self.previous_phase:
            self._turn(phase)
        inputs = tensors_in((args, kwargs))
        on_host = self._is_on_host(operator)
        self.memory.claim(inputs, "inputs", on_host=on_host)
        result = self.call(operator, args, kwargs)
        outputs = tensors_in(result)
        self.memory.row = len(self.rows)
        self.memory.sums_gradients = sums_gradients(operator, inputs, in_backward=phase == "backward")
        self.rows.append(self._describe(operator, args, kwargs, inputs, result, outputs, phase))
        scratch = self.declared.scratch_bytes if self.declared else 0
        if not scratch and self.cuda is None and inputs and inputs[0].device.type == "cpu":
            scratch = self._scratch(operator, args, kwargs, inputs, outputs)
        copies = operator.overloadpacket is aten._to_copy and self.memory.holds(inputs[0], "parameters")
        self.memory.claim(outputs, "weight copies" if copies else "temporaries", made=True, on_host=on_host)
        if phase in ("forward", "recompute"):
            self.memory.trace_parameters(inputs, outputs)
            self.call.follow(operator, args, outputs)
        if self.cuda:
            self._take_more(self.cuda, operator, args, inputs)
        self.memory.take_and_give_back(scratch)
        return result

    def _run_higher_order(self, operator: Any, args: tuple, kwargs: dict) -> Any:
        """Run what an operator of operators runs: those of torch.compile that keep the state of random numbers, for
        what is computed again in the backward pass."""
        if operator.name() == "run_and_save_rng_state":
            with self:
                return torch.get_rng_state(), args[0](*args[1:], **kwargs)
        if operator.name() == "run_with_rng_state":
            with self:
                return args[1](*args[2:], **kwargs)
        return operator(*args, **kwargs)

    def _scratch(self, operator: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor]) -> int:
        known = scratch_bytes(operator, args, kwargs, inputs)
        named = False
        # On real tensors the allocator sees it.
        if (known is None or hides_products(operator, inputs)) and isinstance(inputs[0], FakeTensor):
            measured = measured_scratch(operator, args, kwargs, inputs, outputs, self.rows[-1]["flops"])
            named = measured is None or operator.overloadpacket in DEPENDS_ON_VALUES
            if measured is not None:
                known = measured[0]
                resize_results(measured, inputs, outputs)
        if named:
            self.unknown_scratch[operator.overloadpacket.__name__] += 1
            self.rows[-1]["hides_scratch"] = True
        return known or 0

    def _warm_up(self, operator: Any, args: tuple, kwargs: dict) -> Any:
        inputs, on_host = tensors_in((args, kwargs)), self._is_on_host(operator)
        self.memory.claim(inputs, "inputs", on_host=on_host)
        result = self.call(operator, args, kwargs)
        outputs = tensors_in(result)
        if self.cuda:
            in_backward = torch._C._current_graph_task_id() != -1
            self.memory.sums_gradients = sums_gradients(operator, inputs, in_backward=in_backward)
        self.memory.claim(outputs, "temporaries", on_host=on_host)
        self.call.follow(operator, args, outputs)
        if self.cuda:
            self._take_more(self.cuda, operator, args, inputs)
        return result

    def _is_on_host(self, operator: Any) -> bool:
        # A tensor made from a Python number, such as the step count in torch.optim, is in the host's memory and stays
        # there. So does optimizer state that is kept on the host on purpose.
        return self.cuda is not None and (operator.overloadpacket is aten.lift_fresh or _is_host_copy(operator))

    def _take_more(self, cuda: CudaTarget, operator: Any, args: tuple, inputs: list[Tensor]) -> None:
        # A backward pass on CUDA runs in a thread of autograd.
        thread = torch._C._current_graph_task_id() != -1
        if operator.overloadpacket in MATRIX_PRODUCTS and thread not in self.multiplied:
            self.multiplied.add(thread)
            self.memory.take(workspace_bytes(cuda))
        self.memory.take_and_give_back(*cuda_scratch_bytes(operator, args, inputs, cuda))

    def take_workspaces(self) -> None:
        """Book the workspaces of cuBLAS, as if both threads had called it."""
        if self.cuda:
            for _ in {False, True} - self.multiplied:
                self.memory.take(workspace_bytes(self.cuda))
            self.multiplied = {False, True}

    # Reports of torch.compile's programs.

    def forget_compiling(self) -> None:
        """Free what torch.compile leaves in cycles: fake tensors of the step among it, in place of real ones."""
        if self.compiled:
            gc.collect()

    def allocate(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate a buffer of a program; it belongs to the row that comes next."""
        self.compiled = True
        with self._pause():
            buffer = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        if self.recording:
            self.memory.row = len(self.rows)
        self.memory.claim([buffer], "temporaries", made=self.recording)
        self.buffers.append(buffer)
        return buffer

    def reinterpret(self, tensor: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
        """Make a view of a buffer; a view is not recorded as an operator."""
        with self._pause():
            return torch.as_strided(tensor, shape, stride, tensor.storage_offset() + offset)

    def come_from(self, origin: Origin | None) -> None:
        """Note where the operators come from that run next; None after a program."""
        self.origin = origin
        if origin is None:
            self.buffers = []

    def run_kernel(self, kernel: Kernel, tensors: list[Tensor]) -> None:
        """Record a kernel that a program runs on `tensors`."""
        used = {tensor.untyped_storage()._cdata for tensor in tensors}
        buffers = [buffer for buffer in self.buffers if buffer.untyped_storage()._cdata in used]
        self.buffers = []
        if not self.recording:
            return
        self.origin, before = kernel.origin, self.origin
        phase = self._phase()
        if phase != self.previous_phase:
            self._turn(phase)
        self.memory.claim(tensors, "inputs")
        self.memory.row, self.memory.sums_gradients = len(self.rows), False
        sample = (buffers or tensors)[:1]
        path = self.attribution.module_path(phase, kernel.origin)
        if kernel.opaque:
            self.unknown[kernel.name] += 1
        contracts = kernel.contraction is not None
        component = self.attribution.component(
            path, phase, contraction=contracts, of_activations=contracts, origin=kernel.origin
        )
        self.rows.append(
            {
                "module": path,
                "phase": phase,
                "early": False,
                "component": component,
                "of_activations": contracts,
                "operator": kernel.name,
                "format": FORMAT_OF.get(sample[0].dtype, str(sample[0].dtype).removeprefix("torch.")) if sample else "",
                "flops": kernel.flops,
                "causal_flops": kernel.flops,
                "recomputed_flops": kernel.recomputed_flops,
                "contraction": kernel.contraction,
                "bytes_read": kernel.bytes_read,
                "bytes_written": kernel.bytes_written,
                "elementwise_flops": kernel.elementwise_flops,
                "collective": None,
                "call": None,
            }
        )
        read = [tensor for tensor in tensors if not any(tensor is buffer for buffer in buffers)]
        if phase in ("forward", "recompute") and read and all(map(self.memory.stems_from_parameters, read)):
            self.memory.reclaim(buffers, "weight copies")
            self.memory.trace_parameters(read, buffers)
        self.origin = before

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def _phase(self) -> Phase:
        if self.origin is not None and self.origin.phase:
            return self.origin.phase
        if torch._C._current_graph_task_id() != -1:
            # Activation checkpointing runs a forward pass again. Without it, a graph that is built here is that of a
            # second derivative. A custom autograd function builds no graph inside, but may be called by one that does.
            again = _recomputes() or (torch.is_grad_enabled() and runs_in("torch.utils.checkpoint"))
            return "recompute" if again else "backward"
        # Operators after a backward pass, outside of modules and without a graph, are part of the update, such as
        # clipping.
        updates = self.seen_backward and not self.attribution.stack and not torch.is_grad_enabled()
        if self.in_optimizer or (updates and not runs_in(_GATHERING)):
            return "optimizer"
        return "forward"

    def _turn(self, phase: Phase) -> None:
        was_backward, is_backward = (name in ("backward", "recompute") for name in (self.previous_phase, phase))
        if is_backward and not was_backward:
            self.memory.keep(
                {row for row, fields in enumerate(self.rows) if fields["phase"] == "forward" or fields["early"]}
            )
        elif was_backward and not is_backward:
            self._claim_gradients()
            self.attribution.after_head = False
        self.seen_backward |= is_backward
        self.previous_phase = phase

    def _named(self, part: nn.Module) -> Callable[..., Any]:
        compiled: Any = part._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            self.attribution.enter(part)
            try:
                return compiled(*args, **kwargs)
            finally:
                self.attribution.leave()

        return call

    # These hooks return None: anything else would replace the arguments or the output of the module.
    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.attribution.enter(module)

    def _leave_module(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self.attribution.leave()

    def _enter_optimizer(self, *_: Any) -> None:
        self.in_optimizer = True

    def _leave_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.in_optimizer = False
        self.memory.reclaim(map(local, tensors_in(list(optimizer.state.values()))), "optimizer state")

    def _claim_gradients(self) -> None:
        gradients = (parameter.grad for parameter in self.parameters)
        self.memory.reclaim((local(gradient) for gradient in gradients if gradient is not None), "gradients")

    def _multiplies_activations(self, operator: Any, inputs: list[Tensor], phase: Phase) -> bool:
        """True if a contraction is one of attention's: batched, and neither factor a parameter."""
        if operator.overloadpacket in FUSED_ATTENTION:
            return True
        if operator.overloadpacket not in BATCHED_PRODUCTS or phase == "optimizer":
            return False
        if phase == "backward":
            return self.attribution.is_node_of_activations(self.origin)
        of_activations = not any(map(self.memory.stems_from_parameters, inputs[-2:]))
        if of_activations:
            self.attribution.mark_node_of_activations(self.origin)
        return of_activations

    def _describe(
        self, operator: Any, args: tuple, kwargs: dict, inputs: list, result: Any, outputs: list, phase: Phase
    ) -> dict[str, Any]:
        known = self.call.known
        if known is not None and known.facts is not None:
            self.declared, facts = None, known.facts
        else:
            facts = self._facts(operator, args, kwargs, inputs, result, outputs)
        contracts = facts["contraction"] is not None
        # Each call of an unknown operator is named, and others may be declared anew.
        if known is not None and operator.namespace == "aten" and (contracts or is_no_contraction(operator)):
            known.facts = facts
        path = self.attribution.module_path(phase, self.origin)
        of_activations = contracts and self._multiplies_activations(operator, inputs, phase)
        component = self.attribution.component(
            path, phase, contraction=contracts, of_activations=of_activations, origin=self.origin
        )
        # Gradients that the forward pass already computes still belong to the forward pass.
        early = phase == "forward" and computes_early_gradient()
        return {
            "module": path,
            "phase": "backward" if early else phase,
            "early": early,
            "component": component,
            "of_activations": of_activations,
            **facts,
        }

    def _facts(
        self, operator: Any, args: tuple, kwargs: dict, inputs: list, result: Any, outputs: list
    ) -> dict[str, Any]:
        """The part of a row that follows from the operator and the layouts of its arguments."""
        self.declared = declared = declared_work(operator, args, kwargs, result)
        try:
            work = declared.work if declared else work_of(operator, args, kwargs, result)
        except UnknownOperator as unknown:
            work = None
            self.unknown[str(unknown)] += 1
        moves = not is_view_call(inputs, outputs)
        returned = {tensor.untyped_storage()._cdata for tensor in outputs}
        mutated = (
            each for each in mutated_tensors(operator, args, kwargs) if each.untyped_storage()._cdata not in returned
        )
        mutated = sum(tensor.nbytes for tensor in mutated)
        # A product may be added to what is wider.
        factors = inputs[1:] if operator.overloadpacket in (aten.addmm, aten.baddbmm) else inputs
        sample = (factors if work else outputs or inputs)[:1]
        # A tensor that is added to in place is read too.
        read = sum(tensor.nbytes for tensor in inputs) - getattr(kwargs.get("out"), "nbytes", 0) if moves else 0
        written = (sum(tensor.nbytes for tensor in outputs) if moves else 0) + mutated
        elementwise = elementwise_flops_of(operator, args, inputs + outputs)
        if declared:
            read = read if declared.bytes_read is None else declared.bytes_read
            written = written if declared.bytes_written is None else declared.bytes_written
            elementwise = declared.elementwise_flops
        return {
            "operator": operator.overloadpacket.__name__,
            "format": FORMAT_OF.get(sample[0].dtype, str(sample[0].dtype).removeprefix("torch.")) if sample else "",
            "flops": work.flops if work else 0,
            "causal_flops": work.causal_flops if work else 0,
            "recomputed_flops": work.recomputed_flops if work else 0,
            "contraction": work.contraction if work else None,
            "bytes_read": read,
            "bytes_written": written,
            "elementwise_flops": elementwise,
            "collective": collective_of(operator, args, kwargs),
            "call": None if needs_other_ranks(operator) else call_of(operator, args, kwargs),
        }


def _is_host_copy(operator: Any) -> bool:
    return operator.namespace == "napkin" and operator.overloadpacket.__name__ == "host_copy"


@no_type_check
def _recomputes() -> bool:
    """True if activation checkpointing is recomputing a tensor that it has dropped."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "unpack_hook" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
