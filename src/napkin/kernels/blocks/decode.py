"""The blocks of a model for one new token of each sequence, in one compiled pass on a CPU (numba_blocks.py)."""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from napkin.kernels.attention.decode import Slots
from napkin.kernels.operators import KERNELS, may_be_compiled, team_of_threads
from napkin.kernels.products.quantized import PIECE, SCALE_FORMATS, integer_form

_LINE = 64
"""Bytes of a line of the processor's cache, which two threads should not both write."""


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix of integers with its biases, see `napkin.model.quantized`."""

    values: Tensor
    scales: Tensor
    middles: Tensor | None
    minima: Tensor | None
    biases: Tensor | None

    @property
    def n_pieces(self) -> int:
        """Pieces of 32 numbers in a row."""
        return self.values.shape[1] // (PIECE if self.values.dtype == torch.int8 else PIECE // 2)

    def described(self) -> list[int]:
        """The numbers that describe it to the compiled pass."""
        offsets = self.middles if self.minima is None else self.minima
        addresses = [0 if each is None else each.data_ptr() for each in (offsets, self.biases)]
        form = integer_form(self.values, self.minima)
        sizes = [self.n_pieces, self.scales.shape[1], SCALE_FORMATS[self.scales.dtype], form]
        return [self.values.data_ptr(), self.scales.data_ptr(), *addresses, *sizes]


@dataclass(frozen=True)
class BlockWeights:
    """What a block multiplies by: gains in fp32, and matrices of integers."""

    attention_gain: Float[Tensor, " d_model"]
    feed_forward_gain: Float[Tensor, " d_model"]
    query_key_value: IntegerMatrix
    output: IntegerMatrix
    gate_up: IntegerMatrix
    down: IntegerMatrix

    @property
    def matrices(self) -> tuple[IntegerMatrix, ...]:
        """The matrices, in the order in which they are read."""
        return self.query_key_value, self.output, self.gate_up, self.down


@dataclass(frozen=True)
class IntegerBlocks:
    """The weights of pre-norm blocks with RMSNorm, rotary positions in halves and SwiGLU, and sizes that all share.

    Their tensors stay where they are as long as it lives.
    """

    blocks: Sequence[BlockWeights]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    """By which scores are multiplied."""

    @cached_property
    def described(self) -> Int[Tensor, "block numbers"]:
        """The numbers that describe each block to the compiled pass; those of keys and values are still 0."""
        return torch.tensor([
            [each.attention_gain.data_ptr(), each.feed_forward_gain.data_ptr(), 0, 0]
            + [number for matrix in each.matrices for number in matrix.described()]
            for each in self.blocks
        ])  # fmt: skip

    @cached_property
    def _widest(self) -> tuple[int, int]:
        """The most numbers of a row, and of what a product needs beside it."""
        pieces = max(each.n_pieces for each in self.blocks[0].matrices)
        return PIECE * pieces, 12 * pieces + 16

    def decode(
        self,
        x: Float[Tensor, "batch d_model"],
        rotation: tuple[Float[Tensor, "batch_or_1 head_dim"], Float[Tensor, "batch_or_1 head_dim"]],
        slots: Slots,
        held: Sequence[tuple[Tensor, Tensor]],
    ) -> Float[Tensor, "batch d_model"]:
        """The residual stream after the blocks, of the one new token of each sequence.

        `rotation` are the cosines and signed sines of its position, one for all sequences or one for each; `held` each
        layer's keys and values in fp32, [block, kv_heads, slot, head_dim], which `slots` counts the new ones in: they
        are written there.
        """
        KERNELS.load("blocks.numba_blocks")
        from napkin.kernels.blocks.numba_blocks import decode

        n_sequences, d_model = x.shape
        result = x.to(torch.float32, copy=True).contiguous()
        cosines, sines = (each.contiguous() for each in rotation)
        counts, table, (keys, _) = slots.counts, slots.table.contiguous(), held[0]
        assert keys.dtype == torch.float32
        assert all(each.stride() == keys.stride() for pair in held for each in pair)
        assert keys.stride()[2:] == (self.head_dim, 1)
        layers = self.described.clone()
        layers[:, 2:4] = torch.tensor([[each.data_ptr() for each in pair] for pair in held])

        widest, of_products = self._widest
        group, d_ff = self.n_heads // self.n_kv_heads, len(self.blocks[0].gate_up.values) // 2
        # Behind a row: its integers, scales and sums of their pieces, and a buffer.
        of_row = 4 * widest + n_sequences * (2 * (widest + PIECE) + 8 * (widest // PIECE)) + 32
        own_bytes = of_row + 4 * max(of_products, group * (slots.longest + 1), self.head_dim)
        own_bytes += -own_bytes % _LINE + _LINE
        of_all = (2 * self.n_heads + 2 * self.n_kv_heads) * self.head_dim + 2 * d_ff + d_model
        team, n_threads = team_of_threads()
        shared, own = torch.empty(n_sequences * of_all), torch.empty(n_threads * own_bytes // 4)
        given = [
            *((0, 0, 0) if team is None else team.functions),
            *(result.data_ptr(), layers.data_ptr(), len(self.blocks), n_sequences, d_model, d_ff),
            *(self.n_heads, self.n_kv_heads, self.head_dim, _bits(self.eps), _bits(self.scale)),
            *(counts.data_ptr(), table.data_ptr(), table.shape[1], keys.shape[2], keys.stride(0), keys.stride(1)),
            *(slots.longest, cosines.data_ptr(), sines.data_ptr(), self.head_dim if len(cosines) > 1 else 0),
            *(shared.data_ptr(), own.data_ptr(), own_bytes, widest),
        ]
        numbers = (ctypes.c_int64 * len(given))(*given)
        if team is None:
            decode(ctypes.addressof(numbers))
        else:
            team.parallel(decode.address, numbers, n_threads, 0)
        return result


def can_decode() -> bool:
    """True in inference mode, for tensors that have data, where no meter looks at single operators."""
    return may_be_compiled() and not torch._C._len_torch_dispatch_stack()


def _bits(number: float) -> int:
    """The bits of the nearest float32, as compiled functions are given it."""
    return struct.unpack("<i", struct.pack("<f", number))[0]
