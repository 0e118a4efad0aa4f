"""The FLOPs of each operator: contractions by their formulas, and tables of the operators that are not contractions.

Complex numbers cost four times as many FLOPs as real ones. Elementwise work is kept apart: one FLOP per operator call
and element, by convention, whatever the operation. Operators in none of the tables are reported as unknown, never
counted as zero.
"""

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from napkin.accounting.collectives import DISTRIBUTED
from napkin.accounting.contractions import CONTRACTIONS, Work


def work_of(operator: torch._ops.OpOverload, arguments: tuple, keywords: dict, result: Any) -> Work | None:
    """FLOPs of one call; None if the operator is not a contraction.

    Raises UnknownOperator if it is in none of the tables.
    """
    formula = CONTRACTIONS.get(operator.overloadpacket)
    if formula is not None:
        names = [argument.name for argument in operator._schema.arguments]
        work = formula({**dict(zip(names, arguments, strict=False)), **keywords}, result)
        return _of_complex_numbers(work) if _is_complex(arguments) else work
    if _is_no_contraction(operator):
        return None
    raise UnknownOperator(str(operator))


class UnknownOperator(Exception):
    """An operator that is in none of the tables."""


def elementwise_flops_of(operator: torch._ops.OpOverload, arguments: tuple, tensors: list[Tensor]) -> int:
    """One FLOP for each element of the largest of `tensors`, the operands and results of an operator that computes.

    Zero for contractions, and for operators that only move, create or draw numbers.
    """
    if not _is_elementwise(operator):
        return 0
    if arguments and isinstance(arguments[0], (list, tuple)):
        return sum(tensor.numel() for tensor in arguments[0])  # foreach and fused: a list of tensors
    return max((tensor.numel() for tensor in tensors), default=0)


def _is_complex(arguments: tuple) -> bool:
    return any(isinstance(argument, Tensor) and argument.is_complex() for argument in arguments)


def _of_complex_numbers(work: Work) -> Work:
    # (a + bi)·(c + di) is four products of real numbers.
    return replace(work, **{name: 4 * getattr(work, name) for name in ("flops", "causal_flops", "recomputed_flops")})


# Operators of other namespaces that move numbers: to other ranks, and into the buffers in which they are sent.
_MOVING_NAMESPACES = DISTRIBUTED | {"fsdp", "_dtensor"}

