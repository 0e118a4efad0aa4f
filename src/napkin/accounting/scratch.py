"""Scratch memory: bytes that an operator of torch's CPU takes from the allocator and gives back within one call.

Modelled is what grows with the tensors: operands copied to a common format, terms of a sum of exponentials, a gradient
copied to attention's layout; attention's tiles, which grow with the threads; and, where the processor has AMX, the keys
and values that attention packs for its tiles. A product of bf16 or fp16 takes some scratch too, inside oneDNN: a few MB
per thread, by rules of its own, left out here.
"""

from collections.abc import Callable
from functools import reduce
from math import ceil

import torch
from torch import Tensor

from napkin.hardware.host import has_amx
from napkin.kernels.attention_by_rows import scratch_bytes as compiled_attention_scratch
from napkin.kernels.int8_matmul import product_scratch_bytes as int8_scratch

aten = torch.ops.aten

NARROW = (torch.bfloat16, torch.float16)


def scratch_bytes(operator: torch._ops.OpOverload, args: tuple, kwargs: dict, inputs: list[Tensor]) -> int:
    """Bytes of scratch at their largest, for one call on tensors of the CPU; `inputs` are all of them, in order."""
    formula = SCRATCH.get(operator.overloadpacket)
    if formula is None:
        return 0
    return formula(inputs, (*args, *kwargs.values()))


def _promoted(inputs: list[Tensor], arguments: tuple) -> int:
    return sum(_copied_to(_common(inputs), tensor) for tensor in inputs)


def _promoted_in_place(inputs: list[Tensor], arguments: tuple) -> int:
    # The result too is made in the common format, before it is written.
    return _promoted([inputs[0], *inputs], arguments)


def _promoted_choice(inputs: list[Tensor], arguments: tuple) -> int:
    return _promoted(inputs[1:], arguments)


def _summed(inputs: list[Tensor], arguments: tuple) -> int:
    return _copied_to(_asked_dtype(arguments) or inputs[0].dtype, inputs[0])


def _averaged(inputs: list[Tensor], arguments: tuple) -> int:
    in_fp32 = torch.float32 if inputs[0].dtype in NARROW else inputs[0].dtype
    return _copied_to(_asked_dtype(arguments) or in_fp32, inputs[0])


def _normed_one_by_one(inputs: list[Tensor], arguments: tuple) -> int:
    return max(_summed([tensor], arguments) for tensor in inputs)


def _log_of_sum_of_exponentials(inputs: list[Tensor], arguments: tuple) -> int:
    return inputs[0].nbytes


def _attention(inputs: list[Tensor], arguments: tuple) -> int:
    query, key = inputs[:2]
    # The only boolean among the arguments is `is_causal`.
    packed = _packs(query, key, is_causal=any(value is True for value in arguments))
    # Besides the scores: the rows of the output, their maxima and their sums.
    tiles = _attention_tiles(query, key, tiles=1, numbers_per_row=query.shape[-1] + 2, packed=packed)
    return tiles + (_packed_keys_and_values(query, key) if packed else 0)


def _attention_backward(inputs: list[Tensor], arguments: tuple) -> int:
    gradient, query, key = inputs[:3]
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    return copied + _attention_tiles(query, key, tiles=2, numbers_per_row=0, packed=False)


def _compiled_attention(inputs: list[Tensor], arguments: tuple) -> int:
    return compiled_attention_scratch(*inputs[:3], backward=False)


def _compiled_attention_backward(inputs: list[Tensor], arguments: tuple) -> int:
    return compiled_attention_scratch(*inputs[1:4], backward=True)


def _int8_product(inputs: list[Tensor], arguments: tuple) -> int:
    return int8_scratch(*inputs[:2])


def _asked_dtype(arguments: tuple) -> torch.dtype | None:
    return next((value for value in arguments if isinstance(value, torch.dtype)), None)


