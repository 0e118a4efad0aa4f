"""Scratch memory on CUDA: bytes that an operator allocates from torch's allocator and frees within one call.

The model covers what grows with the tensors: the buffers in which attention's backward pass sums gradients, the sorted
indices and partial sums of an embedding's gradient, the partial norms of foreach clipping. It leaves out the splits of
flash attention over keys, where batch · heads is below the number of multiprocessors, and the staging buffers of
reductions, a few MB.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# These make operators of torch.ops.napkin.
import napkin.kernels.attention.flash
import napkin.kernels.norms.normalization  # noqa: F401
from napkin.hardware.target import CudaTarget
from napkin.kernels.triton_tiles import MOST_NORM_PROGRAMS

aten = torch.ops.aten


def cuda_scratch_bytes(
    operator: torch._ops.OpOverload, args: tuple, inputs: list[Tensor], target: CudaTarget
) -> list[int]:
    """Bytes of each scratch buffer, in the order of allocation; all are freed at the end of the call."""
    if operator.overloadpacket is aten._scaled_dot_product_flash_attention_backward:
        return _flash_backward(inputs, target)
    formula = SCRATCH.get(operator.overloadpacket)
    return [size for size in formula(args, inputs) if size] if formula else []


def workspace_bytes(target: CudaTarget) -> int:
    """The workspace of cuBLAS for each thread that multiplies; 8 of 4 MiB with deterministic algorithms."""
    return 2**25 if torch.are_deterministic_algorithms_enabled() else target.workspace_bytes


def ordered_sums(heads: int, target: CudaTarget) -> int:
    """The number of partial sums of the queries' gradient that flash attention keeps with deterministic algorithms, for
    this number of heads over all sequences: one per program, and at least one program per multiprocessor."""
    return -(-target.multiprocessors // heads)


def _flash_backward(inputs: list[Tensor], target: CudaTarget) -> list[int]:
    # csrc of flash attention 2, mha_bwd: softmax_d, dq_accum, and keys' and values' gradients by query head.
    gradient, query, key, _, output = inputs[:5]
    batch, heads, queries, head_dim = query.shape
    rows, width = _up(queries, 128), _up(head_dim, 32) if head_dim <= 192 else 256
    copies = [0 if tensor.transpose(1, 2).is_contiguous() else tensor.nbytes for tensor in (gradient, output)]
    sums = ordered_sums(batch * heads, target) if torch.are_deterministic_algorithms_enabled() else 1
    sizes = [*copies, 4 * batch * heads * rows, sums * 4 * batch * rows * heads * width, *_by_query_head(query, key)]
    return [size for size in sizes if size]


def _own_flash_backward(args: Any, inputs: list[Tensor]) -> list[int]:
    # napkin.kernels.attention.triton_flash: the sums of gradient · result.
    batch, heads, queries, _ = inputs[1].shape
    return [4 * batch * heads * queries]


def _own_norm_backward(args: Any, inputs: list[Tensor]) -> list[int]:
    # napkin.kernels.norms.triton_norms: the partial sums of the programs, for the gain and, where there is one, the
    # bias; and the sums of a gain that is narrower than fp32.
    summed, gain, biased = args[2], args[3], args[5]
    sums = (2 if biased else 1) * gain.numel() * 4
    return [sums * min(len(summed), MOST_NORM_PROGRAMS), sums if gain.element_size() < 4 else 0]


def _cudnn_backward(args: Any, inputs: list[Tensor]) -> list[int]:
    # cuDNN's frontend, scaled_dot_product_flash_attention.h: one workspace for dQ_accum, softmax_sum, and, for grouped
    # queries, dK_fullhead and dV_fullhead. What the engine itself allocates is not published.
    query, key = inputs[1:3]
    batch, heads, queries, head_dim = query.shape
    return [4 * batch * heads * queries * (head_dim + 1) + sum(_by_query_head(query, key))]


def _efficient_backward(args: Any, inputs: list[Tensor]) -> list[int]:
    # mem_eff_attention/kernel_backward.h: delta, and the gradient of queries in tiles of 64 × 64 fp32 numbers with a
    # lock of 16 bytes; the same for keys and values if a head is too wide for the registers.
    gradient, query, key = inputs[:3]
    batch, heads, queries, head_dim = query.shape
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    tiles = -(-queries // 64) * -(-head_dim // 64)
    workspace = batch * heads * tiles * (4 * 64 * 64 + 16)
    if head_dim > 128 and query.element_size() < 4:
        workspace += 2 * 4 * batch * heads * _up(key.shape[2], 64) * _up(head_dim, 64)
    return [copied, 4 * batch * heads * queries, workspace]


def _embedding_backward(args: Any, inputs: list[Tensor]) -> list[int]:
    # Embedding.cu and EmbeddingBackwardKernel.cu: few indices are added in place; many are sorted, and each run of
    # equal indices is summed in parts of ten.
    gradient, indices = inputs[:2]
    count, width = indices.numel(), gradient.shape[-1]
    if count <= 3072:
        return []
    segments = min(count, args[2])
    parts = count // 10 + segments
    lists = [8 * count] * 3 + [8 * segments] * 2 + [8 * parts]
    return [*lists, parts * width * max(4, gradient.element_size())]


def _norms(args: Any, inputs: list[Tensor]) -> list[int]:
    # ForeachReduceOp.cu: one number for each chunk of 65,536, as many for every tensor as for the largest.
    return [4 * len(inputs) * -(-max(tensor.numel() for tensor in inputs) // 65536)]


def _by_query_head(query: Tensor, key: Tensor) -> list[int]:
    heads = query.shape[1]
    return [] if key.shape[1] == heads else [key.nbytes // key.shape[1] * heads] * 2


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


SCRATCH: dict[torch._ops.OpOverloadPacket, Callable[[Any, list[Tensor]], list[int]]] = {
    aten._scaled_dot_product_cudnn_attention_backward: _cudnn_backward,
    aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
    torch.ops.napkin.flash_attention_backward: _own_flash_backward,
    torch.ops.napkin.fused_norm_backward: _own_norm_backward,
    aten.embedding_dense_backward: _embedding_backward,
    aten._foreach_norm: _norms,
}
