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
    if is_no_contraction(operator):
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
    __ilshift_ __irshift_ _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
    _adaptive_avg_pool3d_backward _add_relu _aminmax _amp_foreach_non_finite_check_and_unscale _amp_update_scale
    _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional _cdist_backward _cdist_forward
    _coalesce _compute_linear_combination _ctc_loss _ctc_loss_backward _cummax_helper _cummin_helper _dirichlet_grad
    _embedding_bag _embedding_bag_forward_only _embedding_bag_per_sample_weights_backward
    _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_channel_affine_backward
    _fake_quantize_learnable_per_tensor_affine _fake_quantize_learnable_per_tensor_affine_backward
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _foreach_norm _fused_adagrad _fused_adam _fused_adamw
    _fused_dropout _fused_moving_avg_obs_fq_helper _fused_moving_avg_obs_fq_helper_functional _fused_rms_norm
    _fused_rms_norm_backward _fused_sgd _grid_sampler_2d_cpu_fallback _grid_sampler_2d_cpu_fallback_backward
    _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors _is_all_true _is_any_true
    _log_softmax _log_softmax_backward_data _logcumsumexp _masked_scale _masked_softmax _masked_softmax_backward
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training _pdist_backward
    _pdist_forward _prelu_kernel _prelu_kernel_backward _safe_softmax _segment_reduce_backward _softmax
    _softmax_backward_data _sparse_csr_prod _sparse_csr_sum _sparse_log_softmax _sparse_log_softmax_backward_data
    _sparse_softmax _sparse_softmax_backward_data _sparse_sum _sparse_sum_backward _standard_gamma_grad
    _thnn_fused_gru_cell _thnn_fused_gru_cell_backward _thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl
    _transform_bias_rescale_qkv _unique _unique2 _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
    _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward _upsample_lanczos2d_aa _upsample_lanczos2d_aa_backward
    _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward
    _weight_norm_interface _weight_norm_interface_backward adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d
    adaptive_max_pool3d_backward addr all allclose amax amin aminmax any argmax argmin argsort avg_pool1d avg_pool2d
    avg_pool2d_backward avg_pool3d avg_pool3d_backward bartlett_window batch_norm_backward batch_norm_backward_elemt
    batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats batch_norm_gather_stats_with_counts
    batch_norm_stats batch_norm_update_stats binary_cross_entropy binary_cross_entropy_backward
    binary_cross_entropy_with_logits bincount blackman_window bucketize count_nonzero cudnn_batch_norm
    cudnn_batch_norm_backward cudnn_grid_sampler cudnn_grid_sampler_backward cummax cummin cumprod cumsum dequantize
    dist elu_backward embedding_renorm equal fake_quantize_per_channel_affine_cachemask
    fake_quantize_per_tensor_affine_cachemask floor_divide fractional_max_pool2d fractional_max_pool2d_backward
    fractional_max_pool3d fractional_max_pool3d_backward glu glu_backward glu_backward_jvp glu_jvp grid_sampler_2d
    grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward hamming_window hann_window hardshrink_backward
    hardsigmoid_backward hardswish hardswish_backward hardtanh_backward hash_tensor histc histogram huber_loss
    huber_loss_backward isin kaiser_window kthvalue leaky_relu_backward linalg__powsum linalg_cross linalg_vector_norm
    log_sigmoid_backward log_sigmoid_forward log_softmax logcumsumexp logsumexp max max_pool2d_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
    mean median min mish_backward mode mse_loss mse_loss_backward multi_margin_loss multi_margin_loss_backward
    multilabel_margin_loss_backward multilabel_margin_loss_forward nanmedian nansum native_batch_norm
    native_batch_norm_backward native_dropout native_dropout_backward native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward native_norm nll_loss2d_backward nll_loss2d_forward nll_loss_backward
    nll_loss_forward norm polar prod quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic
    quantized_batch_norm quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d renorm rrelu_with_noise
    rrelu_with_noise_backward rrelu_with_noise_functional rsub searchsorted segment_reduce smooth_l1_loss
    smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward softmax softplus_backward softshrink_backward
    sort std std_mean sum threshold_backward topk trace unique_consecutive unique_dim unique_dim_consecutive
    upsample_bicubic2d upsample_bicubic2d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_linear1d
    upsample_linear1d_backward upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    upsample_trilinear3d upsample_trilinear3d_backward var var_mean
    """.split()
)

# Operators that move, create or draw numbers, where neither their schema nor their tags show it.
_MOVING = frozenset(
    """
    _chunk_cat _coalesced _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _convert_weight_to_int4pack
    _convert_weight_to_int4pack_for_cpu _copy_from _copy_from_and_resize _cudnn_init_dropout_state
    _cudnn_rnn_flatten_weight _dyn_quant_pack_4bit_weight _efficientzerotensor _embedding_bag_backward
    _embedding_bag_dense_backward _empty_affine_quantized _empty_per_channel_affine_quantized _fill_mem_eff_dropout_mask
    _foreach_clone _foreach_copy _foreach_zero _functional_assert_async _functional_assert_scalar
    _functional_sym_constrain_range _functional_sym_constrain_range_for_size _index_put_impl
    _jagged_to_padded_dense_forward _lazy_clone _local_scalar_dense _make_dep_token _make_per_channel_quantized_tensor
    _make_per_tensor_quantized_tensor _mkldnn_reshape _mkldnn_transpose _nested_compute_contiguous_strides_offsets
    _nested_from_padded _nested_from_padded_and_nested_example _nested_from_padded_tensor _nested_get_lengths
    _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_offsets _nested_select_backward _nested_tensor_from_mask
    _nested_tensor_from_tensor_list _nested_tensor_size _nested_tensor_storage_offsets _nested_tensor_strides
    _new_zeros_with_same_feature_meta _pack_padded_sequence _padded_dense_to_jagged_forward _philox_key_fold_in
    _philox_key_split _philox_normal _philox_uniform _pin_memory _resize_output _sample_dirichlet
    _sparse_compressed_tensor_with_dims _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors
    _sparse_mask_projection _spdiags _stack _standard_gamma _to_copy _to_dense _to_sparse _to_sparse_bsc _to_sparse_bsr
    _to_sparse_csc _to_sparse_csr _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate _unsafe_view _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d arange as_strided as_strided_scatter bernoulli binomial block_diag cat cauchy
    channel_shuffle clone col2im complex constant_pad_nd copy copy_sparse_to_sparse detach diag_embed diagonal_backward
    diagonal_scatter embedding embedding_dense_backward embedding_sparse_backward empty empty_like empty_permuted
    empty_quantized empty_strided exponential eye fft_fftfreq fft_rfftfreq fill flip from_file full full_like gather
    geometric im2col index index_add index_copy index_fill index_put index_reduce index_select index_select_backward
    int_repr is_pinned is_same_size item lift lift_fresh_copy linspace log_normal logspace lu_unpack masked_fill
    masked_scatter masked_scatter_backward masked_select max_unpool2d max_unpool3d mkldnn_reorder_conv2d_weight
    mkldnn_reorder_conv3d_weight multinomial narrow_copy native_channel_shuffle new_empty new_empty_strided new_full
    new_ones new_zeros nonzero nonzero_static normal normal_functional ones ones_like pixel_shuffle pixel_unshuffle
    poisson positive promote_types put q_per_channel_scales q_per_channel_zero_points rand rand_like randint
    randint_like randn randn_like random randperm range record_stream reflection_pad1d reflection_pad1d_backward
    reflection_pad2d reflection_pad2d_backward reflection_pad3d reflection_pad3d_backward repeat repeat_interleave
    replication_pad1d replication_pad1d_backward replication_pad2d replication_pad2d_backward replication_pad3d
    replication_pad3d_backward resize resize_as resize_as_sparse result_type roll rot90 scalar_tensor scatter
    scatter_add scatter_reduce select_backward select_scatter set slice_backward slice_scatter sparse_compressed_tensor
    sparse_coo_tensor sparse_mask sparse_resize sparse_resize_and_clear squeeze stack swapaxes swapdims t take to_mkldnn
    to_padded_tensor transpose tril tril_indices triu triu_indices unfold_backward uniform unsafe_chunk unsafe_split
    unsafe_split_with_sizes unsqueeze upsample_nearest1d upsample_nearest2d upsample_nearest3d where zero zeros
    zeros_like
    """.split()
)


# napkin's own fused operators, which compute and are not contractions.
OWN_COMPUTING = frozenset(
    """
    compiled_add compiled_gelu_tanh compiled_gelu_tanh_backward compiled_loss_rows compiled_norm
    compiled_norm_backward compiled_rotation compiled_swiglu compiled_swiglu_backward fp8_quantize fused_adamw
    fused_cross_entropy fused_gelu_tanh fused_gelu_tanh_backward fused_norm fused_norm_backward fused_rotate
    fused_swiglu fused_swiglu_backward int8_quantize int8_restore
    """.split()
)


@cache
def is_no_contraction(operator: torch._ops.OpOverload) -> bool:
    """True if the operator is known to compute elementwise, or to compute nothing."""
    # The table's names are aten's; in another namespace the same name may mean something else.
    if operator.namespace != "aten":
        return operator.namespace in _MOVING_NAMESPACES or _is_elementwise(operator)
    name = operator.overloadpacket.__name__.removesuffix("_")
    return (
        _is_elementwise(operator)
        or name in _MOVING
        or name.removesuffix("_copy") != name  # a view's numbers, copied
        or is_view(operator)
        or _is_question(operator)
    )


@cache
def _is_elementwise(operator: torch._ops.OpOverload) -> bool:
    """True if the operator computes and is not a contraction."""
    name = operator.overloadpacket.__name__.removesuffix("_")
    if operator.namespace != "aten" or name in _MOVING:
        return operator.namespace == "napkin" and name in OWN_COMPUTING
    return is_pointwise(operator) or name.startswith("_foreach_") or name in _COMPUTING


@cache
def is_pointwise(operator: torch._ops.OpOverload) -> bool:
    """True if an operator of aten computes each element by itself, by torch's tags; some of its overloads, and some
    of the variants that work in place, lack them.
    """
    packet = operator.overloadpacket
    twin = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), packet)
    overloads = (getattr(each, name) for each in {packet, twin} for name in each.overloads())
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def is_view(operator: torch._ops.OpOverload) -> bool:
    """True if the operator returns its input's storage and writes nothing."""
    aliases = [returned.alias_info for returned in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _is_question(operator: torch._ops.OpOverload) -> bool:
    """True if the operator returns and writes no tensor: it asks for a size or a flag, or asserts something."""
    schema = operator._schema
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    return not writes and not any("Tensor" in str(returned.type) for returned in schema.returns)


@cache
def is_composite(operator: torch._ops.OpOverload) -> bool:
    """True if the operator has no kernel of its own and only calls others.

    Autograd takes it apart before a recorder sees it; in inference mode, without autograd, it arrives whole.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if operator.namespace != "aten":
        return False
    return has_kernel(operator.name(), "CompositeImplicitAutograd") and not has_kernel(operator.name(), "CPU")
