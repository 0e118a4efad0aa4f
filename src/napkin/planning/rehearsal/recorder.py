"""Records the step of a script that believes it has a GPU: tensors on the device are fake and counted, the others real.

Tensors of the device are fake tensors of the CPU, as everywhere in the accountant; a storage of a fake tensor that the
script keeps on the host carries a mark, and neither its bytes nor the work on it is counted. Small tensors on the host
are real: a reader of data, an index of a batch and a schedule work as they are.

A script also reads values that no fake tensor has. A result of one element, or of booleans, carries a guess: the
operator computed on guesses, ones where nothing is known. So a loss is finite, `isnan` false, a loss scale's flag 0.
"""

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, no_type_check

import torch
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from napkin.accounting.attribution import Attribution
from napkin.accounting.counting import uncompiled
from napkin.accounting.ledger import Ledger
from napkin.accounting.recording import Recorder
from napkin.hardware.target import CudaTarget
from napkin.optim.saved_state import local
from napkin.planning.rehearsal.messages import Highest

WARM_UP_STEPS = 2
"""Steps before the one that is counted: the first creates optimizer state, DDP decides on its buckets before the second
and its memory is steady after that."""
MOST_UPDATES = 32
"""Updates after which nothing more is looked at, if the script has not evaluated by then."""
SECONDS_AFTER, SHARE_AFTER = 10.0, 0.25
"""How long a script continues after the counted step, so that it can evaluate: this many seconds, or this fraction of
the time until then."""
REAL_BYTES = {True: 256 * 2**20, False: 2**20}
"""The largest tensors of a script on the host that are real: of whole numbers, and of others."""

SAME_EVALUATIONS = 4
"""Forward passes of an evaluation after which the rest are taken to need no more."""

_EVALUATION = "in an evaluation"

aten = torch.ops.aten


class Rehearsed(BaseException):
    """Ends a script whose step has been counted; no `except Exception` of the script stops it."""


def is_on_host(tensor: Tensor) -> bool:
    """True if the script has this tensor in the host's memory."""
    return not isinstance(tensor, FakeTensor) or getattr(tensor.untyped_storage(), "is_on_host", False)


