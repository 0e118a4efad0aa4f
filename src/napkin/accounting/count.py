"""Count a training step exactly, without running it: the step is traced on fake tensors.

Fake tensors have shapes, formats and storages, but no data: nothing is allocated, nothing computed.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from napkin.accounting.ledger import Ledger
from napkin.accounting.record import record
from napkin.errors import NapkinError


def count(
    module: nn.Module,
    batch: Any,
    step: Callable[[nn.Module, Any], Any] | None = None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
) -> Ledger:
    """Trace one training step in its steady state and return its ledger.

    Args:
        module: any `torch.nn.Module`, on real, meta or fake tensors. It is left untouched.
        batch: a tensor, or a tuple or dict of them (positional or keyword arguments of `module`). Only shapes,
            formats and strides are read.
        step: `step(module, batch)` trains once. Without one: forward pass, loss, backward pass, update. Where the
            step closes over an optimizer, build module and optimizer under one `FakeTensorMode` and pass the fake
            module: it is used as it is.
        optimizer: for the plain step, a function of the parameters that returns an optimizer, for example
            `torch.optim.AdamW`. None counts no update.

    Raises NapkinError where the step asks for data that fake tensors do not have.
    """
    mode = _mode_of(module) or FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        twin = module if _mode_of(module) else _fake_twin(module, mode)
        inputs = pytree.tree_map_only(Tensor, lambda tensor: _fake(tensor, mode), batch)
        run = step or _plain_step(twin, optimizer)
        try:
            # The second step is the steady one: the optimizer's state is born in the first.
            return record(twin, lambda: run(twin, inputs), warm_up=1)
        except DataDependentOutputException as error:
            raise NapkinError(
                f"the step reads values that exist only when it runs ({error.func}): "
                "pass a `step` without `.item()`, printing or branches on data"
            ) from None


def _mode_of(module: nn.Module) -> FakeTensorMode | None:
    for parameter in module.parameters():
        if isinstance(parameter, FakeTensor):
            return parameter.fake_mode
    return None


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    # Always a fake tensor of the CPU: fake CUDA tensors abort a CPU build as soon as autograd is involved.
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return fake.requires_grad_(tensor.requires_grad) if tensor.is_leaf else fake


def _fake_twin(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of `module` whose parameters and buffers are fake; tied ones stay tied."""
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        fake = _fake(tensor.detach(), mode)
        if isinstance(tensor, nn.Parameter):
            fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = fake
    return copy.deepcopy(module, memo)


def _plain_step(
    module: nn.Module, optimizer: Callable[..., torch.optim.Optimizer] | None
) -> Callable[[nn.Module, Any], None]:
    update = optimizer(module.parameters()) if optimizer else None

    def step(module: nn.Module, batch: Any) -> None:
        if isinstance(batch, dict):
            output = module(**batch)
        else:
            output = module(*batch) if isinstance(batch, tuple) else module(batch)
        _scalar(output).backward()
        if update is not None:
            update.step()
        module.zero_grad(set_to_none=True)

    return step


def _scalar(output: Any) -> Tensor:
    """The loss that a model returned, or a plain one: the mean of all it returned."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise NapkinError("the model returns no tensor that depends on a parameter: there is nothing to train")
    return leaves[0] if leaves[0].dim() == 0 else sum(leaf.float().mean() for leaf in leaves)  # pyright: ignore
