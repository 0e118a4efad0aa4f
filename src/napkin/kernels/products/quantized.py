"""Products of vectors with matrices of 8-bit or 4-bit integers, which are read as they are: the formula, Triton kernels
for a GPU (triton_quantized.py), and a compiled loop for a CPU (numba_integers.py). What the integers mean is in
napkin.model.quantized."""

import functools
from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from napkin.kernels.operators import (
    SMALLEST_SHARE,
    cpu_operator,
    is_bf16,
    is_unwatched,
    on_threads,
    operator,
    triton_obstacle,
)
from napkin.kernels.products.numba_forms import (
    BF16,
    CENTRED_INT4,
    FEWEST_GROUPS,
    FP16,
    FP32,
    GROUPED_INT4,
    INT4,
    INT8,
    MOST_PIECES,
    PIECE,
    PIECES_OF_GROUPS,
    WHOLE_INT8,
)

MOST_VECTORS = 64
"""Vectors up to which reading integers saves more than products of few rows cost."""
GROUPS = (32, 64, 128, 256)
"""Numbers that may share a scale."""


def quantized_product_reference(
    x: Float[Tensor, "vector in_features"],
    values: Int8[Tensor, "out_features in_features"] | UInt8[Tensor, "out_features half_padded"],
    scales: Tensor,
    middles: Tensor | None,
) -> Float[Tensor, "vector out_features"]:
    """x · Wᵀ in fp32, rounded once, with W = q · scale of a row, or with `middles` (q - 8) · scale + middle of a group
    of it; then two q are in a byte, the one of the even column in its lower half."""
    if middles is None:
        weight = values.float() * scales.float()[:, None]
    else:
        integers = torch.stack((values & 15, values >> 4), dim=2).flatten(1)
        groups = integers.float().unflatten(1, (scales.shape[1], -1))
        weight = ((groups - 8) * scales.float()[..., None] + middles.float()[..., None]).flatten(1)
    return (x.float() @ weight[:, : x.shape[1]].T).to(x.dtype)


quantized_product = operator(
    "quantized_product(Tensor x, Tensor values, Tensor scales, Tensor? middles) -> Tensor",
    fake=lambda x, values, *others: x.new_empty(len(x), len(values)),
    triton="products.triton_quantized.quantized_product",
)(quantized_product_reference)


def reads_integers(values: Tensor, scales: Tensor, n_vectors: int) -> bool:
    """True if Triton's kernel multiplies that many vectors by integers on this device."""
    if values.device.type != "cuda" or n_vectors > MOST_VECTORS:
        return False
    fits = values.dtype == torch.int8 or 2 * values.shape[1] // scales.shape[1] in GROUPS
    return fits and triton_obstacle("cuda") is None


_BLOCK, _BLOCK_OF_ONE = 64, 1024
"""Rows whose products, of a few vectors and of one, are held in fp32 before they are rounded."""
_OF_PIECE, _OF_VECTOR = 26, 136
"""The float32 that hold a vector's integers, scales and sums: for each piece, and beside them."""
_SCALE_FORMATS = {torch.bfloat16: BF16, torch.float16: FP16, torch.float32: FP32}


class CompiledForm(NamedTuple):
    """What the compiled loops are told of a matrix: pieces and groups of a row, the format of scales, and a form."""

    n_pieces: int
    n_groups: int
    scale_format: int
    form: int


def compiled_form(values: Tensor, scales: Tensor, middles: Tensor | None, minima: Tensor | None) -> CompiledForm:
    """The form in which a matrix is read, see numba_forms.py."""
    offsets = 2 if minima is not None else 1 if middles is not None else 0
    return _form_of(values.shape, values.dtype, scales.numel(), scales.dtype, offsets)


