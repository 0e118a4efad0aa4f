"""What each operator computes: FLOPs of the contractions, an operator a line; and which operators are none.

A contraction of [m, k] with [k, n] costs 2·m·n·k: a multiply and an add a triple. Operators that appear in
neither table are reported as unknown, never counted as zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    return _attended(given, products=2, recomputed=0)


def _attention_backward(given: dict, result: Any) -> Work:
    # dV, dP, dQ and dK are the mathematics; the scores are computed once more because they were never stored.
    return _attended(given, products=4, recomputed=1)


def _attended(given: dict, *, products: int, recomputed: int) -> Work:
    *batch_shape, queries, head_dim = given["query"].shape
    keys, batch = given["key"].shape[-2], math.prod(batch_shape)
    pairs = queries * keys
    causal_pairs = pairs
    if given.get("is_causal"):
        triangle = min(queries, keys)
        causal_pairs = triangle * (triangle + 1) // 2 + (queries - triangle) * keys
    one = 2 * batch * head_dim
    return Work(
        products * one * pairs,
        (batch, queries, keys, head_dim),
        products * one * causal_pairs,
        recomputed * one * pairs,
    )


CONTRACTIONS: dict[torch._ops.OpOverloadPacket, Callable[[dict, Any], Work]] = {
    aten.mm: _mm,
    aten.bmm: _mm,
    aten.addmm: _addmm,
    aten.addmm_: _addmm,
    aten.baddbmm: _baddbmm,
    aten.baddbmm_: _baddbmm,
    aten._scaled_mm: _mm,
    aten.mv: _mv,
    aten.addmv: _mv,
    aten.dot: _dot,
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

# Operators without a contraction that carry neither the tag `pointwise` nor an alias in their schema; a trailing
# underscore, the mark of an in-place form, is left out.
_OTHERS = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _amp_foreach_non_finite_check_and_unscale _amp_update_scale
    _chunk_cat _euclidean_norm _foreach_copy _foreach_norm _foreach_zero _fused_adam _fused_adamw _fused_dropout
    _fused_rms_norm _fused_rms_norm_backward _local_scalar_dense _log_softmax _log_softmax_backward_data
    _pin_memory _softmax _softmax_backward_data _to_copy _unique2 _unsafe_index _unsafe_index_put _unsafe_view all
    amax amin aminmax any arange argmax argmin argsort as_strided_scatter avg_pool2d avg_pool2d_backward bernoulli
    bincount bucketize cat clone constant_pad_nd copy count_nonzero cudnn_batch_norm cudnn_batch_norm_backward
    cummax cumprod cumsum diagonal_scatter embedding embedding_dense_backward empty empty_like empty_strided equal
    eye fill flip full full_like gather histc index index_add index_copy index_put index_select
    index_select_backward is_pinned is_same_size item lift_fresh_copy linalg_vector_norm linspace log_softmax
    logsumexp masked_fill masked_scatter masked_select max max_pool2d_with_indices
    max_pool2d_with_indices_backward mean median min multinomial narrow_copy native_batch_norm
    native_batch_norm_backward native_dropout native_dropout_backward native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward new_empty new_empty_strided new_full new_ones new_zeros
    nll_loss_backward nll_loss_forward nonzero norm normal ones ones_like prod promote_types rand rand_like
    randint randint_like randn randn_like random randperm repeat repeat_interleave resize result_type roll rsub
    scalar_tensor scatter scatter_add scatter_reduce searchsorted select_backward select_scatter set
    slice_backward slice_scatter softmax sort stack std sum threshold_backward topk tril tril_indices triu
    triu_indices unfold_backward uniform unique_dim upsample_bilinear2d upsample_nearest2d var var_mean where zero
    zeros zeros_like
    """.split()
)


def _is_no_contraction(operator: torch._ops.OpOverload) -> bool:
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
