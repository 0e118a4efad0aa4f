"""The FLOPs of contractions: a formula for each operator that multiplies and sums over a dimension.

A contraction of [m, k] with [k, n] costs 2·m·n·k FLOPs: a multiply and an add for each triple.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# These make operators of torch.ops.napkin.
import napkin.kernels.attention.by_rows
import napkin.kernels.attention.decode
import napkin.kernels.attention.flash
import napkin.kernels.attention.ring
import napkin.kernels.decoding.block_step
import napkin.kernels.loss.cross_entropy
import napkin.kernels.products.grouped
import napkin.kernels.products.linear
import napkin.kernels.products.quantized  # noqa: F401

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of one call, as `ledger.Row` defines them."""

    flops: int
    contraction: tuple[int, int, int, int]
    causal_flops: int
    recomputed_flops: int = 0


def _product(batch: int, m: int, n: int, k: int) -> Work:
    flops = 2 * batch * m * n * k
    return Work(flops, (batch, m, n, k), flops)


def _mm(given: dict, result: Tensor, left: str = "self", right: str = "mat2") -> Work:
    (m, k), n = given[left].shape[-2:], given[right].shape[-1]
    batch = given[left].shape[0] if given[left].dim() == 3 else 1
    return _product(batch, m, n, k)


def _addmm(given: dict, result: Tensor) -> Work:
    return _mm(given, result, "mat1", "mat2")


def _baddbmm(given: dict, result: Tensor) -> Work:
    return _mm(given, result, "batch1", "batch2")


def _own_int8_product(given: dict, result: Tensor) -> Work:
    return _mm(given, result, "left", "right")


def _mv(given: dict, result: Tensor) -> Work:
    matrix = given.get("mat", given["self"])
    return _product(1, matrix.shape[0], 1, matrix.shape[1])


def _dot(given: dict, result: Tensor) -> Work:
    return _product(1, 1, 1, given["self"].shape[0])


def _grouped_mm(given: dict, result: Tensor) -> Work:
    # Each row of a ragged operand belongs to one group. Two ragged operands have the summed dimension in common.
    left, right = given["self"].shape, given["mat2"].shape
    batch = left[0] if len(left) == len(right) == 3 else 1
    return _product(batch, left[-2], right[-1], left[-1])


def _own_grouped_matmul(given: dict, result: Tensor) -> Work:
    return _product(1, len(given["x"]), *given["weight"].shape[1:])


def _own_quantized_product(given: dict, result: Tensor) -> Work:
    n_vectors, in_features = given["x"].shape
    return _product(1, n_vectors, len(given["values"]), in_features)


def _product_of_step(given: dict, result: Tensor) -> Work:
    # x is [vector, ...], split by split where attention has them.
    rows, columns = given["matrix"][0].shape
    return _product(1, len(given["x"]), rows, columns)


def _own_grouped_outer(given: dict, result: Tensor) -> Work:
    (rows, wide), narrow = given["left"].shape, given["right"].shape[1]
    return _product(1, wide, narrow, rows)


