"""Kernels that read each number once: gates of feed-forward layers, rotary positions."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from napkin.kernels.attention.triton_flash import tanh
from napkin.kernels.triton_tiles import ELEMENTWISE, ROTATION, tuned

GELU_SCALE = tl.constexpr(0.7978845608028654)
"""sqrt(2 / π)"""
GELU_CUBIC = tl.constexpr(0.044715)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up of [rows, 2 · width], gates first."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    result = gate_up.new_empty(rows, width)
    if result.numel():
        tile = tuned("swiglu", ELEMENTWISE, gate_up, width)
        swiglu_kernel[(rows, triton.cdiv(width, tile.block))](
            gate_up, None, result, width, BACKWARD=False, BLOCK=tile.block, num_warps=tile.warps
        )
    return result


def swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of gate and up side by side."""
    rows, width = gradient.shape
    result = torch.empty_like(gate_up)
    if result.numel():
        tile = tuned("swiglu backward", ELEMENTWISE, gate_up, width)
        swiglu_kernel[(rows, triton.cdiv(width, tile.block))](
            gate_up, gradient, result, width, BACKWARD=True, BLOCK=tile.block, num_warps=tile.warps
        )
    return result


def gelu_tanh(x: Tensor) -> Tensor:
    """x · (1 + tanh(sqrt(2/π) · (x + 0.044715 x³))) / 2 (Hendrycks & Gimpel 2016)."""
    result = torch.empty_like(x)
    if x.numel():
        tile = tuned("gelu", ELEMENTWISE, x, 1)
        gelu_kernel[(triton.cdiv(x.numel(), tile.block),)](
            x, None, result, x.numel(), BACKWARD=False, BLOCK=tile.block, num_warps=tile.warps
        )
    return result


def gelu_tanh_backward(gradient: Tensor, x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    if x.numel():
        tile = tuned("gelu backward", ELEMENTWISE, x, 1)
        gelu_kernel[(triton.cdiv(x.numel(), tile.block),)](
            x, gradient, result, x.numel(), BACKWARD=True, BLOCK=tile.block, num_warps=tile.warps
        )
    return result


def rotate(x: Tensor, cosines: Tensor, signed_sines: Tensor, interleaved: bool, transposed: bool) -> Tensor:
    """See `napkin.kernels.pointwise.rotary.rotate_reference`."""
    batch, length, heads, head_dim = x.shape
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        block = triton.next_power_of_2(heads), triton.next_power_of_2(head_dim)
        table_batch = 0 if cosines.shape[0] == 1 else length * head_dim
        rotate_kernel[(length * batch,)](
            x, cosines, signed_sines, result, *x.stride()[:3], table_batch, length, heads,
            HEAD=head_dim, INTERLEAVED=interleaved, TRANSPOSED=transposed, HEADS=block[0], WIDTH=block[1],
            num_warps=tuned("rotation", ROTATION, x, heads * head_dim).warps,
        )  # fmt: skip
    return result


@triton.jit
@no_type_check
def swiglu_kernel(gate_up, gradient, result, width, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    """Each program computes a part of one row."""
    row, columns = tl.cast(tl.program_id(0), tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = columns < width, 2 * row * width + columns
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + width, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if BACKWARD:
        upstream = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        grad_gate = upstream * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(result + at, grad_gate.to(result.dtype.element_ty), mask=inside)
        tl.store(result + at + width, (upstream * gate * sigmoid).to(result.dtype.element_ty), mask=inside)
    else:
        tl.store(result + row * width + columns, (gate * sigmoid * up).to(result.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def gelu_kernel(x, gradient, result, numel, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    """Each program computes BLOCK numbers."""
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    t = tanh((z + z * z * z * GELU_CUBIC) * GELU_SCALE)
    y = 0.5 * z * (1.0 + t)
    if BACKWARD:
        inner = (1.0 + 3.0 * (z * z * GELU_CUBIC)) * GELU_SCALE
        slope = 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * inner
        y = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32) * slope
    tl.store(result + at, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def rotate_kernel(
    x, cosines, sines, result, x_batch, x_position, x_head, table_batch, length, n_heads,
    HEAD: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """All heads of one position: queries and keys, side by side as the model has them, share a row of the tables.

    The grid has one axis: a second one ends at 65,535 sequences.
    """
    program = tl.cast(tl.program_id(0), tl.int64)
    position, batch = program % length, program // length
    heads, columns = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    in_head = columns < HEAD
    inside = (heads < n_heads)[:, None] & in_head[None, :]
    partners = (columns + HEAD // 2) % HEAD
    if INTERLEAVED:
        partners = columns ^ 1
    x += batch * x_batch + position * x_position
    own = tl.load(x + heads[:, None] * x_head + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x + heads[:, None] * x_head + partners[None, :], mask=inside, other=0.0).to(tl.float32)
    table = batch * table_batch + position * HEAD
    cosine = tl.load(cosines + table + columns, mask=in_head, other=0.0).to(tl.float32)
    sine = tl.load(sines + table + (partners if TRANSPOSED else columns), mask=in_head, other=0.0).to(tl.float32)
    y = own * cosine[None, :] + other * sine[None, :]
    result += (batch * length + position) * n_heads * HEAD
    tl.store(result + heads[:, None] * HEAD + columns[None, :], y.to(result.dtype.element_ty), mask=inside)
