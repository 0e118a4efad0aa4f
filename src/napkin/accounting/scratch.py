"""Scratch memory: bytes that an operator of torch's CPU takes from the allocator and gives back within one call.

Modelled is what grows with the tensors: operands copied to a common format, terms of a sum of exponentials, a gradient
copied to attention's layout; and attention's tiles, which grow with the threads. A bf16 product takes some scratch too,
inside oneDNN: up to 1.4 MB per thread, by rules of its own, left out here.
"""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

aten = torch.ops.aten

NARROW = (torch.bfloat16, torch.float16)


def scratch_bytes(operator: torch._ops.OpOverload, args: tuple, kwargs: dict, inputs: list[Tensor]) -> int:
    """Bytes of scratch at their largest, for one call on tensors of the CPU; `inputs` are all of them, in order."""
    formula = SCRATCH.get(operator.overloadpacket)
    if formula is None:
        return 0
    dtype = next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)), None)
    return formula(inputs, dtype)


def _promoted(inputs: list[Tensor], dtype: torch.dtype | None) -> int:
    return sum(_copied_to(_common(inputs), tensor) for tensor in inputs)


def _promoted_in_place(inputs: list[Tensor], dtype: torch.dtype | None) -> int:
    # The result too is made in the common format, before it is written.
    return _promoted([inputs[0], *inputs], dtype)


def _promoted_choice(inputs: list[Tensor], dtype: torch.dtype | None) -> int:
    return _promoted(inputs[1:], dtype)


def _summed(inputs: list[Tensor], dtype: torch.dtype | None) -> int:
    return _copied_to(dtype or inputs[0].dtype, inputs[0])


def _averaged(inputs: list[Tensor], dtype: torch.dtype | None) -> int:
    in_fp32 = torch.float32 if inputs[0].dtype in NARROW else inputs[0].dtype
    return _copied_to(dtype or in_fp32, inputs[0])


def _normed_one_by_one(inputs: list[Tensor], dtype: torch.dtype | None) -> int:
    return max(_summed([tensor], dtype) for tensor in inputs)


def _log_of_sum_of_exponentials(inputs: list[Tensor], dtype: torch.dtype | None) -> int:
    return inputs[0].nbytes


def _attention(inputs: list[Tensor], dtype: torch.dtype | None) -> int:
    query, key = inputs[:2]
    # Besides the scores: the rows of the output, their maxima and their sums.
    return _attention_tiles(query, key, tiles=1, numbers_per_row=query.shape[-1] + 2)


def _attention_backward(inputs: list[Tensor], dtype: torch.dtype | None) -> int:
    gradient, query, key = inputs[:3]
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    return copied + _attention_tiles(query, key, tiles=2, numbers_per_row=0)


def _common(inputs: list[Tensor]) -> torch.dtype:
    # Numbers of no dimension do not widen the format of others.
    return reduce(torch.promote_types, (tensor.dtype for tensor in inputs if tensor.dim()), inputs[0].dtype)


def _copied_to(dtype: torch.dtype, tensor: Tensor) -> int:
    return tensor.numel() * dtype.itemsize if tensor.dim() and tensor.dtype != dtype else 0


def _attention_tiles(query: Tensor, key: Tensor, *, tiles: int, numbers_per_row: int) -> int:
    """Tiles of queries × keys in fp32, once more in the format of the inputs where that is narrower."""
    queries, keys = query.shape[-2], key.shape[-2]
    # The kernel's own choice of tile, by number of queries.
    rows = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
    wide = max(4, query.element_size())
    narrow = query.element_size() if query.element_size() < 4 else 0
    a_thread = tiles * rows * min(keys, 512) * (wide + narrow) + rows * numbers_per_row * wide
    return torch.get_num_threads() * a_thread


_ARITHMETIC = ("add", "sub", "mul", "div", "addcmul", "addcdiv")
_COMPARISON = ("maximum", "minimum", "pow", "eq", "ne", "lt", "le", "gt", "ge")

SCRATCH: dict[torch._ops.OpOverloadPacket, Callable[[list[Tensor], torch.dtype | None], int]] = {
    **{getattr(aten, name): _promoted for name in (*_ARITHMETIC, *_COMPARISON)},
    **{getattr(aten, name + "_"): _promoted_in_place for name in _ARITHMETIC},
    aten.where: _promoted_choice,
    aten.sum: _summed,
    aten.cumsum: _summed,
    aten.linalg_vector_norm: _summed,
    aten._foreach_norm: _normed_one_by_one,
    aten.mean: _averaged,
    aten.logsumexp: _log_of_sum_of_exponentials,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
