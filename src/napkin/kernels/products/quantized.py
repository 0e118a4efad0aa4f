"""Products of vectors with matrices of 8-bit or 4-bit integers, which are read as they are: the formula, and Triton
kernels for a GPU (triton_quantized.py). What the integers mean is in napkin.model.quantized."""

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor

from napkin.kernels.operators import operator, triton_obstacle

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