# Operators that compute, are not contractions and are not tagged `pointwise`; the trailing underscore of in-place
# variants is left out.
_COMPUTING = frozenset(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    _amp_foreach_non_finite_check_and_unscale _amp_update_scale _cdist_backward _cdist_forward _ctc_loss
    _ctc_loss_backward _embedding_bag _embedding_bag_forward_only _foreach_norm _fused_adagrad _fused_adam _fused_adamw
    _fused_dropout _fused_rms_norm _fused_rms_norm_backward _fused_sgd _log_softmax _log_softmax_backward_data
    _logcumsumexp _pdist_backward _pdist_forward _prelu_kernel _prelu_kernel_backward _safe_softmax
    _segment_reduce_backward _softmax _softmax_backward_data _thnn_fused_gru_cell _thnn_fused_gru_cell_backward
    _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _unique2 _upsample_bicubic2d_aa
    _upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
    _weight_norm_interface _weight_norm_interface_backward adaptive_max_pool2d adaptive_max_pool2d_backward
    adaptive_max_pool3d adaptive_max_pool3d_backward addr all amax amin aminmax any argmax argmin argsort avg_pool1d
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits bincount bucketize count_nonzero cudnn_batch_norm cudnn_batch_norm_backward cummax
    cumprod cumsum dist elu_backward embedding_renorm equal floor_divide fractional_max_pool2d
    fractional_max_pool2d_backward fractional_max_pool3d fractional_max_pool3d_backward glu glu_backward grid_sampler_2d
    grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward hardshrink_backward hardsigmoid_backward hardswish
    hardswish_backward hardtanh_backward histc huber_loss huber_loss_backward isin kthvalue leaky_relu_backward
    linalg_cross linalg_vector_norm log_sigmoid_backward log_sigmoid_forward log_softmax logcumsumexp logsumexp max
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
    mean median min mish_backward mode mse_loss mse_loss_backward multi_margin_loss multi_margin_loss_backward
    multilabel_margin_loss_backward multilabel_margin_loss_forward nanmedian nansum native_batch_norm
    native_batch_norm_backward native_dropout native_dropout_backward native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward nll_loss2d_backward nll_loss2d_forward nll_loss_backward
    nll_loss_forward norm polar prod renorm rrelu_with_noise rrelu_with_noise_backward rsub searchsorted segment_reduce
    smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softmax softplus_backward
    softshrink_backward sort std sum threshold_backward topk trace unique_consecutive unique_dim upsample_bicubic2d
    upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
    upsample_linear1d_backward upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    upsample_trilinear3d upsample_trilinear3d_backward var var_mean
    """.split()
)

# Operators that move, create or draw numbers, where neither their schema nor their tags show it.
_MOVING = frozenset(
    """
    _chunk_cat _embedding_bag_backward _foreach_clone _foreach_copy _foreach_zero _local_scalar_dense _pin_memory
    _to_copy _unsafe_index _unsafe_index_put _unsafe_view _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d arange as_strided as_strided_scatter bernoulli block_diag cat cauchy channel_shuffle clone
    col2im complex constant_pad_nd copy diag_embed diagonal_backward diagonal_scatter embedding embedding_dense_backward
    embedding_sparse_backward empty empty_like empty_strided exponential eye fill flip full full_like gather geometric
    im2col index index_add index_copy index_put index_reduce index_select index_select_backward is_pinned is_same_size
    item lift_fresh_copy linspace log_normal masked_fill masked_scatter masked_select max_unpool2d max_unpool3d
    multinomial narrow_copy new_empty new_empty_strided new_full new_ones new_zeros nonzero normal ones ones_like
    pixel_shuffle pixel_unshuffle positive promote_types rand rand_like randint randint_like randn randn_like random
    randperm reflection_pad1d reflection_pad1d_backward reflection_pad2d reflection_pad2d_backward reflection_pad3d
    reflection_pad3d_backward repeat repeat_interleave replication_pad1d replication_pad1d_backward replication_pad2d
    replication_pad2d_backward replication_pad3d replication_pad3d_backward resize resize_as result_type roll rot90
    scalar_tensor scatter scatter_add scatter_reduce select_backward select_scatter set slice_backward slice_scatter
    squeeze stack swapaxes swapdims t transpose tril tril_indices triu triu_indices unfold_backward uniform unsafe_chunk
    unsafe_split unsafe_split_with_sizes unsqueeze upsample_nearest1d upsample_nearest2d upsample_nearest3d where zero
    zeros zeros_like
    """.split()
)


# napkin's own fused operators, which compute and are not contractions.
_OWN_COMPUTING = frozenset(
    """
    compiled_add compiled_gelu_tanh compiled_gelu_tanh_backward compiled_loss_rows compiled_norm compiled_norm_backward
    compiled_rotation compiled_swiglu compiled_swiglu_backward fused_adamw fused_cross_entropy fused_gelu_tanh
    fused_gelu_tanh_backward fused_norm fused_norm_backward fused_rotate fused_swiglu fused_swiglu_backward
    int8_quantize int8_restore
    """.split()
)


@cache
def _is_no_contraction(operator: torch._ops.OpOverload) -> bool:
    # The names are aten's; in other namespaces they may mean anything.
    if operator.namespace != "aten":
        return operator.namespace in _MOVING_NAMESPACES or _is_elementwise(operator)
    name = operator.overloadpacket.__name__
    return _is_elementwise(operator) or name.removesuffix("_") in _MOVING or _is_view(operator)


@cache
def _is_elementwise(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator computes and is not a contraction."""
    name = operator.overloadpacket.__name__.removesuffix("_")
    if operator.namespace != "aten" or name in _MOVING:
        return operator.namespace == "napkin" and name in _OWN_COMPUTING
    return torch.Tag.pointwise in operator.tags or name.startswith("_foreach_") or name in _COMPUTING


def _is_view(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator returns its input's storage and writes nothing."""
    aliases = [returned.alias_info for returned in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
