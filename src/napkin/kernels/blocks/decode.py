"""The blocks of a model for new tokens of its sequences, in one compiled pass on a CPU (numba_blocks.py)."""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from napkin.kernels.attention.decode import Slots
from napkin.kernels.operators import KERNELS, may_be_compiled, team_of_threads
from napkin.kernels.products.linear import MULTIPLE_OF_COLUMNS
from napkin.kernels.products.quantized import PIECE, SCALE_FORMATS, integer_form, products_dtype

_LINE = 64
"""Bytes of a line of the processor's cache, which two threads should not both write."""
_NUMBERS = 3
_NORMS = {"rms": 1, "layer": 2}
_ACTIVATIONS = {"swiglu": 0, "gelu_tanh": 1}
"""Codes of the activations in numba_blocks.py."""


@dataclass(frozen=True)
class IntegerMatrix:
    """A matrix of integers with its biases, see `napkin.model.quantized`."""

    values: Tensor
    scales: Tensor
    middles: Tensor | None
    minima: Tensor | None
    biases: Tensor | None
    factors: Tensor | None
    """Factors in bf16 by which the matrix's inputs are multiplied first."""

    @property
    def n_columns(self) -> int:
        """Numbers of a row, of whole pieces of 32: a model may have fewer."""
        return self.values.shape[1] * (1 if self.values.dtype == torch.int8 else 2)

    @property
    def dtype(self) -> torch.dtype:
        """The format of the numbers that it is multiplied by."""
        return products_dtype(self.scales)

    def described(self) -> list[int]:
        """The numbers that describe it to the compiled pass."""
        offsets = self.middles if self.minima is None else self.minima
        form = integer_form(self.values, self.minima)
        sizes = [self.n_columns // PIECE, self.scales.shape[1], SCALE_FORMATS[self.scales.dtype], form]
        return [*map(_address, (self.values, self.scales, offsets, self.biases)), *sizes, _address(self.factors)]


@dataclass(frozen=True)
class Matrix:
    """A matrix in the model's format, of a multiple of 32 columns, with its biases."""

    weight: Float[Tensor, "rows columns"]
    biases: Float[Tensor, " rows"] | None

    @property
    def n_columns(self) -> int:
        """Numbers of a row."""
        return self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The format of its numbers."""
        return self.weight.dtype

    @property
    def is_read(self) -> bool:
        """True if the compiled pass reads such a matrix."""
        return self.weight.is_contiguous() and self.n_columns % MULTIPLE_OF_COLUMNS == 0

    def described(self) -> list[int]:
        """The numbers that describe it to the compiled pass."""
        return [_address(self.weight), 0, 0, _address(self.biases), self.n_columns, 0, 0, _NUMBERS, 0]


@dataclass(frozen=True)
class BlockWeights:
    """Weights of a block: gains of norms, biases of norms if there are any, and its matrices."""

    gains: tuple[Float[Tensor, " d_model"], Float[Tensor, " d_model"]]
    shifts: tuple[Float[Tensor, " d_model"] | None, Float[Tensor, " d_model"] | None]
    query_key_value: IntegerMatrix | Matrix
    output: IntegerMatrix | Matrix
    up: IntegerMatrix | Matrix
    """The matrices of the gates and of what they multiply, where the layer is gated."""
    down: IntegerMatrix | Matrix

    @property
    def matrices(self) -> tuple[IntegerMatrix | Matrix, ...]:
        """The matrices, in the order in which they are read."""
        return self.query_key_value, self.output, self.up, self.down


@dataclass(frozen=True)
class Blocks:
    """The weights of pre-norm blocks with full attention, and sizes that all share.

    Gains, shifts and biases are in fp32, or all numbers in bf16. Their tensors stay where they are as long as it lives.
    """

    blocks: Sequence[BlockWeights]
    norm: Literal["rms", "layer"]
    activation: Literal["swiglu", "gelu_tanh"]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    """Factor of the scores."""

    @cached_property
    def described(self) -> Int[Tensor, "block numbers"]:
        """The numbers that describe each block to the compiled pass; those of keys and values are still 0."""
        return torch.tensor([
            [*map(_address, (*each.gains, *each.shifts)), 0, 0]
            + [number for matrix in each.matrices for number in matrix.described()]
            for each in self.blocks
        ])  # fmt: skip

    @cached_property
    def dtype(self) -> torch.dtype:
        """The format of gains, and of keys and values."""
        return self.blocks[0].gains[0].dtype

    def decode(
        self,
        x: Float[Tensor, "row d_model"],
        rotation: tuple[Float[Tensor, "row_or_1 head_dim"], Float[Tensor, "row_or_1 head_dim"]] | None,
        slots: Slots,
        held: Sequence[tuple[Tensor, Tensor]],
        n_new: int = 1,
    ) -> Float[Tensor, "row d_model"]:
        """The residual stream after the blocks, of new tokens: `n_new` rows are those of one sequence, in their order.

        `rotation` are the cosines and signed sines of positions, one for all rows or one for each; `held` each layer's
        keys and values [block, kv_heads, slot, head_dim] in `dtype`. For each row `slots` counts the slots that it
        sees, with its own as the last: there its key and its value are written.
        """
        KERNELS.load("blocks.numba_blocks")
        from napkin.kernels.blocks.numba_blocks import decode

        n_rows, d_model = x.shape
        result = x.to(torch.float32, copy=True).contiguous()
        tables = [] if rotation is None else [each.float().contiguous() for each in rotation]
        counts, table, (keys, _) = slots.counts, slots.table.contiguous(), held[0]
        assert keys.dtype == self.dtype
        assert all(each.stride() == keys.stride() for pair in held for each in pair)
        assert keys.stride()[2:] == (self.head_dim, 1)
        layers = self.described.clone()
        layers[:, 4:6] = torch.tensor([[each.data_ptr() for each in pair] for pair in held])

        widest = max(each.n_columns for each in self.blocks[0].matrices)
        up_width, most_rows = _rows_of(self.blocks[0].up), max(map(_rows_of, self.blocks[0].matrices))
        group, d_ff = self.n_heads // self.n_kv_heads, up_width // (2 if self.activation == "swiglu" else 1)
        # A row, the numbers that matrices are multiplied by, their scales and sums by pieces, and a buffer.
        of_row = 4 * widest + n_rows * (4 * (widest + PIECE) + 8 * (widest // PIECE)) + 32
        buffer = max(12 * (widest // PIECE) + 16, group * (slots.longest + 1), self.head_dim, most_rows)
        own_bytes = of_row + 4 * buffer
        own_bytes += -own_bytes % _LINE + _LINE
        of_all = (2 * self.n_heads + 2 * self.n_kv_heads) * self.head_dim + up_width + d_model
        team, n_threads = team_of_threads()
        shared, own = torch.empty(n_rows * of_all), torch.empty(n_threads * own_bytes // 4)
        turns = tables and len(tables[0]) > 1
        given = [
            *((0, 0, 0) if team is None else team.functions),
            *(result.data_ptr(), layers.data_ptr(), len(self.blocks), n_rows, n_new, d_model, d_ff),
            *(int(self.dtype == torch.bfloat16), _NORMS[self.norm], _ACTIVATIONS[self.activation]),
            *(self.n_heads, self.n_kv_heads, self.head_dim, _bits(self.eps), _bits(self.scale)),
            *(counts.data_ptr(), table.data_ptr(), table.shape[1], keys.shape[2], keys.stride(0), keys.stride(1)),
            *(slots.longest, *([each.data_ptr() for each in tables] or [0, 0]), self.head_dim if turns else 0),
            *(shared.data_ptr(), own.data_ptr(), own_bytes, widest),
        ]
        numbers = (ctypes.c_int64 * len(given))(*given)
        if team is None:
            decode(ctypes.addressof(numbers))
        else:
            team.parallel(decode.address, numbers, n_threads, 0)
        return result.to(x.dtype)


def can_decode() -> bool:
    """True in inference mode, for tensors that have data, where no meter looks at single operators."""
    return may_be_compiled() and not torch._C._len_torch_dispatch_stack()


def _rows_of(matrix: IntegerMatrix | Matrix) -> int:
    return len(matrix.weight if isinstance(matrix, Matrix) else matrix.values)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _bits(number: float) -> int:
    """The bits of the nearest float32, as compiled functions take it."""
    return struct.unpack("<i", struct.pack("<f", number))[0]
