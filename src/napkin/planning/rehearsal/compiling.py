"""Lets torch.compile compile a rehearsed script: what it traces is on the device, what it makes is counted.

torch.compile traces the script's functions as it would on a GPU: its tensors say that they are on the device, and what
names a device in a graph is then put on the CPU, where the tensors are. Inductor's programs of the graphs run in place
of kernels (`napkin.accounting.compiled.programs`). What cannot be compiled so runs eagerly, with a note.
"""

from collections.abc import Callable
from typing import Any, no_type_check

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from napkin.accounting.compiled.cuda_device import is_lowering_for_cuda
from napkin.errors import first_line

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Tracing:
    """What is set aside while torch.compile traces, and what it sees in place of the device.

    Made before the stand-ins are in place, in whose stead torch's own functions are back for as long as it traces.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note = note
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
            found = specialize(value)
            return {**found, "device": CUDA} if found["device"].type == "cpu" else found

        TensorVariable.specialize = staticmethod(on_device)
        dispatch = FakeTensorMode.dispatch

        def dispatch_on_cpu(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if kwargs and _is_cuda(kwargs.get("device")) and not is_lowering_for_cuda():
                kwargs = {**kwargs, "device": CPU}
            return dispatch(mode, func, types, args, kwargs)

        FakeTensorMode.dispatch = dispatch_on_cpu
        config.suppress_errors = True
        message = convert_frame.format_error_msg

        def told(error: Exception, code: Any, *args: Any) -> str:
            self.note(f"{code.co_name} runs eagerly, torch.compile cannot trace it here: {first_line(error)}")
            return message(error, code, *args)

        convert_frame.format_error_msg = told
        compile_ = torch.compile

        def compile_in_parts(model: Any = None, *, fullgraph: bool = False, **options: Any) -> Any:
            # What cannot be traced here, and can on a GPU, shall not end the script.
            return compile_(model, fullgraph=False, **options)

        torch.compile = compile_in_parts

    def cannot_lower(self, error: Exception) -> None:
        """Note that Inductor fails on a graph."""
        self.note(f"a graph is counted operator by operator, Inductor cannot lower it here: {first_line(error)}")


def _is_cuda(device: Any) -> bool:
    return device is not None and (isinstance(device, int) or str(device).startswith("cuda"))
