"""Count a training step by running it: on a copy, with real tensors, recorded operator by operator.

It is for what fake tensors cannot do: `.item()`, masks, routing of tokens to experts, numpy. The peak is that of the
allocator's own events, with all that kernels take while they run.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from napkin.accounting.ledger import Category, Ledger
from napkin.accounting.metering import meter_step
from napkin.accounting.plain_step import plain_step, uncompile_parts
from napkin.errors import NapkinError, first_line


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
    # What is given twice is one tensor in the copy too.
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
        # Measured, whatever took it.
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