# Runs for every operator of a script.
@no_type_check
class ScriptRecorder(Recorder):
    """A recorder of one step of a script, whose model it learns of when the step begins."""

    def __init__(
        self, mode: FakeTensorMode, cuda: CudaTarget, *, seconds: float, tell: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(nn.Module(), cuda)
        self.mode, self.tell = mode, tell
        self.counted: Ledger | None = None
        self.begun, self.seconds, self.end_at = time.monotonic(), seconds, 0.0
        self.passes: list[tuple[int, str]] = [(0, "before the first step")]
        """The script's phases, each with the event of its memory at which it begins."""
        self.n_evaluated = 0
        """Forward passes of the evaluation in progress, the last ones, of inputs of the same shapes."""
        self.evaluated: list[tuple[int, ...]] = []
        self.place: bool | None = None
        """The device that the call in progress was given: True is the GPU, False the host, None is not said."""
        self.host_call = False
        self.steps = 0
        self.n_updates = 0
        self.updated = False
        self.differentiated = False
        """A backward pass has ended, and no update by hand or by an optimizer has followed it yet."""
        self.roots: dict[int, nn.Module] = {}
        self.early: dict[int, int] = {}
        """Modules that ran without gradients before the first step, each with the event at which it first did."""
        self.first_training = 0
        """The event at which the first step begins."""
        self.trained: dict[int, Tensor] = {}
        self.fakes: weakref.WeakKeyDictionary[torch.UntypedStorage, Tensor] = weakref.WeakKeyDictionary()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what runs in the block."""
        hooks = [
            register_module_forward_pre_hook(self._before_forward),
            register_optimizer_step_post_hook(self._after_update),
        ]
        try:
            with self.attached():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def end(self) -> None:
        """The script has ended: a step that was being recorded is over if its update was made."""
        if self.counted is None and self.recording and self.updated:
            self._count()

    @property
    def trains_on_host(self) -> bool:
        """True if all that the script updated is in the host's memory."""
        return bool(self.trained) and all(map(is_on_host, map(local, self.trained.values())))

    def begin_step(self) -> None:
        """A step begins, if an update was made since the last one began; after the counted one, the script ends."""
        if not self.updated:
            return
        self.updated = False
        self.steps += 1
        if self.trains_on_host:
            raise Rehearsed
        if self.steps == WARM_UP_STEPS:
            self._adopt()
            self.begin()
        elif self.steps == WARM_UP_STEPS + 1:
            self._count()
        self._pass(f"in step {self.steps + 1}")

    def _count(self) -> None:
        """The step has been recorded. The script goes on for a while, or until it has evaluated."""
        self.counted = self.ledger()
        self.recording = False
        self.memory.end()
        self.tell()
        taken = time.monotonic() - self.begun
        more = min(max(SECONDS_AFTER, SHARE_AFTER * taken), self.seconds - taken)
        self.end_at = time.monotonic() + (0.0 if self._evaluates_below_its_steps() else more)

    def _evaluates_below_its_steps(self) -> bool:
        """True if the script evaluated before its first step, and would now take less to do it again than its steps."""
        early = [self.early[id(_inner(root))] for root in self.roots.values() if id(_inner(root)) in self.early]
        if not early:
            return False
        most, _ = self.memory.highest(self.memory.sizes())
        return self.memory.growth(min(early), self.first_training) + self.memory.bytes_alive() < most

    def _pass(self, what: str) -> None:
        if self.passes[-1][1] != what:
            self.n_evaluated = 0
            self.passes.append((self.memory.n_events(), what))
        if self.counted is None:
            return
        evaluated = any(each.startswith(_EVALUATION) for _, each in self.passes[:-1])
        if evaluated and not what.startswith(_EVALUATION):
            raise Rehearsed
        if time.monotonic() > self.end_at or self.steps > MOST_UPDATES:
            raise Rehearsed

    def highest(self) -> Highest:
        """The most memory so far."""
        replayed = self.memory.replayed()
        most, at = self.memory.highest(replayed.block_bytes)
        place = next(what for event, what in reversed(self.passes) if event < at or event == 0)
        return Highest(most, replayed.reserved_bytes, place)

    def enter_compiled(self, module: nn.Module | None) -> None:
        """A compiled function begins: a module's, or another."""
        if module is not None:
            self._before_forward(module, None)
        elif torch.is_grad_enabled() and not self.in_optimizer:
            self.begin_step()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self.attribution.stack:
            return
        if torch.is_grad_enabled():
            if not self.roots:
                self.first_training = self.memory.n_events()
            self.roots.setdefault(id(module), module)
            self.begin_step()
        elif any(_inner(module) is _inner(root) for root in self.roots.values()):
            self._pass(f"{_EVALUATION} after {self.n_updates} updates")
            shapes = [tuple(each.shape) for each in pytree.tree_leaves(inputs) if isinstance(each, Tensor)]
            self.n_evaluated = self.n_evaluated + 1 if shapes == self.evaluated else 1
            self.evaluated = shapes
            if self.counted is not None and self.n_evaluated > SAME_EVALUATIONS:
                raise Rehearsed
        elif not self.roots:
            self.early.setdefault(id(_inner(module)), self.memory.n_events())

    def after_backward(self) -> None:
        """A backward pass has ended: what changes a parameter now is the update."""
        self.differentiated = not self.updated

    def _notice_update(self, operator: Any, args: tuple) -> None:
        """An update that the script makes without an optimizer of torch's changes a parameter in place."""
        first = next(iter(pytree.tree_leaves(args[:1])), None)
        if self.in_optimizer or not operator._schema.is_mutable or not isinstance(first, FakeTensor):
            return
        changed = first.untyped_storage()._cdata
        parameters = [each for root in self.roots.values() for each in root.parameters() if each.requires_grad]
        if any(local(each).untyped_storage()._cdata == changed for each in parameters):
            self.updated, self.differentiated = True, False
            self.n_updates += 1
            self.trained.update((id(parameter), parameter) for parameter in parameters)

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.n_updates += 1
        self.updated, self.differentiated = True, False
        for group in optimizer.param_groups:
            self.trained.update((id(parameter), parameter) for parameter in group["params"])

    def _adopt(self) -> None:
        whole = nn.Module()
        roots = [_unwrapped(root) for root in self.roots.values()]
        roots = [root for root in roots if any(id(parameter) in self.trained for parameter in root.parameters())]
        inside = {id(part) for root in roots for part in root.modules() if part is not root}
        roots = [root for root in roots if id(root) not in inside]
        if len(roots) == 1:
            whole = roots[0]
        else:
            for number, root in enumerate(roots):
                whole.add_module(f"{type(root).__name__.lower()}{number or ''}", root)
        known = {id(parameter) for parameter in whole.parameters()}
        others = [each for name, each in self.trained.items() if name not in known]
        self.module, self.parameters = whole, [*whole.parameters(), *others]
        stack, self.attribution = self.attribution.stack, Attribution(whole)
        self.attribution.stack = stack
        kept = list(map(local, (*self.parameters, *whole.buffers())))
        self.memory.claim(kept, "parameters")
        self.memory.reclaim(kept, "parameters")

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if self.paused or TracingContext.try_get() is not None:
            return operator(*args, **(kwargs or {}))
        if isinstance(operator, torch._ops.HigherOrderOperator):
            return super().__torch_dispatch__(operator, types, args, kwargs)
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        on_device = self.place
        if on_device is None and not tensors:
            on_device = torch._C._current_graph_task_id() != -1
        fakes = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        if not on_device and not fakes and (tensors or _is_small(operator, args, kwargs)):
            with _disable_current_modes():
                return self.call(operator, args, kwargs)
        if len(fakes) < len(tensors):
            args, kwargs = pytree.tree_map_only(Tensor, self.as_fake, (args, kwargs))
            tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        hosted = [tensor for tensor in tensors if is_on_host(tensor)]
        for tensor in hosted:
            self.memory.claim((tensor,), "inputs", on_host=True)
        if on_device is None:
            on_device = len(hosted) < len(tensors)
        if self.differentiated:
            self._notice_update(operator, args)
        if operator.overloadpacket is aten._local_scalar_dense:
            return self._value(operator, args, kwargs)
        if operator.overloadpacket is aten.equal:
            return True
        if on_device or (self.place is False and len(hosted) < len(tensors) and _copies_none(operator)):
            result = super().__torch_dispatch__(operator, types, args, kwargs)
        else:
            result = self.call(operator, args, kwargs)
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, FakeTensor):
                    _mark_on_host(tensor)
                    self.memory.claim((tensor,), "inputs", on_host=True)
        self._guess(operator, args, kwargs, result)
        return result

    def _is_on_host(self, operator: Any) -> bool:
        return False

    def as_fake(self, tensor: Tensor) -> Tensor:
        """The fake tensor that represents a real one on the host."""
        if isinstance(tensor, FakeTensor):
            return tensor
        with _disable_current_modes():
            storage, first = tensor.untyped_storage(), None
            if tensor.dim() == 0 or (tensor.numel() and tensor.dtype == torch.bool):
                first = tensor.detach().flatten()[0].clone()
        if storage not in self.fakes:
            with _disable_current_modes(), self.mode:
                self.fakes[storage] = torch.empty(storage.nbytes(), dtype=torch.uint8)
            _mark_on_host(self.fakes[storage])
        with _disable_current_modes(), self.mode:
            numbers = self.fakes[storage].view(tensor.dtype) if tensor.dtype != torch.uint8 else self.fakes[storage]
            fake = numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if first is not None:
            _set_guess(fake, first)
        return fake

    def _value(self, operator: Any, args: tuple, kwargs: dict) -> Any:
        tensor = args[0]
        if hasattr(tensor, "guess"):
            with _disable_current_modes():
                return tensor.guess.item()
        try:
            return self.call(operator, args, kwargs)
        except DataDependentOutputException:
            return True if tensor.dtype == torch.bool else 1.0 if tensor.dtype.is_floating_point else 1

    def _guess(self, operator: Any, args: tuple, kwargs: dict, result: Any) -> None:
        if not isinstance(result, FakeTensor) or operator.namespace != "aten":
            return
        if result.numel() != 1 and result.dtype != torch.bool:
            return
        with _disable_current_modes():
            try:
                of = pytree.tree_map_only(Tensor, _guess_of, (args, kwargs))
                made = operator(*of[0], **of[1])
                _set_guess(result, made.flatten()[0].clone() if made.numel() else torch.ones((), dtype=result.dtype))
            except Exception:
                _set_guess(result, torch.ones((), dtype=result.dtype))


