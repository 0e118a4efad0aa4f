"""Products of vectors with matrices of 8-bit or 4-bit integers, which are read as they are: the formula, Triton kernels
for a GPU (triton_quantized.py), and a compiled loop for a CPU (numba_integers.py). What the integers mean is in
napkin.model.quantized."""

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from napkin.kernels.operators import cpu_operator, is_bf16, on_threads, operator, triton_obstacle

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


PIECE = 32
"""The groups of `integer_product` are multiples of this."""
_FEW = 16
"""Vectors up to which each thread makes their integers for itself, and a product is one call."""
_BLOCK = 64
"""Rows whose products are held in fp32 before they are rounded."""
SCALE_FORMATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""The numbers of formats of scales and offsets, see numba_integers.py."""


def integer_form(values: Tensor, minima: Tensor | None) -> int:
    """The number of the compiled loop for a matrix, see numba_integers.py."""
    return 0 if values.dtype == torch.int8 else 2 if minima is None else 1


def products_dtype(scales: Tensor) -> torch.dtype:
    """The number format of products: fp32 of integers that come from a file, whose scales are in fp16 or fp32, else
    bf16."""
    return torch.bfloat16 if scales.dtype == torch.bfloat16 else torch.float32


@cpu_operator(
    "integer_product(Tensor x, Tensor values, Tensor scales, Tensor? middles, Tensor? minima, Tensor? bias) -> Tensor",
    lambda x, values, *others: x.new_empty(len(x), len(values), dtype=x.dtype if is_bf16(x) else torch.float32),
)
def integer_product(
    x: Tensor, values: Tensor, scales: Tensor, middles: Tensor | None, minima: Tensor | None, bias: Tensor | None
) -> Tensor:
    """x · Wᵀ + bias on a CPU, with W = q · scale of a group of a row, for 4 bits (q - 8) · scale + middle, or
    q · scale + minimum; both offsets may be missing. Groups are multiples of 32 columns, scales in bf16, fp16 or fp32.

    The numbers of x are rounded to 16 bits, 32 of them with one scale; sums are in fp32, and rounded once to bf16 where
    x is in that format.
    """
    (n_vectors, n), (n_rows, row_bytes) = x.shape, values.shape
    form, n_groups, kind = integer_form(values, minima), scales.numel() // n_rows, SCALE_FORMATS[scales.dtype]
    n_pieces = row_bytes // (PIECE // 2 if form else PIECE)
    in_bf16, offsets = x.dtype == torch.bfloat16, middles if minima is None else minima
    x = (x if in_bf16 else x.float()).contiguous()
    if n_vectors > _FEW:
        return _product_of_many(x, values, scales, offsets, bias, (n_pieces, n_groups, kind, form))
    if bias is not None and not is_bf16(bias):
        bias = bias.float()
    result = torch.empty(n_vectors, n_rows, dtype=x.dtype)
    on_threads(
        "products.numba_integers.multiply_few",
        (x, in_bf16, values, scales, offsets, bias, bias is not None and is_bf16(bias), result),
        (n_vectors, n, n_pieces, n_groups, kind, n_rows, form, _BLOCK),
        n_rows=n_rows,
        n_columns=n * n_vectors,
        buffer_size=(n_pieces + 3) * ((PIECE // 2 + 2) * n_vectors + PIECE + 12) + _BLOCK * (n_vectors + 1) + 64,
    )
    return result


def _product_of_many(
    x: Tensor,
    values: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    numbers_of_matrix: tuple[int, int, int, int],
) -> Tensor:
    """The product, with the vectors' integers made once for all threads."""
    n_vectors, n = x.shape
    n_rows, (n_pieces, n_groups, kind, form) = len(values), numbers_of_matrix
    # Pieces are filled up to fours, and 64 bytes more may be read.
    numbers = torch.empty((-(-n_pieces // 4) * 4 * n_vectors + 1) * PIECE, dtype=torch.int16)
    # Sums are read in eights.
    of_pieces, result = torch.empty(2, n_vectors * n_pieces + 8), torch.empty(n_vectors, n_rows)
    on_threads(
        "products.numba_integers.vectors_to_integers",
        (x, is_bf16(x), numbers, *of_pieces),
        (n, n_pieces, form != 0),
        n_rows=n_vectors,
        n_columns=n,
        buffer_size=PIECE * n_pieces,
    )
    on_threads(
        "products.numba_integers.multiply_integers",
        (numbers, *of_pieces, values, scales, offsets, result),
        (n_vectors, n_pieces, n_groups, kind, n_rows, form),
        n_rows=n_rows,
        n_columns=n * n_vectors,
        buffer_size=12 * n_pieces + 16,
    )
    return (result if bias is None else result.add_(bias)).to(x.dtype)
