"""NVTX ranges of a step's modules and of its update, for Nsight Systems, where a CUDA device computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


@contextmanager
def nvtx_ranges(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Mark the forward pass of each part of `module`, and each optimizer's step, while the block runs."""
    if device.type != "cuda":
        yield
        return
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    paths = {id(child): name for name, child in module.named_modules()}

    # The hooks return None: anything else would replace arguments or output.
    def enter(child: nn.Module, _: Any) -> None:
        push(f"forward {paths.get(id(child), type(child).__name__)}")

    def leave(*_: Any) -> None:
        pop()

    def enter_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        push(f"optimizer {type(optimizer).__name__}")

    hooks = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
        register_optimizer_step_pre_hook(enter_update),
        register_optimizer_step_post_hook(leave),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