def _mark_on_host(tensor: Any) -> None:
    tensor.untyped_storage().is_on_host = True


def _set_guess(tensor: Any, guess: Tensor) -> None:
    tensor.guess = guess


def _guess_of(tensor: Tensor) -> Tensor:
    guess = getattr(tensor, "guess", None)
    return guess.clone() if guess is not None else torch.ones((), dtype=tensor.dtype)


def _copies_none(operator: Any) -> bool:
    return operator.overloadpacket is not aten._to_copy


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside DDP or DataParallel."""
    wraps = isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    return getattr(module, "module", module) if wraps else module


def _inner(module: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile."""
    return uncompiled(_unwrapped(module))


@no_type_check
def _is_small(operator: Any, args: tuple, kwargs: dict) -> bool:
    """True if what an operator without tensors makes is small enough to be real."""
    dtype = kwargs.get("dtype") or (torch.int64 if "arange" in str(operator) or "rand" in str(operator) else None)
    whole = dtype is not None and not dtype.is_floating_point
    if operator.overloadpacket is aten.arange:
        numbers = [abs(each) for each in args if isinstance(each, (int, float))]
        whole = dtype is None or whole
        return max(numbers, default=0) * 8 <= REAL_BYTES[whole]
    shape = next((each for each in args if isinstance(each, (list, tuple))), None)
    if shape is None:
        sizes = [each for each in args if isinstance(each, int)]
        shape = [max(sizes, default=1)]
    n = 1
    for size in shape:
        n *= size if isinstance(size, int) else 1
    return n * (dtype or torch.get_default_dtype()).itemsize <= REAL_BYTES[whole]
