"""torch.compile for blocks: one block, compiled once, serves all layers (regional compilation).

Compiling the whole model is not faster and takes longer to compile. Head, loss and update are not compiled, nor are
passes without gradients: evaluations are few, with batches of another size.

Activation checkpointing: activations are dropped after the forward pass and computed again in the backward pass.

Full recomputation keeps only a block's input (Chen et al. 2016), for about a third more FLOPs. Selective
recomputation keeps the outputs of linear layers and fused attention, which are expensive to recompute, and
drops what is cheap: norms, activation functions, rotary positions, and attention scores (Korthikanti et al. 2022).
"""

import functools
import os
import sysconfig
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
        return (self.compiled if torch.is_grad_enabled() else self.run)(*arguments)


def compile_blocks(model: Transformer) -> None:
    """Make `model` compile its blocks at their first call with gradients."""
    model.run_block = CompiledBlocks(model.run_block)


def missing_compiler(device_type: str) -> str | None:
    """The part of torch.compile's requirements that this machine lacks; None if nothing is missing."""
    if device_type != "cpu":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton, which generates code for GPUs, is not installed: pip install triton"
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


Recompute = Literal["none", "selective", "full"]

_FUSED_ATTENTION = "_scaled_dot_product_"
_PRODUCTS = frozenset(
    (
        "mm addmm _scaled_mm _int_mm int8_product _grouped_mm grouped_matmul fused_grouped_matmul ring_attention "
        "flash_attention compiled_attention"
    ).split()
)
"""Products with weights, and attention in a ring or in blocks. Products of plain attention are batched, and their
results are as large as the scores."""


def recompute_blocks(model: Transformer, what: Recompute, *, every: int = 1) -> None:
    """Make `model` recompute its blocks 0, `every`, 2 · `every`, ... in training; results stay the same."""
    if what == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": model.config.dropout > 0}
    if what == "selective":
        options["context_fn"] = _selective
    model.run_block = _Recompute(model.blocks[::every], options, model.run_block)


class _Recompute:
    def __init__(self, blocks: Iterable[nn.Module], options: dict[str, Any], run: Callable[..., Tensor]) -> None:
        # A pipeline drops the blocks that other ranks hold.
        self.blocks = weakref.WeakSet(blocks)
        self.options = options
        self.run = run

    def __call__(self, block: nn.Module, *arguments: Any) -> Tensor:
        if block not in self.blocks or not torch.is_grad_enabled():
            return self.run(block, *arguments)
        return checkpoint(self.run, block, *arguments, **self.options)  # pyright: ignore[reportReturnType]


def _selective() -> tuple[AbstractContextManager, AbstractContextManager]:
    return create_selective_checkpoint_contexts(_policy)  # pyright: ignore[reportReturnType]


def _policy(context: Any, operator: Callable, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_expensive(operator) else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _is_expensive(operator: Any) -> bool:
    name = operator.overloadpacket.__name__
    return name in _PRODUCTS or name.startswith(_FUSED_ATTENTION)
