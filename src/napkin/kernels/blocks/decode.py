"""The blocks of a model for new tokens of its sequences, in one compiled pass on a CPU (numba_blocks.py)."""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.attention.decode import Slots
from napkin.kernels.operators import KERNELS, buffer_of_thread, may_be_compiled, team_of_threads
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
    """The weights of pre-norm blocks with full attention and of the norm after the last, and sizes that all share.

    Gains, shifts and biases are in fp32, or all numbers in bf16. Their tensors stay where they are as long as it lives.
    """

    blocks: Sequence[BlockWeights]
    last_gain: Float[Tensor, " d_model"]
    last_shift: Float[Tensor, " d_model"] | None
    norm: Literal["rms", "layer"]
    activation: Literal["swiglu", "gelu_tanh"]
    n_heads: int
    n_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    """Factor of the scores."""

    @cached_property
    def dtype(self) -> torch.dtype:
        """The format of gains, and of keys and values."""
        return self.last_gain.dtype

    @cached_property
    def kind(self) -> tuple[str | int, ...]:
        """What the time of a pass depends on, beside its tokens."""
        widths = [each.n_columns for each in self.blocks[0].matrices]
        kinds = str(self.dtype).removeprefix("torch."), self.norm, self.activation
        return (*kinds, self.n_heads, self.n_kv_heads, self.head_dim, widths[0], widths[-1])

    def decode(
        self,
        x: Float[Tensor, "row d_model"],
        rotation: tuple[Float[Tensor, "row_or_1 head_dim"], Float[Tensor, "row_or_1 head_dim"]] | None,
        slots: Slots,
        held: Sequence[tuple[Tensor, Tensor]],
        n_new: int = 1,
    ) -> Float[Tensor, "row d_model"]:
        """The norm of the residual stream after the blocks, of new tokens: `n_new` rows are those of one sequence, in
        their order. x is in `dtype`.

        `rotation` are the cosines and signed sines of positions, one for all rows or one for each; `held` each layer's
        keys and values [block, kv_heads, slot, head_dim] in `dtype`. For each row `slots` counts the slots that it
        sees, with its own as the last: there its key and its value are written.
        """
        KERNELS.load("blocks.numba_blocks")
        from napkin.kernels.blocks.numba_blocks import decode

        # What the weights have driven out of the caches is slow: as few of torch's operators as can be are called here,
        # each of which takes as long as reading half a megabyte of weights.
        x, (n_rows, d_model) = x.contiguous(), x.shape
        result = torch.empty_like(x)
        tables = [] if rotation is None else [each.float().contiguous() for each in rotation]
        counts, table, (keys, _) = slots.counts, slots.table.contiguous(), held[0]
        layers, (widest, most_rows, d_ff, of_all) = self._layers_with(held), self._sizes

        # A row, the numbers that matrices are multiplied by, their scales and sums by pieces, and a buffer.
        of_row = 4 * widest + n_rows * (4 * (widest + PIECE) + 8 * (widest // PIECE)) + 32
        seen = self.n_heads // self.n_kv_heads * (slots.longest + 1)
        own_bytes = of_row + 4 * max(12 * (widest // PIECE) + 16, seen, self.head_dim, most_rows)
        own_bytes += -own_bytes % _LINE + _LINE
        team, n_threads = team_of_threads()
        shared_bytes = 4 * n_rows * of_all
        shared_bytes += -shared_bytes % _LINE
        shared = buffer_of_thread((shared_bytes + n_threads * own_bytes + _LINE) // 4)
        shared += -shared % _LINE
        turns = tables and len(tables[0]) > 1
        given = [
            *((0, 0, 0) if team is None else team.functions),
            *(
                x.data_ptr(),
                result.data_ptr(),
                ctypes.addressof(layers),
                len(self.blocks),
                n_rows,
                n_new,
                d_model,
                d_ff,
            ),
            *(int(self.dtype == torch.bfloat16), _NORMS[self.norm], _ACTIVATIONS[self.activation]),
            *(self.n_heads, self.n_kv_heads, self.head_dim, _bits(self.eps), _bits(self.scale)),
            *(counts.data_ptr(), table.data_ptr(), table.shape[1], keys.shape[2], keys.stride(0), keys.stride(1)),
            *(slots.longest, *([each.data_ptr() for each in tables] or [0, 0]), self.head_dim if turns else 0),
            *(shared, shared + shared_bytes, own_bytes, widest, _address(self.last_gain), _address(self.last_shift)),
        ]
        numbers = (ctypes.c_int64 * len(given))(*given)
        if team is None:
            decode(ctypes.addressof(numbers))
        else:
            team.parallel(decode.address, numbers, n_threads, 0)
        return result

    @cached_property
    def _sizes(self) -> tuple[int, int, int, int]:
        """The most columns and the most rows of a matrix, the width of the feed-forward layers, and the numbers that
        all threads share of a row of x."""
        first = self.blocks[0]
        up_rows = _rows_of(first.up)
        d_ff = up_rows // (2 if self.activation == "swiglu" else 1)
        of_all = (2 * self.n_heads + 2 * self.n_kv_heads) * self.head_dim + up_rows + 2 * len(self.last_gain)
        return max(each.n_columns for each in first.matrices), max(map(_rows_of, first.matrices)), d_ff, of_all

    def _layers_with(self, held: Sequence[tuple[Tensor, Tensor]]) -> Any:
        """The numbers that describe each block with its keys and values to the compiled pass."""
        places = tuple(each.data_ptr() for pair in held for each in pair)
        if (known := self._described.get(places)) is not None:
            return known
        keys, _ = held[0]
        assert keys.dtype == self.dtype
        assert keys.stride()[2:] == (self.head_dim, 1)
        assert all(each.stride() == keys.stride() for pair in held for each in pair)
        numbers = [
            number
            for block, pair in zip(self.blocks, held, strict=True)
            for number in (
                *map(_address, (*block.gains, *block.shifts, *pair)),
                *(number for matrix in block.matrices for number in matrix.described()),
            )
        ]
        layers = (ctypes.c_int64 * len(numbers))(*numbers)
        self._described.clear()
        self._described[places] = layers
        return layers

    @cached_property
    def _described(self) -> dict[tuple[int, ...], Any]:
        """What `_layers_with` made last, by the addresses of keys and values: a sequence's stay where they are."""
        return {}


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