def _common(inputs: list[Tensor]) -> torch.dtype:
    # Numbers of no dimension do not widen the format of others.
    return reduce(torch.promote_types, (tensor.dtype for tensor in inputs if tensor.dim()), inputs[0].dtype)


def _copied_to(dtype: torch.dtype, tensor: Tensor) -> int:
    return tensor.numel() * dtype.itemsize if tensor.dim() and tensor.dtype != dtype else 0


def _attention_tiles(query: Tensor, key: Tensor, *, tiles: int, numbers_per_row: int, packed: bool) -> int:
    """Tiles of queries × keys in fp32, once more in the format of the inputs where that is narrower."""
    rows, columns = _tile(query, key)
    wide = max(4, query.element_size())
    narrow = query.element_size() if query.element_size() < 4 else 0
    padded = _even(columns) if packed else columns
    per_thread = tiles * rows * (columns * wide + padded * narrow) + rows * numbers_per_row * wide
    return torch.get_num_threads() * per_thread


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """The kernel's own choice of tile, by number of queries: (queries, keys)."""
    queries, keys = query.shape[-2], key.shape[-2]
    return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32), min(keys, 512)


def _packs(query: Tensor, key: Tensor, *, is_causal: bool) -> bool:
    """Whether attention packs keys and values for AMX: where it can, and multiplies with them often enough."""
    if query.dtype not in NARROW or not torch.backends.mkldnn.enabled:
        return False
    if not has_amx("bf16" if query.dtype == torch.bfloat16 else "fp16"):
        return False
    # The kernel's own thresholds: without packing, its products of bf16 are faster than those of fp16.
    shortest, reuse = (64, 4) if query.dtype == torch.bfloat16 else (16, 1)
    queries, keys = query.shape[-2], key.shape[-2]
    rows, _ = _tile(query, key)
    tiles = query.shape[:-2].numel() * ceil(queries / rows)
    rows_per_thread = rows * ceil(tiles / torch.get_num_threads())
    products = rows_per_thread * (min(queries, keys) if is_causal else keys)
    return min(queries, keys) >= shortest and products >= reuse * key.shape[:-1].numel()


def _packed_keys_and_values(query: Tensor, key: Tensor) -> int:
    """Keys and values in pairs, an odd dimension padded, and a buffer per thread for a transposed tile of keys."""
    rows, columns = _tile(query, key)
    heads, keys, head_dim = key.shape[:-2].numel(), key.shape[-2], key.shape[-1]
    whole_tiles = (keys - 1) // columns
    padded_keys = whole_tiles * _even(columns) + _even(keys - whole_tiles * columns)
    numbers = heads * (_even(head_dim) * keys + padded_keys * head_dim)
    padded_queries = rows * _even(head_dim) if head_dim % 2 else 0
    return (numbers + torch.get_num_threads() * (columns * head_dim + padded_queries)) * key.element_size()


def _even(number: int) -> int:
    return number + number % 2


_ARITHMETIC = ("add", "sub", "mul", "div", "addcmul", "addcdiv")
_COMPARISON = ("maximum", "minimum", "pow", "eq", "ne", "lt", "le", "gt", "ge")

SCRATCH: dict[torch._ops.OpOverloadPacket, Callable[[list[Tensor], tuple], int]] = {
    **{getattr(aten, name): _promoted for name in (*_ARITHMETIC, *_COMPARISON)},
    **{getattr(aten, name + "_"): _promoted_in_place for name in _ARITHMETIC},
    aten.where: _promoted_choice,
    aten.sum: _summed,
    aten.cumsum: _summed,
    aten.linalg_vector_norm: _summed,
    aten._foreach_norm: _normed_one_by_one,
    aten.mean: _averaged,
    aten.logsumexp: _log_of_sum_of_exponentials,
    torch.ops.napkin.compiled_attention: _compiled_attention,
    torch.ops.napkin.compiled_attention_backward: _compiled_attention_backward,
    torch.ops.napkin.int8_product: _int8_product,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
