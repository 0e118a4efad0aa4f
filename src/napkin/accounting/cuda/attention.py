"""The backend of scaled_dot_product_attention that torch chooses on a CUDA device, and the same call on that backend.

The choice follows aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of torch 2.13: the first backend in the order of
preference that is enabled and supports the inputs. `torch.nn.attention.sdpa_kernel` enables, disables and orders
backends here too. Nested tensors are left out, and so are conditions of debug builds and of AMD devices.
"""

from dataclasses import dataclass
from math import floor

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from napkin.errors import NapkinError
from napkin.hardware.target import CudaTarget

aten = torch.ops.aten

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD_DIM_FLASH = 256
LARGEST_HEAD_DIM_CUDNN = 128
MOST_CUDNN_BATCHES_OR_HEADS = 65535


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of scaled_dot_product_attention: query, key, value [batch, heads, position, head_dim] each."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def trains(self) -> bool:
        """True if a backward pass may follow."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in (self.query, self.key, self.value))


def choose_attention(call: AttentionCall, target: CudaTarget) -> SDPBackend:
    """The backend that torch chooses on `target`.

    Raises NapkinError if every backend that supports the inputs is disabled.
    """
    supports = {
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled() and _cudnn_supports(call, target),
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled() and _flash_supports(call, target),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled()
        and _efficient_supports(call, target),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    for backend in _order_of_preference(target):
        if supports.get(backend):
            return backend
    raise NapkinError(
        f"scaled_dot_product_attention: no enabled backend supports {call.query.dtype} queries of shape "
        f"{tuple(call.query.shape)} on compute capability {'.'.join(map(str, target.capability))}: enable "
        "SDPBackend.MATH, which supports all"
    )


def attend_on_cuda(call: AttentionCall, target: CudaTarget) -> Tensor:
    """The call, in the operators that torch would call on `target`."""
    return _BACKENDS[choose_attention(call, target)](call)


def _order_of_preference(target: CudaTarget) -> list[SDPBackend]:
    order = [SDPBackend(number) for number in torch._C._get_sdp_priority_order()]  # pyright: ignore
    if order[:3] == _USUAL_ORDER and target.cudnn_attention and target.capability[0] in (9, 10):
        order.sort(key=lambda backend: backend != SDPBackend.CUDNN_ATTENTION)
    return order


def _cudnn_supports(call: AttentionCall, target: CudaTarget) -> bool:
    query, key, value = call.query, call.key, call.value
    return (
        target.capability >= (8, 0)
        and _is_dense(call, gqa=True, ignore_single=True)
        and _mask_fits(call)
        and not (
            torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
        )
        and _in_format(call, HALF)
        # It supports dropout probabilities that are multiples of 1/16.
        and 16 * call.dropout == floor(16 * call.dropout)
        and max(query.shape[:2]) <= MOST_CUDNN_BATCHES_OR_HEADS
        and _cudnn_supports_head_dims(query.shape[-1], value.shape[-1], target)
        and key.shape[-2] != 1
        and not (call.dropout and query.shape[-2] == 1)
    )


def _cudnn_supports_head_dims(head_dim: int, value_dim: int, target: CudaTarget) -> bool:
    # Multi-head latent attention's.
    latent = (head_dim, value_dim) == (192, 128) and (target.capability == (9, 0) or target.capability[0] == 10)
    return head_dim % 8 == value_dim % 8 == 0 and (latent or max(head_dim, value_dim) <= LARGEST_HEAD_DIM_CUDNN)


def _flash_supports(call: AttentionCall, target: CudaTarget) -> bool:
    query, key, value = call.query, call.key, call.value
    head_dim = query.shape[-1]
    return (
        (8, 0) <= target.capability <= (12, 1)
        and call.mask is None
        and _is_dense(call, gqa=True, ignore_single=True)
        and head_dim == key.shape[-1] == value.shape[-1]
        and head_dim <= LARGEST_HEAD_DIM_FLASH
        and not (call.trains and _small_shared_memory(target) and _needs_large_shared_memory(head_dim, call.dropout))
        # Its causal mask is aligned to the lower right corner, torch's to the upper left.
        and not (call.is_causal and query.shape[-2] != key.shape[-2])
        and _in_format(call, HALF)
    )


def _small_shared_memory(target: CudaTarget) -> bool:
    return (8, 6) <= target.capability <= (8, 9) or (12, 0) <= target.capability <= (12, 1)


def _needs_large_shared_memory(head_dim: int, dropout: float) -> bool:
    return 192 < head_dim <= 224 or (head_dim > 224 and dropout > 0)


def _efficient_supports(call: AttentionCall, target: CudaTarget) -> bool:
    head_dim, value_dim = call.query.shape[-1], call.value.shape[-1]
    alignment = _gemm_alignment(call.query.dtype, target)
    return (
        (5, 0) <= target.capability <= (12, 1)
        and _is_dense(call, gqa=False, ignore_single=False)
        and _mask_fits(call)
        and head_dim == call.key.shape[-1]
        and head_dim % alignment == value_dim % alignment == 0
        and min(head_dim, value_dim) > 0
        and _in_format(call, (torch.float32, *(HALF if target.capability >= (8, 0) else (torch.float16,))))
    )


def _gemm_alignment(dtype: torch.dtype, target: CudaTarget) -> int:
    """The number that must divide the last dimension."""
    if target.capability < (7, 0):
        return 1
    if target.capability < (8, 0):
        return 8 if dtype in HALF else 1
    return 8 if dtype in HALF else 4


def _is_dense(call: AttentionCall, *, gqa: bool, ignore_single: bool) -> bool:
    tensors = (call.query, call.key, call.value)
    if any(tensor.dim() != 4 for tensor in tensors):
        return False
    strides = all(tensor.stride(-1) == 1 for tensor in tensors) or (ignore_single and call.query.shape[-1] == 1)
    if not strides or (call.mask is not None and call.mask.stride(-1) != 1):
        return False
    heads, kv_heads, value_heads = (tensor.shape[1] for tensor in tensors)
    grouped = gqa and call.enable_gqa and kv_heads == value_heads and heads % kv_heads == 0
    same_batch = call.query.shape[0] == call.key.shape[0] == call.value.shape[0]
    not_empty = min(call.query.shape[-2], call.key.shape[-2]) > 0
    return same_batch and not_empty and (grouped or heads == kv_heads == value_heads)


def _mask_fits(call: AttentionCall) -> bool:
    if call.mask is None:
        return True
    (batch, heads, queries, _), keys, shape = call.query.shape, call.key.shape[-2], call.mask.shape
    wanted = (batch, heads, queries, keys)[-len(shape) :]
    return (
        not call.mask.requires_grad
        and len(shape) in (2, 4)
        and all(size in (1, whole) for size, whole in zip(shape, wanted, strict=True))
    )


def _in_format(call: AttentionCall, formats: tuple[torch.dtype, ...]) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype and call.query.dtype in formats


def _flash(call: AttentionCall) -> Tensor:
    head_dim = call.query.shape[-1]
    # The kernel needs head dimensions that are multiples of 8.
    padded = (F.pad(t, (0, -head_dim % 8)) if head_dim % 8 else t for t in (call.query, call.key, call.value))
    scale = head_dim**-0.5 if call.scale is None else call.scale
    mixed = aten._scaled_dot_product_flash_attention(*padded, call.dropout, call.is_causal, False, scale=scale)[0]
    return mixed[..., :head_dim] if head_dim % 8 else mixed


def _cudnn(call: AttentionCall) -> Tensor:
    inputs = (call.query, call.key, call.value, _added(call.mask, call.query.dtype))
    keywords = {"dropout_p": call.dropout, "is_causal": call.is_causal, "scale": call.scale}
    return aten._scaled_dot_product_cudnn_attention(*inputs, call.trains, **keywords)[0]


def _efficient(call: AttentionCall) -> Tensor:
    mask = _added(call.mask, call.query.dtype)
    if mask is not None:
        if any(stride % 8 for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:
            # A multiple of 8 is padded by 8 as well, as torch does.
            mask = F.pad(mask, (0, 8 - mask.shape[-1] % 8))[..., : mask.shape[-1]]
        mask = mask.expand(*call.query.shape[:3], call.key.shape[2])
    keywords = {"dropout_p": call.dropout, "is_causal": call.is_causal, "scale": call.scale}
    inputs = (call.query, call.key, call.value, mask)
    return aten._scaled_dot_product_efficient_attention(*inputs, call.trains, **keywords)[0]


def _math(call: AttentionCall) -> Tensor:
    inputs = (call.query, call.key, call.value, _added(call.mask, call.query.dtype), call.dropout, call.is_causal)
    return aten._scaled_dot_product_attention_math(*inputs, None, scale=call.scale, enable_gqa=call.enable_gqa)[0]


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A boolean mask as numbers to add to the scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask.logical_not(), float("-inf"), torch.zeros((), dtype=dtype, device=mask.device))


_USUAL_ORDER = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_BACKENDS = {
    SDPBackend.FLASH_ATTENTION: _flash,
    SDPBackend.CUDNN_ATTENTION: _cudnn,
    SDPBackend.EFFICIENT_ATTENTION: _efficient,
    SDPBackend.MATH: _math,
}
