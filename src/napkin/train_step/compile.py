"""torch.compile for blocks: one block, compiled once, serves all layers (regional compilation).

Compiling the whole model is not faster and takes longer to compile. Head, loss and update are not compiled, nor are
passes without gradients: evaluations are few, with batches of another size. The ledger is of the uncompiled step.
"""

import os
import sysconfig
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from napkin.child_process import run_program
from napkin.model.transformer import Transformer
from napkin.torch_compile import set_up_compiler


class CompiledBlocks:
    """Calls a block: compiled if gradients are enabled, otherwise uncompiled."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        set_up_compiler()
        self.run = run
        self.compiled = torch.compile(run, dynamic=False)

    def __call__(self, *arguments: Any) -> Tensor:
        """Run the block."""
        return (self.compiled if torch.is_grad_enabled() else self.run)(*arguments)


def compile_blocks(model: Transformer) -> None:
    """Make `model` compile its blocks at their first call with gradients."""
    model.run_block = CompiledBlocks(model.run_block)


def missing_compiler(device_type: str) -> str | None:
    """What torch.compile needs and this machine lacks; None if nothing is missing."""
    if device_type != "cpu":
        return None if _has_triton() else "Triton, which generates code for GPUs, is not installed: pip install triton"
    set_up_compiler()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except (InvalidCxxCompiler, OSError, RuntimeError):
        return f"there is no C++ compiler ({os.environ.get('CXX', 'g++')}), which it needs on a CPU"
    if os.name == "nt":
        return None
    headers = sysconfig.get_paths()["include"]
    # Generated code includes these headers.
    command = [compiler, "-x", "c++", "-fsyntax-only", f"-I{headers}", "-"]
    try:
        result = run_program(command, b"#include <Python.h>\n#include <vector>\n")
    except OSError as error:
        return f"the C++ compiler {compiler}, which it needs on a CPU, does not run ({error.strerror})"
    if result.returncode:
        return f"the C++ compiler {compiler} lacks the headers of Python in {headers} or those of C++"
    return None


def _has_triton() -> bool:
    from torch.utils._triton import has_triton

    return has_triton()
