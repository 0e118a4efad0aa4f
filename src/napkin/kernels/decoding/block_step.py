"""The decoding step of one block, for one new token of each of a few sequences, in five launches on a GPU.

    queries, keys, values = rotated(norm(x) · W_qkvᵀ + b)      `project_heads`: keys and values go to their slots
    parts                 = attention to all slots             napkin.kernels.attention.decode
    x                     = x + joined(parts) · W_outᵀ + b      `add_product`
    inner                 = activation(norm(x) · W_upᵀ + b)     `project_activation`
    x                     = x + inner · W_downᵀ + b             `add_product`

Each is an operator of `torch.ops.napkin`: the formula here, Triton kernels (triton_block_step.py) on a GPU. A norm is
computed again by each program that multiplies by some rows of a matrix: a few vectors stay in the cache, and are far
smaller than the rows. Nothing is added up atomically, so that a step repeats bit for bit.

A matrix is a list of tensors: [weight], or [values, scales] in int8 as napkin.model.quantized has them.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from napkin.kernels.operators import DTYPES, operator, triton_obstacle
from napkin.kernels.pointwise.rotary import rotate_reference

MOST_VECTORS = 32
"""Sequences up to which these launches are used: the products of more are worth libraries of their own."""

Matrix = list[Tensor]
Vectors = Float[Tensor, "sequence d_model"]
Activation = Literal["relu", "relu_squared", "gelu", "gelu_tanh", "silu", "sigmoid"]


def reads_vectors(device: torch.device, dtype: torch.dtype) -> bool:
    """True if these launches are computed by Triton kernels for such vectors."""
    return dtype in DTYPES and triton_obstacle(device.type) is None


@dataclass(frozen=True)
class Norm:
    """A norm of vectors: RMSNorm, or centred LayerNorm, perhaps with a bias."""

    gain: Tensor
    bias: Tensor | None
    eps: float
    centred: bool


@dataclass(frozen=True)
class Product:
    """A product with a matrix, and a bias; `factor` multiplies the product."""

    matrix: Matrix
    bias: Tensor | None
    factor: float = 1.0


@dataclass(frozen=True)
class HeadForm:
    """The processing of queries and keys: norms of each head, then a rotation by the angles of the positions."""

    n_heads: int
    query_gain: Tensor | None = None
    key_gain: Tensor | None = None
    eps: float = 0.0
    cosines: Float[Tensor, "sequence head_dim"] | None = None
    signed_sines: Float[Tensor, "sequence head_dim"] | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class NewSlots:
    """The blocks of a layer's keys and values, and the slots that the new tokens get."""

    keys: Float[Tensor, "block kv_heads slot head_dim"] | Int[Tensor, "block kv_heads slot head_dim"]
    values: Float[Tensor, "block kv_heads slot head_dim"] | Int[Tensor, "block kv_heads slot head_dim"]
    blocks: Int[Tensor, " sequence"]
    slots: Int[Tensor, " sequence"]
    scales: tuple[Tensor, Tensor] | None = None


def project_heads(
    x: Vectors, norm: Norm, product: Product, form: HeadForm, new: NewSlots
) -> Float[Tensor, "sequence heads 1 head_dim"]:
    """The queries of new tokens, whose keys and values go to their slots."""
    key_scales, value_scales = (None, None) if new.scales is None else new.scales
    return _project_heads(
        x, product.matrix, product.bias, product.factor, norm.gain, norm.bias, norm.eps, norm.centred,
        form.n_heads, form.query_gain, form.key_gain, form.eps, form.cosines, form.signed_sines, form.interleaved,
        new.blocks, new.slots, new.keys, new.values, key_scales, value_scales,
    )  # fmt: skip


def project_activation(
    x: Vectors, norm: Norm, product: Product, activation: Activation, *, gated: bool
) -> Float[Tensor, "sequence d_ff"]:
    """activation(norm(x) · Wᵀ + b) or, gated, that of the first half of the rows times the product with the second."""
    arguments = product.matrix, product.bias, product.factor, norm.gain, norm.bias, norm.eps, norm.centred
    return _project_activation(x, *arguments, activation, gated)


def add_product(
    x: Float[Tensor, "sequence heads split width"],
    logsumexp: Float[Tensor, "sequence heads split"] | None,
    product: Product,
    residual: Vectors,
) -> Vectors:
    """residual + x · Wᵀ + b, for the parts of `attend_to_splits`, or one split of one head that is the whole vector."""
    return _add_product(x, logsumexp, product.matrix, product.bias, product.factor, residual)


def _weight(matrix: Matrix) -> Tensor:
    return matrix[0].float() if len(matrix) == 1 else matrix[0].float() * matrix[1].float()[:, None]


