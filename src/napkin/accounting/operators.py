"""What each operator computes: FLOPs of the contractions, an operator a line; and which operators are none.

A contraction of [m, k] with [k, n] costs 2·m·n·k: a multiply and an add a triple. Operators that appear in
neither table are reported as unknown, never counted as zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import napkin.model.grouped_matmul  # makes the operators of torch.ops.napkin  # noqa: F401

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of one call, as `ledger.Row` defines them."""

    flops: int
    contraction: tuple[int, int, int, int]
    causal_flops: int
    recomputed_flops: int = 0


def work_of(operator: torch._ops.OpOverload, arguments: tuple, keywords: dict, result: Any) -> Work | None:
    """FLOPs of one call; None where the operator is no contraction.

    Raises UnknownOperator where neither table names it.
    """
    formula = CONTRACTIONS.get(operator.overloadpacket)
    if formula is not None:
        names = [argument.name for argument in operator._schema.arguments]
        return formula({**dict(zip(names, arguments, strict=False)), **keywords}, result)
    if _is_no_contraction(operator):
        return None
    raise UnknownOperator(str(operator))


class UnknownOperator(Exception):
    """An operator that is in neither table."""


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


def _mv(given: dict, result: Tensor) -> Work:
    matrix = given.get("mat", given["self"])
    return _product(1, matrix.shape[0], 1, matrix.shape[1])


def _dot(given: dict, result: Tensor) -> Work:
    return _product(1, 1, 1, given["self"].shape[0])


def _grouped_mm(given: dict, result: Tensor) -> Work:
    # Each row of a ragged operand belongs to one group. Two ragged operands share the dimension that is summed over.
    left, right = given["self"].shape, given["mat2"].shape
    batch = left[0] if len(left) == len(right) == 3 else 1
    return _product(batch, left[-2], right[-1], left[-1])


def _own_grouped_matmul(given: dict, result: Tensor) -> Work:
    return _product(1, len(given["x"]), *given["weight"].shape[1:])


def _own_grouped_outer(given: dict, result: Tensor) -> Work:
    (rows, wide), narrow = given["left"].shape, given["right"].shape[1]
    return _product(1, wide, narrow, rows)


