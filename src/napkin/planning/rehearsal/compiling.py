"""Lets torch.compile compile a rehearsed script: what it traces is on the device, what it makes is counted.

torch.compile traces the script's functions as it would on a GPU: its tensors say that they are on the device, and what
names a device in a graph is then put on the CPU, where the tensors are. Inductor's programs of the graphs run in place
of kernels (`napkin.accounting.compiled.programs`). What cannot be compiled so runs eagerly, with a note.
"""

import functools
from collections.abc import Callable
from typing import Any, no_type_check

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from napkin.accounting.compiled.cuda_device import is_lowering_for_cuda
from napkin.errors import first_line

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


_DECIDED_BY_MEASURING = {
    "max_autotune": "max_autotune times kernels: the library's products are counted, and no workspace of its trials",
    "triton.cudagraphs": "CUDA graphs keep a step's buffers in a pool until the next step, which is not counted",
}


class Tracing:
    """Restores torch's own functions while torch.compile traces, and shows it a device. Created before the stand-ins
    are installed, so that it has the original functions.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
        self.called: Callable[[nn.Module | None], None] = lambda module: None
        """Called when a compiled function begins, with its module if it is a module's."""
        self.originals = [
            (owner, name, getattr(owner, name))
            for owner, name in (
                *((nn.Module, name) for name in ("__setattr__", "register_parameter")),
                *((torch, name) for name in ("is_autocast_enabled", "get_autocast_dtype")),
            )
        ]
        self.aside: list[tuple[list[Any], list[Any]]] = []

    @no_type_check
    def install(self, ignored: type[TorchFunctionMode]) -> None:
        """Replace parts of torch.compile; a mode of the type `ignored` does not see what is traced."""
        from torch._dynamo import config, convert_frame, guards, utils
        from torch._dynamo.variables import torch_function
        from torch._dynamo.variables.tensor import TensorVariable

        manager = torch_function.TorchFunctionModeStackStateManager

        def enter(state: Any) -> None:
            modes = torch.overrides._get_current_function_mode_stack()
            self.aside.append((modes, [getattr(owner, name) for owner, name, _ in self.originals]))
            state.stack = [mode for mode in modes if not isinstance(mode, ignored)]
            utils.clear_torch_function_mode_stack()
            for owner, name, original in self.originals:
                setattr(owner, name, original)

        def leave(state: Any, *_: Any) -> None:
            modes, stand_ins = self.aside.pop()
            for (owner, name, _), stand_in in zip(self.originals, stand_ins, strict=True):
                setattr(owner, name, stand_in)
            utils.set_torch_function_mode_stack(modes)
            state.stack = []

        manager.__enter__, manager.__exit__ = enter, leave
        # The mode is there in all of the script.
        guards.GuardBuilder.TORCH_FUNCTION_STATE = lambda builder, guard: None
        specialize = TensorVariable.specialize

        def on_device(value: torch.Tensor) -> dict[str, Any]:
            specialized = specialize(value)
            return {**specialized, "device": CUDA} if specialized["device"].type == "cpu" else specialized

        TensorVariable.specialize = staticmethod(on_device)
        dispatch = FakeTensorMode.dispatch

        def dispatch_on_cpu(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if kwargs and is_cuda(kwargs.get("device")) and not is_lowering_for_cuda():
                kwargs = {**kwargs, "device": CPU}
            return dispatch(mode, func, types, args, kwargs)

        FakeTensorMode.dispatch = dispatch_on_cpu
        config.suppress_errors = True
        message = convert_frame.format_error_msg

        def format_error(error: Exception, code: Any, *args: Any) -> str:
            self.note(f"{code.co_name} runs eagerly, torch.compile cannot trace it here: {first_line(error)}")
            return message(error, code, *args)

        convert_frame.format_error_msg = format_error
        compile_ = torch.compile

        def compile_in_parts(model: Any = None, *, fullgraph: bool = False, **options: Any) -> Any:
            given = {**(torch._inductor.list_mode_options(options.get("mode")) or {}), **(options.get("options") or {})}
            for name, sentence in _DECIDED_BY_MEASURING.items():
                if given.get(name):
                    self.note(sentence)
            # Code that can be traced only on a GPU must not end the script.
            compiled = compile_(model, fullgraph=False, **options)
            return compiled if model is None or isinstance(model, nn.Module) else self._telling(compiled)

        def compile_in_place(module: nn.Module, *args: Any, **options: Any) -> None:
            module._compiled_call_impl = self._telling(compile_(module._call_impl, *args, **options), module)

        torch.compile, nn.Module.compile = compile_in_parts, compile_in_place

    @no_type_check
    def _telling(self, compiled: Callable[..., Any], module: nn.Module | None = None) -> Callable[..., Any]:
        """The compiled function; that it is called is told, as no hook of a module inside it is."""

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.called(module)
            return compiled(*args, **kwargs)

        return call

    def cannot_lower(self, error: Exception) -> None:
        """Note that Inductor fails on a graph."""
        self.note(f"a graph is counted operator by operator, Inductor cannot lower it here: {first_line(error)}")


def is_cuda(device: Any) -> bool:
    """True for a CUDA device, as torch's functions are given one: by its number, its name or as an object."""
    return (isinstance(device, int) and not isinstance(device, bool)) or str(device).startswith("cuda")