@functools.cache
def _form_of(
    shape: torch.Size, dtype: torch.dtype, n_scales: int, of_scales: torch.dtype, offsets: int
) -> CompiledForm:
    (n_rows, row_bytes), in_bf16 = shape, of_scales == torch.bfloat16
    n_groups = n_scales // n_rows
    n_pieces = row_bytes // PIECE if dtype == torch.int8 else 2 * row_bytes // PIECE
    if dtype == torch.int8:
        form = WHOLE_INT8 if n_groups == 1 and in_bf16 and n_pieces <= MOST_PIECES else INT8
    elif offsets == 2:
        form = INT4
    else:
        per_group = n_pieces // n_groups
        is_grouped = offsets == 1 and in_bf16 and n_groups >= FEWEST_GROUPS and per_group in PIECES_OF_GROUPS
        form = GROUPED_INT4 if is_grouped else CENTRED_INT4
    return CompiledForm(n_pieces, n_groups, _SCALE_FORMATS[of_scales], form)


def products_dtype(scales: Tensor) -> torch.dtype:
    """The number format of products: fp32 of integers that come from a file, whose scales are in fp16 or fp32, else
    bf16."""
    return torch.bfloat16 if scales.dtype == torch.bfloat16 else torch.float32


def integer_product(
    x: Tensor, values: Tensor, scales: Tensor, middles: Tensor | None, minima: Tensor | None, bias: Tensor | None
) -> Tensor:
    """x · Wᵀ + bias on a CPU, with W = q · scale of a group of a row, for 4 bits (q - 8) · scale + middle, or
    q · scale + minimum; both offsets may be missing. Groups are multiples of 32 columns, scales in bf16, fp16 or fp32.

    The numbers of x are rounded to 24 bits of the largest, or to 16 bits of the largest of 32 of them, see
    numba_quantized.py; sums are in fp32, and rounded once to bf16 where x is in that format.
    """
    multiply = _product if is_unwatched(x, values) else _watched_product
    return multiply(x, values, scales, middles, minima, bias)


def _product(
    x: Tensor, values: Tensor, scales: Tensor, middles: Tensor | None, minima: Tensor | None, bias: Tensor | None
) -> Tensor:
    (n_vectors, n), n_rows, numbers = x.shape, values.shape[0], compiled_form(values, scales, middles, minima)
    in_bf16, offsets = x.dtype == torch.bfloat16, middles if minima is None else minima
    x = (x if in_bf16 else x.float()).contiguous()
    if bias is not None and not is_bf16(bias):
        bias = bias.float()
    result, n_columns, made = x.new_empty(n_vectors, n_rows), n * n_vectors, None
    block = _BLOCK if n_vectors > 1 else _BLOCK_OF_ONE
    buffer_size = (PIECE + 12) * (numbers.n_pieces + 1) + block * (n_vectors + 1) + 28
    size = n_vectors * (_OF_PIECE * numbers.n_pieces + _OF_VECTOR) + 24
    if n_columns > SMALLEST_SHARE:
        # Each thread would make the integers in more time than it takes to begin on all threads once more.
        made = torch.empty(size)
        on_threads(
            "products.numba_integers.vectors_to_integers",
            (x, int(in_bf16), made),
            (n_vectors, n, numbers.n_pieces, numbers.n_groups, numbers.form),
            n_rows=n_vectors,
            n_columns=n,
            buffer_size=PIECE * (numbers.n_pieces + 1),
        )
    else:
        buffer_size += size
    on_threads(
        "products.numba_integers.multiply_few",
        (x, int(in_bf16), made, values, scales, offsets, bias, int(bias is not None and is_bf16(bias)), result),
        (n_vectors, n, *numbers, n_rows, block),
        n_rows=n_rows,
        n_columns=n_columns,
        buffer_size=buffer_size,
    )
    return result


_watched_product = cpu_operator(
    "integer_product(Tensor x, Tensor values, Tensor scales, Tensor? middles, Tensor? minima, Tensor? bias) -> Tensor",
    lambda x, values, *others: x.new_empty(len(x), len(values), dtype=x.dtype if is_bf16(x) else torch.float32),
)(_product)