def _linear(given: dict, result: Tensor) -> Work:
    out_features, in_features = given["weight"].shape
    return _product(1, given["input"].numel() // in_features, out_features, in_features)


def _convolution(given: dict, result: Tensor) -> Work:
    return _convolved(given, given["transposed"], result.shape)


def _convolution_backward(given: dict, result: Any) -> Work:
    once = _convolved(given, given["transposed"], given["grad_output"].shape)
    wanted = sum(bool(wanted) for wanted in given["output_mask"][:2])
    return Work(wanted * once.flops, once.contraction, wanted * once.flops)


def _convolved(given: dict, transposed: bool, output_shape: torch.Size) -> Work:
    weight = given["weight"].shape
    # Each weight of a filter meets each position once: of the output or, transposed, of the input.
    positions = given["input"].shape if transposed else output_shape
    return _product(1, positions[0] * math.prod(positions[2:]), weight[0], math.prod(weight[1:]))


def _attention(given: dict, result: Any) -> Work:
    # The scores, then their mix of the values.
    return _attended(given, over_head_dim=1, over_value_dim=1)


def _attention_backward(given: dict, result: Any) -> Work:
    # dQ and dK, dV and dP are the mathematics; the scores are computed once more because they were never stored.
    return _attended(given, over_head_dim=2, over_value_dim=2, recomputed=1)


def _attended(given: dict, *, over_head_dim: int, over_value_dim: int, recomputed: int = 0) -> Work:
    *batch_shape, queries, head_dim = given["query"].shape
    keys, batch, value_dim = given["key"].shape[-2], math.prod(batch_shape), given["value"].shape[-1]
    pairs = queries * keys
    causal_pairs = pairs
    if given.get("is_causal"):
        triangle = min(queries, keys)
        causal_pairs = triangle * (triangle + 1) // 2 + (queries - triangle) * keys
    a_pair = 2 * batch * (over_head_dim * head_dim + over_value_dim * value_dim)
    return Work(
        a_pair * pairs,
        (batch, queries, keys, head_dim),
        a_pair * causal_pairs,
        recomputed * 2 * batch * head_dim * pairs,
    )


CONTRACTIONS: dict[torch._ops.OpOverloadPacket, Callable[[dict, Any], Work]] = {
    aten.mm: _mm,
    aten.bmm: _mm,
    aten.addmm: _addmm,
    aten.addmm_: _addmm,
    aten.baddbmm: _baddbmm,
    aten.baddbmm_: _baddbmm,
    aten.addbmm: _baddbmm,
    aten._scaled_mm: _mm,
    aten._grouped_mm: _grouped_mm,
    torch.ops.napkin.grouped_matmul: _own_grouped_matmul,
    torch.ops.napkin.grouped_outer: _own_grouped_outer,
    aten.mv: _mv,
    aten.addmv: _mv,
    aten.dot: _dot,
    aten.vdot: _dot,
    aten.linear: _linear,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_cudnn_attention_backward: _attention_backward,
}

# Namespaces of operators that move numbers between devices.
_COLLECTIVES = {"c10d", "_c10d_functional"}

# Operators without a contraction that carry neither the tag `pointwise` nor an alias in their schema; a trailing
# underscore, the mark of an in-place form, is left out.
_OTHERS = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _amp_foreach_non_finite_check_and_unscale _amp_update_scale
    _chunk_cat _ctc_loss _ctc_loss_backward _embedding_bag _embedding_bag_backward _embedding_bag_forward_only
    _foreach_copy _foreach_norm _foreach_zero _fused_adam _fused_adamw _fused_dropout
    _fused_rms_norm _fused_rms_norm_backward _local_scalar_dense _log_softmax _log_softmax_backward_data
    _logcumsumexp _pin_memory _safe_softmax _softmax _softmax_backward_data _thnn_fused_gru_cell
    _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _to_copy _unique2
    _unsafe_index _unsafe_index_put _unsafe_view _weight_norm_interface _weight_norm_interface_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward all amax amin aminmax any arange argmax argmin argsort
    as_strided_scatter avg_pool1d avg_pool2d avg_pool2d_backward bernoulli binary_cross_entropy
    binary_cross_entropy_backward bincount bucketize cat cauchy channel_shuffle clone col2im constant_pad_nd copy
    count_nonzero cudnn_batch_norm cudnn_batch_norm_backward cummax cumprod cumsum diagonal_scatter embedding
    embedding_dense_backward empty empty_like empty_strided equal exponential eye fill flip floor_divide full full_like
    gather geometric glu glu_backward grid_sampler_2d grid_sampler_2d_backward histc huber_loss_backward im2col index
    index_add index_copy index_put index_select index_select_backward is_pinned is_same_size isin item kthvalue
    lift_fresh_copy linalg_vector_norm linspace log_normal log_softmax logcumsumexp logsumexp masked_fill
    masked_scatter masked_select max max_pool2d_with_indices max_pool2d_with_indices_backward
    max_pool3d_with_indices mean median min mode mse_loss_backward multinomial narrow_copy native_batch_norm
    native_batch_norm_backward native_dropout native_dropout_backward native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward new_empty new_empty_strided new_full new_ones new_zeros
    nll_loss_backward nll_loss_forward nonzero norm normal ones ones_like pixel_shuffle pixel_unshuffle prod
    promote_types rand rand_like randint randint_like randn randn_like random randperm reflection_pad1d
    reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward repeat repeat_interleave replication_pad2d
    resize result_type roll rrelu_with_noise rsub scalar_tensor scatter scatter_add scatter_reduce searchsorted
    select_backward select_scatter set slice_backward slice_scatter smooth_l1_loss_backward softmax sort stack std
    sum threshold_backward topk trace tril tril_indices triu triu_indices unfold_backward uniform unique_consecutive
    unique_dim unsafe_chunk unsafe_split unsafe_split_with_sizes upsample_bilinear2d upsample_bilinear2d_backward
    upsample_nearest2d upsample_nearest2d_backward var var_mean where zero zeros zeros_like
    """.split()
)


@cache
def _is_no_contraction(operator: torch._ops.OpOverload) -> bool:
    # The names are aten's: elsewhere they may mean anything.
    if operator.namespace != "aten":
        return operator.namespace in _COLLECTIVES
    name = operator.overloadpacket.__name__
    return (
        torch.Tag.pointwise in operator.tags
        or name.removesuffix("_") in _OTHERS
        or name.startswith("_foreach_")
        or _is_view(operator)
    )


def _is_view(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator returns its input's storage and writes nothing."""
    aliases = [returned.alias_info for returned in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
