"""Scratch that no formula tells: what kernels of a CPU library take while they run is measured by running them.

Convolutions, recurrent layers and Fourier transforms copy their operands into formats of their own; napkin's flash
attention makes blocks of scores. An operator that is
traced on fake tensors is run alone, once per distinct call, on tensors of the same shapes; where that would take too
long, on fewer rows of the batch, twice, and the line through both is followed. Products of narrow formats are neither
modelled nor measured: they are named.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from napkin.accounting.allocator_events import allocator_events
from napkin.accounting.contractions import MATRIX_PRODUCTS
from napkin.accounting.microbenchmark import Call, call_of, make_arguments
from napkin.accounting.scratch import NARROW
from napkin.hardware.host import has_amx

aten = torch.ops.aten

# The arguments whose first dimension is the batch; None where an operator has no such dimension for sure.
MEASURED: dict[torch._ops.OpOverloadPacket, tuple[int, ...] | None] = {
    aten.convolution: (0,),
    aten.convolution_backward: (0, 1),
    aten.mkldnn_rnn_layer: None,
    aten.mkldnn_rnn_layer_backward: None,
    aten._fft_r2c: None,
    aten._fft_c2r: None,
    aten._fft_c2c: None,
    # Blocks of scores, in torch.
    torch.ops.napkin.flash_attention: None,
    torch.ops.napkin.flash_attention_backward: None,
}

MOST_WORK = 2e10
"""FLOPs of a call that is run in full: a second of one core, at most."""
MOST_BYTES = 2**29
"""Of its tensors."""

_known: dict[tuple[Call, int], int | None] = {}


def measured_scratch(operator: Any, args: tuple, kwargs: dict, inputs: list[Tensor], flops: int) -> int | None:
    """Bytes of scratch at their largest for one call on fake tensors; None where they cannot be measured."""
    if not isinstance(inputs[0], FakeTensor) or torch._C._autograd._profiler_enabled():  # pyright: ignore
        return None
    call = call_of(operator, args, kwargs)
    if call is None:
        return None
    key = (call, torch.get_num_threads())
    if key not in _known:
        _known[key] = _measure(operator, args, kwargs, inputs, flops)
    return _known[key]


def hides_scratch(operator: Any, inputs: list[Tensor]) -> bool:
    """Whether a call takes scratch that is neither modelled nor measured: packed copies of narrow operands."""
    if operator.overloadpacket not in MATRIX_PRODUCTS or inputs[0].dtype not in NARROW:
        return False
    return torch.backends.mkldnn.enabled and has_amx("bf16" if inputs[0].dtype == torch.bfloat16 else "fp16")


def _measure(operator: Any, args: tuple, kwargs: dict, inputs: list[Tensor], flops: int) -> int | None:
    size = sum(tensor.nbytes for tensor in inputs)
    affordable = min(1.0, MOST_WORK / max(1, flops), MOST_BYTES / max(1, size))
    if affordable >= 1:
        return _run(operator, args, kwargs)
    batched = MEASURED[operator.overloadpacket]
    if batched is None:
        return None
    rows = args[batched[0]].shape[0]
    many = int(affordable * rows)
    few = many // 2
    if few < 1:
        return None
    at_many, at_few = (_run(operator, _with_rows(args, batched, n), kwargs) for n in (many, few))
    if at_many is None or at_few is None:
        return None
    return at_few + (at_many - at_few) * (rows - few) // (many - few)


def _with_rows(args: tuple, batched: tuple[int, ...], rows: int) -> tuple:
    return tuple(arg[:rows] if position in batched else arg for position, arg in enumerate(args))


def _run(operator: Any, args: tuple, kwargs: dict) -> int | None:
    """What the allocator gives a call besides its results; None where the call fails alone."""
    call = call_of(operator, args, kwargs)
    assert call is not None
    generator = torch.Generator().manual_seed(0)
    # A recurrent layer does what it does in training where gradients are enabled; no tensor here needs one.
    with _disable_current_modes(), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        made, keywords = make_arguments(call, generator, "cpu")
        try:
            # The first call of its kind may prepare what later ones find.
            operator(*made, **keywords)
            with allocator_events() as growth:
                results = operator(*made, **keywords)
        except RuntimeError:
            return None
    if not growth:
        return None
    kept = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in _tensors(results)}
    return max(0, growth[0] - sum(kept.values()))


def _tensors(results: Any) -> list[Tensor]:
    return [tensor for tensor in (results if isinstance(results, (tuple, list)) else [results]) if tensor is not None]