def _normed_product(
    x: Tensor,
    matrix: Matrix,
    bias: Tensor | None,
    factor: float,
    gain: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    centred: bool,
) -> Tensor:
    wide = x.float()
    wide = wide - wide.mean(dim=-1, keepdim=True) if centred else wide
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * gain.float()
    normed = normed if norm_bias is None else normed + norm_bias.float()
    result = factor * (normed.to(x.dtype).float() @ _weight(matrix).T)
    return result if bias is None else result + bias.float()


def _plain_heads(
    x: Tensor,
    matrix: Matrix,
    bias: Tensor | None,
    factor: float,
    gain: Tensor,
    norm_bias: Tensor | None,
    eps: float,
    centred: bool,
    n_heads: int,
    query_gain: Tensor | None,
    key_gain: Tensor | None,
    head_eps: float,
    cosines: Tensor | None,
    sines: Tensor | None,
    interleaved: bool,
    blocks: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> Tensor:
    n_kv_heads, width = keys.shape[1], keys.shape[3]
    product = _normed_product(x, matrix, bias, factor, gain, norm_bias, eps, centred)
    heads = product.view(len(x), -1, width)
    queries, new_keys, new_values = heads.split((n_heads, n_kv_heads, n_kv_heads), dim=1)
    if query_gain is not None and key_gain is not None:
        queries, new_keys = (
            each * torch.rsqrt(each.square().mean(dim=-1, keepdim=True) + head_eps) * of_head.float()
            for each, of_head in ((queries, query_gain), (new_keys, key_gain))
        )
    if cosines is not None and sines is not None:
        queries, new_keys = (rotate_reference(each, cosines, sines, interleaved, False) for each in (queries, new_keys))
    for new, cache, scales in ((new_keys, keys, key_scales), (new_values, values, value_scales)):
        rounded = new.to(x.dtype)
        if scales is None:
            cache[blocks, :, slots] = rounded.to(cache.dtype)
            continue
        wide = rounded.float()
        largest = (wide.abs().amax(-1, keepdim=True) / 127).to(scales.dtype)
        whole = wide / largest.float().clamp(min=torch.finfo(scales.dtype).tiny)
        cache[blocks, :, slots] = whole.round().clamp(-127, 127).to(torch.int8)
        scales[blocks, :, slots] = largest
    return queries.to(x.dtype)[:, :, None].contiguous()


_project_heads = operator(
    "project_heads(Tensor x, Tensor[] matrix, Tensor? bias, float factor, Tensor gain, Tensor? norm_bias, float eps, "
    "bool centred, int n_heads, Tensor? query_gain, Tensor? key_gain, float head_eps, Tensor? cosines, Tensor? sines, "
    "bool interleaved, Tensor blocks, Tensor slots, Tensor(a!) keys, Tensor(b!) values, Tensor(c!)? key_scales, "
    "Tensor(d!)? value_scales) -> Tensor",
    fake=lambda x, *others: x.new_empty(len(x), others[7], 1, others[16].shape[3]),
    triton="decoding.triton_block_step.project_heads",
)(_plain_heads)


_ACTIVATIONS = {
    "relu": F.relu,
    "relu_squared": lambda z: F.relu(z).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


def _plain_activation(x: Tensor, *arguments: Any) -> Tensor:
    *product, activation, gated = arguments
    result = _normed_product(x, *product)
    first, second = result.chunk(2, dim=-1) if gated else (result, None)
    inner = _ACTIVATIONS[activation](first)
    return (inner if second is None else inner * second).to(x.dtype)


_project_activation = operator(
    "project_activation(Tensor x, Tensor[] matrix, Tensor? bias, float factor, Tensor gain, Tensor? norm_bias, "
    "float eps, bool centred, str activation, bool gated) -> Tensor",
    fake=lambda x, matrix, *others: x.new_empty(len(x), len(matrix[0]) // (2 if others[-1] else 1)),
    triton="decoding.triton_block_step.project_activation",
)(_plain_activation)


def _plain_sum(
    x: Tensor, logsumexp: Tensor | None, matrix: Matrix, bias: Tensor | None, factor: float, residual: Tensor
) -> Tensor:
    if logsumexp is not None and x.shape[2] > 1:
        # A split beyond the end of a sequence has weight 0.
        weights = (logsumexp * torch.log(torch.tensor(2.0))).softmax(dim=-1)
        x = (weights[..., None] * x.float()).sum(dim=2)
    result = factor * (x.flatten(1).to(residual.dtype).float() @ _weight(matrix).T)
    result = result if bias is None else result + bias.float()
    return (residual.float() + result).to(residual.dtype)


_add_product = operator(
    "add_product(Tensor x, Tensor? logsumexp, Tensor[] matrix, Tensor? bias, float factor, Tensor residual) -> Tensor",
    fake=lambda x, logsumexp, matrix, bias, factor, residual: torch.empty_like(residual),
    triton="decoding.triton_block_step.add_product",
)(_plain_sum)
