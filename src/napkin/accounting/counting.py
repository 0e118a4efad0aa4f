"""Count a training step exactly without running it: the step is traced on fake tensors.

Fake tensors have shapes, number formats and storages but no data: nothing is allocated and nothing is computed. A step
that needs data is counted by running it.

Where no step is given, it is forward pass, loss, backward pass and update, of a module that may return its loss in any
form: alone, first of a tuple, as `.loss` or under "loss", or not at all.
"""

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass, replace
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree

from napkin.accounting.compiled.programs import compiling_without_kernels
from napkin.accounting.cuda.trace import as_on_cuda
from napkin.accounting.ledger import Category, Ledger
from napkin.accounting.metering import meter_step
from napkin.accounting.recording import record
from napkin.errors import NapkinError, first_line
from napkin.hardware.target import Target, cuda_target
from napkin.optim.saved_state import local


def plain_step(
    module: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> Callable[[nn.Module, Any], None]:
    """The step of `module`, with an optimizer of its parameters. A module that has none is run forward alone.

    Raises NapkinError for an optimizer that evaluates the model itself.
    """
    trains = next(module.parameters(), None) is not None
    update = optimizer(module.parameters()) if optimizer and trains else None
    if update is not None and inspect.signature(update.step).parameters["closure"].default is inspect.Parameter.empty:
        raise NapkinError(
            f"{type(update).__name__} evaluates the model inside its update: pass a `step` that gives it a closure"
        )

    def step(module: nn.Module, batch: Any) -> None:
        if isinstance(batch, dict):
            output = module(**batch)
        else:
            output = module(*batch) if isinstance(batch, (tuple, list)) else module(batch)
        loss = _scalar(output)
        if loss is not None:
            loss.backward()
        elif trains:
            raise NapkinError("the model returns no tensor that depends on a parameter: there is nothing to train")
        if update is not None:
            update.step()
        module.zero_grad(set_to_none=True)

    return step


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given, where it is one that it returned."""
    original = getattr(module, "_orig_mod", None)
    return uncompiled(original) if isinstance(original, nn.Module) else module


def uncompile_parts(module: nn.Module) -> nn.Module:
    """Put back what `torch.compile` was given in place of what it returned, everywhere in `module`; returns it."""
    for part in list(module.modules()):
        for name, child in part.named_children():
            setattr(part, name, uncompiled(child))
        if getattr(part, "_compiled_call_impl", None) is not None:
            part._compiled_call_impl = None
    return module


def _scalar(output: Any) -> Tensor | None:
    """The loss that a model returned; otherwise the sum of the means of all that it returned; None without a graph."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [leaf for leaf in _tensors_in(output) if leaf.requires_grad]
    if not leaves:
        return None
    return leaves[0] if leaves[0].dim() == 0 else sum(leaf.float().mean() for leaf in leaves)  # pyright: ignore


def _tensors_in(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors_in(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors_in(item)
    elif is_dataclass(output):
        yield from _tensors_in(vars(output))


# This is for what fake tensors cannot do: `.item()`, masks, routing of tokens to experts, numpy. The peak is that of
# the allocator's own events, with all that kernels take while they run.


def count_by_running(
    module: nn.Module,
    batch: Any,
    step: Callable[[nn.Module, Any], Any] | None,
    optimizer: Callable[..., torch.optim.Optimizer] | None,
) -> Ledger:
    """Run two steps of a copy of `module` on a copy of `batch`; the ledger of the second, the steady one.

    The global random state is left as it was. Raises NapkinError for a module without data, for one that cannot be
    copied, and where the step fails.
    """
    arguments = dict(batch) if isinstance(batch, Mapping) else batch
    device = _device_of(module, arguments)
    try:
        twin = uncompile_parts(copy.deepcopy(module))
    except (RuntimeError, TypeError, ValueError) as error:
        raise NapkinError(f"{type(module).__name__} cannot be copied, to run the copy ({first_line(error)})") from error
    for parameter in twin.parameters():
        parameter.grad = None
    copies: dict[int, Tensor] = {}
    # A tensor that is given twice is one tensor in the copy too.
    inputs = pytree.tree_map_only(Tensor, lambda tensor: copies.setdefault(id(tensor), _copied(tensor)), arguments)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            run = step or plain_step(twin, optimizer)
            run(twin, inputs)
            measured = meter_step(twin, lambda: run(twin, inputs), device_type=device.type)
        except RuntimeError as error:
            raise NapkinError(f"the step fails: {first_line(error)}") from error
    ledger = measured.ledger
    beside = measured.peak_bytes - ledger.peak_bytes
    at_peak: dict[Category, int] = {**ledger.peak_by_category}
    at_peak["temporaries"] = at_peak.get("temporaries", 0) + beside
    return replace(
        ledger,
        peak_bytes=measured.peak_bytes,
        peak_by_category=at_peak,
        reserved_bytes=measured.reserved_bytes,
        # Measured, whichever operator took it.
        unknown_scratch={},
        source="run",
    )


def _device_of(module: nn.Module, batch: Any) -> torch.device:
    tensors = [*module.parameters(), *module.buffers(), *filter(_is_tensor, pytree.tree_leaves(batch))]
    for tensor in tensors:
        if isinstance(tensor, FakeTensor) or tensor.device.type not in ("cpu", "cuda"):
            kind = "fake" if isinstance(tensor, FakeTensor) else f"on {tensor.device}"
            raise NapkinError(f"by='running' needs data, and a tensor is {kind}: build the module on 'cpu' or 'cuda'")
    return tensors[0].device if tensors else torch.device("cpu")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad and tensor.is_leaf)


def count(
    module: nn.Module,
    batch: Any,
    step: Callable[[nn.Module, Any], Any] | None = None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    target: Target = "cpu",
    by: Literal["tracing", "running"] = "tracing",
    warm_up: int | Callable[[], Any] = 1,
    progress: Callable[[int], None] | None = None,
) -> Ledger:
    """Trace one training step in its steady state and return its ledger.

    Args:
        module: any `torch.nn.Module` on real, meta or fake tensors. It is not modified. What `torch.compile` makes of
            it, of parts of it or of functions that the step calls is counted as Inductor compiles it: its kernels, and
            the buffers that it allocates, reuses and keeps. No kernel is built. Of a module without parameters, the
            forward pass is counted.
        batch: a tensor, or a tuple, list or mapping of them (positional or keyword arguments of `module`). Only
            shapes, formats and strides are read.
        step: `step(module, batch)` trains once. By default: forward pass, loss, backward pass, update. If the step
            closes over an optimizer, build module and optimizer under one `FakeTensorMode` and pass the fake module,
            which is then used directly instead of a copy.
        optimizer: for the default step, a function of the parameters that returns an optimizer, for example
            `torch.optim.AdamW`. None counts no update.
        target: the device that the step is counted for. "cpu"; "cuda", which is this machine's GPU or, without one,
            an H100; or a `CudaTarget` for another. For a CUDA device the traced tensors stay on the CPU, and `step`
            must not move them, but the operators are those that torch calls on that device: its attention, dropout
            and normalisation, its autocast (including `torch.autocast("cuda")` inside `step`: softmax, norms, sums and
            losses in fp32), foreach optimizers. Memory is that of CUDA's caching allocator, from the first parameter
            on. A module on fake CUDA tensors is always counted for CUDA.
        by: "tracing" needs no data and no memory; "running" runs two real steps of a copy, on the module's device and
            on this batch, and records the second. It counts what depends on data, such as `.item()`, and its peak is
            the allocator's; `ledger.source` is then "run". What `torch.compile` was given runs uncompiled.
        warm_up: steps that are traced before the one that is counted, the first of which creates the optimizer's state;
            or a function that is called in their place and leaves the same state.
        progress: called now and then while it traces, with the number of operator calls so far.

    Tokens that a router distributes by `topk` and masks are counted as distributed evenly, which `ledger.assumption`
    says then.

    Raises NapkinError for an unknown target, if the module cannot be copied, or if the step fails on fake tensors.
    """
    cuda = cuda_target(target)
    if by == "running":
        if target != "cpu":
            raise NapkinError("by='running' counts for the device that the module is on: leave `target` out")
        return count_by_running(uncompiled(module), batch, step, optimizer)
    if by != "tracing":
        raise NapkinError(f"by is {by!r}: use 'tracing' or 'running'")
    mode = _mode_of(module) or FakeTensorMode(allow_non_fake_inputs=True)
    fakes = _Fakes(mode)
    if cuda is None and _is_on_fake_cuda(module):
        cuda = cuda_target("cuda")
    with mode, as_on_cuda(cuda) if cuda else nullcontext(), compiling_without_kernels(cuda, mode):
        twin = module if _mode_of(module) else _fake_twin(module, fakes)
        arguments = dict(batch) if isinstance(batch, Mapping) else batch
        inputs = pytree.tree_map_only(Tensor, fakes.of_input, arguments)
        run = step or plain_step(twin, optimizer)
        with _errors_on_one_line():
            return record(twin, lambda: run(twin, inputs), warm_up=warm_up, cuda=cuda, progress=progress)


def _mode_of(module: nn.Module) -> FakeTensorMode | None:
    tensors = map(local, (*module.parameters(), *module.buffers()))
    modes = {tensor.fake_mode: None for tensor in tensors if isinstance(tensor, FakeTensor)}
    if len(modes) > 1:
        # Under torch.compile, autograd would end the process.
        raise NapkinError(
            f"the tensors of {type(module).__name__} belong to {len(modes)} FakeTensorModes, and a step has one: "
            "a deep copy of a fake module has a mode of its own; build each part anew"
        )
    return next(iter(modes), None)


def _is_on_fake_cuda(module: nn.Module) -> bool:
    tensor = next(module.parameters(), None)
    return isinstance(tensor, FakeTensor) and tensor.device.type == "cuda"


class _Fakes:
    """Fake copies of tensors, always on the CPU.

    Fake CUDA tensors abort a CPU build as soon as autograd is involved.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self.storages: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}

    def of_parameter(self, tensor: Tensor) -> Tensor:
        """Parameters that share a storage share one here too."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.storages:
            self.storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
        numbers = self.storages[storage._cdata].view(tensor.dtype)
        return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def of_input(self, tensor: Tensor) -> Tensor:
        """Without the rest of its storage: a batch may be a view of a whole corpus."""
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode:
            return tensor
        if id(tensor) not in self.inputs:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            self.inputs[id(tensor)] = fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)
        return self.inputs[id(tensor)]


def _fake_twin(module: nn.Module, fakes: _Fakes) -> nn.Module:
    """A copy of `module` whose parameters and buffers are fake; tied ones stay tied."""
    try:
        memo: dict[int, Any] = {id(buffer): fakes.of_parameter(buffer) for buffer in module.buffers()}
        for parameter in module.parameters():
            memo[id(parameter)] = nn.Parameter(fakes.of_parameter(parameter), requires_grad=parameter.requires_grad)
        for part in module.modules():
            if "dynamo_ctx" in vars(part):
                memo[id(part.dynamo_ctx)] = part.dynamo_ctx
        twin = copy.deepcopy(module, memo)
        for part, copied in zip(module.modules(), twin.modules(), strict=True):
            if part._compiled_call_impl is not None:
                copied._compiled_call_impl = _compiler_of(part._compiled_call_impl)(copied._call_impl)
        return twin
    except (RuntimeError, TypeError, ValueError) as error:
        raise NapkinError(
            f"{type(module).__name__} cannot be copied ({first_line(error)}): build it under FakeTensorMode() and "
            "pass that"
        ) from error


def _compiler_of(compiled: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The compiler that `nn.Module.compile` gave a module, with its options."""
    from torch._dynamo.eval_frame import _TorchDynamoContext

    cells = (cell.cell_contents for cell in compiled.__closure__ or ())
    return next((each for each in cells if isinstance(each, _TorchDynamoContext)), torch.compile)


@contextmanager
def _errors_on_one_line() -> Iterator[None]:
    try:
        with fake_tensors_log_nothing():
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise NapkinError(
            f"the step reads values that exist only when it runs ({error.func}): count it by running it, with "
            "by='running', or pass a `step` without `.item()`, boolean-mask indexing or branches on data"
        ) from None
    except RuntimeError as error:
        raise NapkinError(
            f"the step fails on fake tensors, which have no data: {first_line(error)}; by='running' counts a real one"
        ) from None


@contextmanager
def transformers_not_tracing() -> Iterator[None]:
    """Hide from transformers that it is traced: on fake tensors it would otherwise make masks that no real step
    makes."""
    utils = sys.modules.get("transformers.utils.import_utils")
    if utils is None or not hasattr(utils, "is_fake_tensor"):
        yield
        return
    with patch.object(utils, "is_fake_tensor", lambda value: False):
        yield


@contextmanager
def fake_tensors_log_nothing() -> Iterator[None]:
    """torch logs a traceback for an operator that fails on fake tensors; the error itself says what is wrong."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled
