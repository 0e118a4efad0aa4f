"""Scratch memory: bytes that an operator of torch's CPU takes from the allocator and gives back within one call.

Modelled is what torch's own kernels take, which grows with the tensors: operands copied to a common format, terms of a
sum of exponentials, a gradient copied to attention's layout; attention's tiles, which grow with the threads; and, where
the processor has AMX, the keys and values that attention packs for its tiles. Known to take nothing are operators that
make views, and those that compute or move elements one by one. All others are measured (`measured_scratch`).
"""

import platform
from collections.abc import Callable
from functools import reduce
from math import ceil

import torch
from torch import Tensor

from napkin.accounting.operators import OWN_COMPUTING, is_pointwise, is_view
from napkin.hardware.host import has_amx
from napkin.kernels.attention_by_rows import scratch_bytes as compiled_attention_scratch
from napkin.kernels.int8_matmul import product_scratch_bytes as int8_scratch

aten = torch.ops.aten

NARROW = (torch.bfloat16, torch.float16)


def scratch_bytes(operator: torch._ops.OpOverload, args: tuple, kwargs: dict, inputs: list[Tensor]) -> int | None:
    """Bytes of scratch at their largest, for one call on tensors of the CPU; `inputs` are all of them, in order.

    None where no formula tells them. For products inside of attention in narrow formats there is none: there the result
    is what the rest of it takes.
    """
    formula = SCRATCH.get(operator.overloadpacket)
    # Narrow numbers are added up in fp32, booleans as integers: some kernels make a copy first.
    if formula in (_summed, _averaged) and inputs[0].dtype not in (torch.float32, torch.float64):
        return None
    if formula is not None:
        return formula(inputs, (*args, *kwargs.values()))
    return 0 if _takes_none(operator, inputs) else None


def hides_products(operator: torch._ops.OpOverload, inputs: list[Tensor]) -> bool:
    """Whether a call whose scratch has a formula also calls products of a library, which take some of their own."""
    return operator.overloadpacket in _WITH_PRODUCTS and any(tensor.dtype in NARROW for tensor in inputs)


def _takes_none(operator: torch._ops.OpOverload, inputs: list[Tensor]) -> bool:
    name = operator.overloadpacket.__name__.removesuffix("_")
    if operator.namespace != "aten":
        return operator.namespace != "napkin" or name in OWN_COMPUTING or name in _OWN_SENDING
    if is_view(operator) or name in _MAKING:
        return True
    if (is_pointwise(operator) and not _reduces(operator)) or name.startswith("_foreach_"):
        return len({tensor.dtype for tensor in inputs if tensor.dim()}) <= 1
    if name in _PRODUCTS:
        return _in_blas(inputs)
    return name in _DIRECT and all(tensor.is_contiguous() for tensor in inputs)


def _reduces(operator: torch._ops.OpOverload) -> bool:
    # Losses are among the operators that torch calls pointwise, and may add up what they compute.
    return any(argument.name == "reduction" for argument in operator._schema.arguments)


def _in_blas(inputs: list[Tensor]) -> bool:
    """Whether a product is one of BLAS's: in a format that it knows, of matrices as it takes them."""
    if platform.machine() not in ("x86_64", "AMD64") or torch.get_float32_matmul_precision() != "highest":
        return False
    return all(tensor.dtype in (torch.float32, torch.float64) and _has_unit_stride(tensor) for tensor in inputs)


def _has_unit_stride(tensor: Tensor) -> bool:
    if tensor.dim() < 2:
        return tensor.dim() == 0 or tensor.stride(0) == 1
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    whole = tensor.dim() == 2 or tensor.is_contiguous() or tensor.mT.is_contiguous()
    return whole and ((column == 1 and row >= columns) or (row == 1 and column >= rows))


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
    return _copied_to(_asked_dtype(arguments) or inputs[0].dtype, inputs[0])


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

# Operators that make, copy, draw or pick numbers, or pass over them one by one: no scratch, whatever the layout.
_MAKING = frozenset(
    """
    _to_copy _unsafe_view arange bernoulli cat clone copy detach empty empty_like empty_strided exponential fill full
    full_like lift_fresh_copy new_empty new_empty_strided new_full new_ones new_zeros normal ones ones_like rand
    rand_like randint randint_like randn randn_like random resize scalar_tensor set uniform zero zeros zeros_like
    _local_scalar_dense _fused_adam _fused_adamw _fused_sgd _fused_adagrad
    """.split()
)
# The same where all tensors are contiguous.
_DIRECT = frozenset(
    """
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data constant_pad_nd embedding
    embedding_dense_backward flip gather index index_select masked_fill native_dropout native_layer_norm
    nll_loss_backward nll_loss_forward repeat roll select_backward slice_backward stack tril triu
    """.split()
)
_PRODUCTS = frozenset("mm addmm bmm baddbmm mv addmv dot".split())
# napkin's own that send to other ranks, or to the host, and cannot be run alone.
_OWN_SENDING = frozenset("host_copy ring_attention ring_attention_backward".split())
_WITH_PRODUCTS = frozenset(
    {
        torch.ops.napkin.compiled_attention,
        torch.ops.napkin.compiled_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    }
)

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