def _linear(given: dict, result: Tensor) -> Work:
    out_features, in_features = given["weight"].shape
    return _product(1, given["input"].numel() // in_features, out_features, in_features)


def _packed_product(given: dict, result: Tensor) -> Work:
    # A vector times a matrix of integers, two of which may share a byte.
    m, k = given["self"].shape
    return _product(1, m, given["mat2"].shape[0], k)


def _convolution(given: dict, result: Tensor) -> Work:
    return _convolved(given, given["transposed"], result.shape)


def _convolution_backward(given: dict, result: Any) -> Work:
    once = _convolved(given, given["transposed"], given["grad_output"].shape)
    wanted = sum(bool(wanted) for wanted in given["output_mask"][:2])
    return Work(wanted * once.flops, once.contraction, wanted * once.flops)


def _convolved(given: dict, transposed: bool, output_shape: torch.Size) -> Work:
    weight = given["weight"].shape
    # Each weight of a filter is used once per position of the output or, transposed, of the input.
    positions = given["input"].shape if transposed else output_shape
    return _product(1, positions[0] * math.prod(positions[2:]), weight[0], math.prod(weight[1:]))


def _recurrent(given: dict, result: Any) -> Work:
    # Each step multiplies the input by one matrix and the state by another: the first two of a layer's weights.
    weights = given["weight"] if "weight" in given else [given[name] for name in given if name.startswith("weight")][:2]
    matrices = [weight for weight in weights if weight.dim() == 2]
    positions = math.prod(given["input"].shape[:-1])
    flops = 2 * positions * sum(matrix.numel() for matrix in matrices)
    gates = matrices[0].shape[0]
    return Work(flops, (1, positions, gates, flops // (2 * positions * gates)), flops)


def _recurrent_backward(given: dict, result: Any) -> Work:
    # The gradients of input, state and matrices are computed even if they are not needed.
    once = _recurrent(given, result)
    return Work(2 * once.flops, once.contraction, 2 * once.flops)


def _trilinear(given: dict, result: Tensor) -> Work:
    # The first two are multiplied, and the result with the third, slice by slice along `unroll_dim`; a pair with a
    # summed dimension is a matrix product.
    first, second, third = (_sizes(given[f"i{i}"], given[f"expand{i}"]) for i in (1, 2, 3))
    summed, unrolled = set(given["sumdim"]), given.get("unroll_dim", 1)
    early = summed - third.keys()
    once = _pair(first, second, early)
    mixed = {axis: size for axis, size in {**first, **second}.items() if axis not in early or axis == unrolled}
    twice = _pair(mixed, third, summed & third.keys())
    flops = once.flops + twice.flops
    return Work(flops, max(once, twice, key=lambda work: work.flops).contraction, flops)


def _sizes(tensor: Tensor, expanded: list[int]) -> dict[int, int]:
    n_axes = tensor.dim() + len(expanded)
    return dict(zip((axis for axis in range(n_axes) if axis not in expanded), tensor.shape, strict=True))


def _pair(left: dict[int, int], right: dict[int, int], summed: set[int]) -> Work:
    shared = left.keys() & right.keys()
    batch = math.prod(left[axis] for axis in shared - summed)
    m = math.prod(left[axis] for axis in left.keys() - shared)
    n = math.prod(right[axis] for axis in right.keys() - shared)
    k = math.prod(left[axis] for axis in shared & summed)
    return _product(batch, m, n, k) if summed else Work(0, (batch, m, n, 1), 0)


def _euclidean_distance(given: dict, result: Tensor) -> Work:
    # |a|² + |b|² - 2·a·b as one matrix product: the squares are two more columns.
    *batch, m, n = result.shape
    return _product(math.prod(batch), m, n, given["x1"].shape[-1] + 2)


def _affine_grid(given: dict, result: Tensor) -> Work:
    # Each position, with a 1 appended for the translation, times a matrix.
    batch, *positions, n_axes = result.shape
    return _product(batch, math.prod(positions), n_axes, n_axes + 1)


def _attention(given: dict, result: Any) -> Work:
    # The scores, then the values weighted by them.
    return _attended(given, over_head_dim=1, over_value_dim=1)


def _attention_backward(given: dict, result: Any) -> Work:
    # dQ, dK, dV and dP are the gradient itself; the scores are recomputed because they were never stored.
    return _attended(given, over_head_dim=2, over_value_dim=2, recomputed=1)


def _own_flash_attention_backward(given: dict, result: Any) -> Work:
    # Two kernels, one for dQ, one for dK and dV, each recompute scores and dP.
    once = _attention_backward(given, result)
    return replace(once, recomputed_flops=3 * once.recomputed_flops)


def _attention_to_slots(given: dict, result: Tensor) -> Work:
    # One query per sequence, and as many keys as the longest sequence has.
    batch, heads, _, head_dim = given["query"].shape
    pairs = batch * heads * given["longest"]
    flops = 2 * pairs * (head_dim + given["value"].shape[-1])
    return Work(flops, (batch * heads, 1, given["longest"], head_dim), flops)


def _attended(given: dict, *, over_head_dim: int, over_value_dim: int, recomputed: int = 0) -> Work:
    *batch_shape, queries, head_dim = given["query"].shape
    keys, batch, value_dim = given["key"].shape[-2], math.prod(batch_shape), given["value"].shape[-1]
    causal_pairs = None
    if given.get("is_causal") or "first_keys" in given:  # napkin's compiled attention is always causal
        triangle = min(queries, keys)
        causal_pairs = triangle * (triangle + 1) // 2 + (queries - triangle) * keys
    if "window" in given and causal_pairs is not None:
        # The query at position p sees p + 1 keys, at most those of the window.
        first, most = given["query_offset"] + 1, given["window"] or keys
        narrow = max(0, min(queries, most - first))
        causal_pairs = narrow * first + narrow * (narrow - 1) // 2 + (queries - narrow) * most
    if "ranks" in given:
        # Ring attention: the keys are those of all ranks, and every rank has equally many pairs.
        keys *= given["ranks"]
        causal_pairs = keys * (keys + 1) // 2 // given["ranks"]
    pairs = queries * keys
    causal_pairs = pairs if causal_pairs is None else causal_pairs
    a_pair = 2 * batch * (over_head_dim * head_dim + over_value_dim * value_dim)
    return Work(
        a_pair * pairs,
        (batch, queries, keys, head_dim),
        a_pair * causal_pairs,
        recomputed * 2 * batch * head_dim * pairs,
    )


def _encoder_layer(given: dict, result: Any) -> Work:
    # torch's whole encoder layer for inference: attention, then the feed-forward layer of the same tokens.
    attention = _whole_attention(given | {"query": given["src"], "key": given["src"]}, result)
    batch, length, _ = given["src"].shape
    matrices = given["ffn_weight_1"], given["ffn_weight_2"]
    flops = attention.flops + 2 * batch * length * sum(matrix.numel() for matrix in matrices)
    return Work(flops, (1, batch * length, *matrices[0].shape), flops)


def _whole_attention(given: dict, result: Any) -> Work:
    (batch, queries, d_model), keys = given["query"].shape, given["key"].shape[1]
    # A third of its matrix makes queries, the rest keys and values.
    projected = (queries + 2 * keys) * d_model**2 + queries * given["proj_weight"].numel()
    flops = 2 * batch * (projected + 2 * queries * keys * d_model)
    return Work(flops, (1, batch * queries, d_model, d_model), flops)


def _factored(matrix: Tensor, flops: float) -> Work:
    """Work on each of a batch of matrices, as a product with their rows and columns."""
    *batch_shape, m, n = matrix.shape
    batch = math.prod(batch_shape)
    whole = round(batch * flops)
    return Work(whole, (batch, m, n, max(1, round(flops / max(1, 2 * m * n)))), whole)


def _cholesky(given: dict, result: Any) -> Work:
    matrix = given["self"]
    return _factored(matrix, matrix.shape[-1] ** 3 / 3)


def _cholesky_inverse(given: dict, result: Any) -> Work:
    matrix = given["self"]
    return _factored(matrix, 2 * matrix.shape[-1] ** 3 / 3)


def _elimination(matrix: Tensor) -> float:
    # Each of min(m, n) columns is subtracted from all that is right of it and below.
    m, n = matrix.shape[-2:]
    r = min(m, n)
    return 2 * (m * n * r - (m + n) * r**2 / 2 + r**3 / 3)


def _lu(given: dict, result: Any) -> Work:
    return _factored(given["A"], _elimination(given["A"]))


def _solve(given: dict, result: Any) -> Work:
    solution, triangles = result[:2]
    eliminated = _factored(triangles, _elimination(triangles))
    flops = eliminated.flops + _solve_factored({"LU": triangles}, solution).flops
    return Work(flops, eliminated.contraction, flops)


def _inverse(given: dict, result: Any) -> Work:
    return _factored(given["A"], 2 * given["A"].shape[-1] ** 3)


def _solve_factored(given: dict, result: Tensor, matrix: str = "LU") -> Work:
    # Forwards with one triangle, backwards with the other: each number of the result is a row's product, twice.
    n = given[matrix].shape[-1]
    return _product(1, result.numel(), 1, n)


def _solve_cholesky(given: dict, result: Tensor) -> Work:
    return _solve_factored(given, result, "input2")


def _solve_triangle(given: dict, result: Tensor) -> Work:
    n = given["self"].shape[-1]
    flops = n * result.numel()
    return Work(flops, (1, result.numel(), 1, max(1, n // 2)), flops)


def _qr(given: dict, result: Any) -> Work:
    # A reflection costs twice an elimination; then the first reflections are multiplied out as Q.
    matrix, mode = given["A"], given.get("mode", "reduced")
    m, r = matrix.shape[-2], min(matrix.shape[-2:])
    wide = 0 if mode == "r" else m if mode == "complete" else r
    return _factored(matrix, 2 * _elimination(matrix) + _reflections(m, wide, r) * bool(wide))


def _reflections(m: int, n: int, k: int) -> float:
    return 4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 / 3


def _householder(given: dict, result: Any) -> Work:
    (m, n), k = given["input"].shape[-2:], given["tau"].shape[-1]
    return _factored(given["input"], _reflections(m, n, k))


CONTRACTIONS: dict[torch._ops.OpOverloadPacket, Callable[[dict, Any], Work]] = {
    aten.mm: _mm,
    aten.bmm: _mm,
    aten.addmm: _addmm,
    aten.addmm_: _addmm,
    aten.baddbmm: _baddbmm,
    aten.baddbmm_: _baddbmm,
    aten.addbmm: _baddbmm,
    aten.addbmm_: _baddbmm,
    aten._addmm_activation: _addmm,
    aten._scaled_mm: _mm,
    aten._scaled_mm_v2: _mm,
    aten._int_mm: _mm,
    aten._weight_int8pack_mm: _packed_product,
    aten._weight_int4pack_mm_for_cpu: _packed_product,
    aten._grouped_mm: _grouped_mm,
    aten._scaled_grouped_mm: _grouped_mm,
    aten._scaled_grouped_mm_v2: _grouped_mm,
    torch.ops.napkin.int8_product: _own_int8_product,
    torch.ops.napkin.grouped_matmul: _own_grouped_matmul,
    torch.ops.napkin.grouped_outer: _own_grouped_outer,
    torch.ops.napkin.fused_grouped_matmul: _own_grouped_matmul,
    torch.ops.napkin.fused_grouped_outer: _own_grouped_outer,
    aten.mv: _mv,
    aten.addmv: _mv,
    aten.addmv_: _mv,
    aten.dot: _dot,
    aten.vdot: _dot,
    aten.linear: _linear,
    torch.ops.napkin.multiply_vector: _linear,
    torch.ops.napkin.compiled_head_rows: _linear,
    aten._trilinear: _trilinear,
    aten._euclidean_dist: _euclidean_distance,
    aten.affine_grid_generator: _affine_grid,
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    aten._cudnn_rnn: _recurrent,
    aten._cudnn_rnn_backward: _recurrent_backward,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._transformer_encoder_layer_fwd: _encoder_layer,
    aten._native_multi_head_attention: _whole_attention,
    # Direct factorizations, by their leading terms: Golub & Van Loan 2013, "Matrix Computations". Those that iterate
    # until they have converged (singular values, eigenvalues, matrix exponentials) have no formula.
    aten.linalg_cholesky_ex: _cholesky,
    aten.cholesky_inverse: _cholesky_inverse,
    aten.cholesky_solve: _solve_cholesky,
    aten.linalg_lu_factor_ex: _lu,
    aten.linalg_lu: _lu,
    aten._linalg_det: _lu,
    aten._linalg_slogdet: _lu,
    aten._linalg_solve_ex: _solve,
    aten.linalg_inv_ex: _inverse,
    aten.linalg_lu_solve: _solve_factored,
    aten.linalg_solve_triangular: _solve_triangle,
    aten.linalg_qr: _qr,
    aten.linalg_householder_product: _householder,
    torch.ops.napkin.ring_attention: _attention,
    torch.ops.napkin.ring_attention_backward: _attention_backward,
    torch.ops.napkin.quantized_product: _own_quantized_product,
    torch.ops.napkin.integer_product: _own_quantized_product,
    torch.ops.napkin.project_heads: _product_of_step,
    torch.ops.napkin.project_activation: _product_of_step,
    torch.ops.napkin.add_product: _product_of_step,
    torch.ops.napkin.attend_to_slots: _attention_to_slots,
    torch.ops.napkin.fused_attend_to_slots: _attention_to_slots,
    torch.ops.napkin.fused_attend_to_splits: _attention_to_slots,
    torch.ops.napkin.compiled_attention: _attention,
    torch.ops.napkin.compiled_attention_backward: _attention_backward,
    torch.ops.napkin.flash_attention: _attention,
    torch.ops.napkin.flash_attention_backward: _own_flash_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
}

FUSED_ATTENTION = frozenset(
    packet
    for packet, formula in CONTRACTIONS.items()
    if formula in (_attention, _attention_backward, _own_flash_attention_backward)
)
BATCHED_PRODUCTS = frozenset({aten.bmm, aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.addbmm_})

# Those that cuBLAS computes on CUDA.
MATRIX_PRODUCTS = frozenset(
    packet for packet, formula in CONTRACTIONS.items() if formula in (_mm, _addmm, _baddbmm, _mv, _dot, _linear)
)
