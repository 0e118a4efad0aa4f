"""The blocks of a model for new tokens of its sequences, in one compiled pass on a CPU (numba_blocks.py); or all of it,
from tokens to logits, for those of one sequence."""

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
from napkin.kernels.operators import KERNELS, Team, may_be_compiled, team_of_threads
from napkin.kernels.products.linear import MULTIPLE_OF_COLUMNS
from napkin.kernels.products.numba_forms import NUMBERS, PIECE
from napkin.kernels.products.quantized import compiled_form, products_dtype

_LINE = 64
"""Bytes of a line of the processor's cache, which two threads should not both write."""
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
        sizes = compiled_form(self.values, self.scales, self.middles, self.minima)
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
        return [_address(self.weight), 0, 0, _address(self.biases), self.n_columns, 0, 0, NUMBERS, 0]


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
        caches: Sequence[tuple[Tensor, Tensor]],
        n_new: int = 1,
    ) -> Float[Tensor, "row d_model"]:
        """The residual stream after the blocks, of new tokens: `n_new` rows are those of one sequence, in their order.

        `rotation` are the cosines and signed sines of positions, one for all rows or one for each; `caches` are the
        keys and values [block, kv_heads, slot, head_dim] of each layer, in `dtype`. For each row `slots` counts the
        slots that it sees, with its own as the last: there its key and its value are written.
        """
        result = x.to(torch.float32, copy=True).contiguous()
        tables = [] if rotation is None else [each.float().contiguous() for each in rotation]
        table, layers, (team, n_threads) = slots.table.contiguous(), self._layers(caches), team_of_threads()
        shared, own, sizes = self._buffers(len(x), slots.longest, n_threads)
        addresses = [each.data_ptr() for each in tables] or [0, 0]
        arguments = _Arguments(
            **self._sizes(caches),
            **sizes,
            x=result.data_ptr(),
            layers=layers.data_ptr(),
            n_rows=len(x),
            n_new=n_new,
            counts=slots.counts.data_ptr(),
            table=table.data_ptr(),
            n_blocks=table.shape[1],
            longest=slots.longest,
            cosines=addresses[0],
            sines=addresses[1],
            rotation_row=self.head_dim if tables and len(tables[0]) > 1 else 0,
            shared=shared.data_ptr(),
            own=own.data_ptr(),
        )
        _run(arguments, team, n_threads)
        return result.to(x.dtype)

    def _sizes(self, caches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, int]:
        """What the compiled pass is given of the model and of the strides of keys and values."""
        keys, _ = caches[0]
        assert keys.dtype == self.dtype
        assert all(each.stride() == keys.stride() for pair in caches for each in pair)
        assert keys.stride()[2:] == (self.head_dim, 1)
        return {
            "n_layers": len(self.blocks),
            "d_model": len(self.blocks[0].gains[0]),
            "d_ff": self._d_ff,
            "is_bf16": int(self.dtype == torch.bfloat16),
            "norm": _NORMS[self.norm],
            "activation": _ACTIVATIONS[self.activation],
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "eps": _bits(self.eps),
            "scale": _bits(self.scale),
            "block_size": keys.shape[2],
            "block_stride": keys.stride(0),
            "head_stride": keys.stride(1),
        }

    @cached_property
    def _d_ff(self) -> int:
        return _rows_of(self.blocks[0].up) // (2 if self.activation == "swiglu" else 1)

    def _layers(self, caches: Sequence[tuple[Tensor, Tensor]]) -> Int[Tensor, "block numbers"]:
        """The numbers that describe each block, with its keys and values, to the compiled pass."""
        layers = self.described.clone()
        layers[:, 4:6] = torch.tensor([[each.data_ptr() for each in pair] for pair in caches])
        return layers

    def _buffers(self, n_rows: int, longest: int, n_threads: int) -> tuple[Tensor, Tensor, dict[str, int]]:
        """A buffer that all threads share, one with a part for each, and what the compiled pass is given of it."""
        matrices = self.blocks[0].matrices
        widest, most_rows = max(each.n_columns for each in matrices), max(map(_rows_of, matrices))
        # A row, the numbers that matrices are multiplied by, their scales and sums by pieces, and a buffer.
        of_row = 4 * (widest + PIECE) + n_rows * (4 * (widest + 5 * PIECE) + 8 * (widest // PIECE)) + 32
        group = self.n_heads // self.n_kv_heads
        buffer = max(12 * (widest // PIECE) + 16, group * (longest + 1), self.head_dim, most_rows)
        own_bytes = of_row + 4 * buffer
        own_bytes += -own_bytes % _LINE + _LINE
        of_all = (2 * self.n_heads + 2 * self.n_kv_heads) * self.head_dim + _rows_of(self.blocks[0].up)
        of_all += len(self.blocks[0].gains[0])
        shared, own = torch.empty(n_rows * of_all), torch.empty(n_threads * own_bytes // 4)
        return shared, own, {"own_bytes": own_bytes, "widest": widest}


@dataclass(frozen=True)
class Ends:
    """What tokens go through before the blocks and after them."""

    embedding: Float[Tensor, "vocab_size d_model"] | None
    """The tokens' vectors; None where others look them up, with their positions."""
    input_scale: float
    """Factor of those vectors."""
    positions: Float[Tensor, "context_length d_model"] | None
    """Vectors that are added by position."""
    rotation: tuple[Float[Tensor, "context_length head_dim"], Float[Tensor, "context_length head_dim"]] | None
    """Cosines and signed sines of positions."""
    gain: Float[Tensor, " d_model"]
    shift: Float[Tensor, " d_model"] | None
    """Gain and bias of the last norm, which is of the blocks' kind."""
    head: IntegerMatrix | Matrix

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return _rows_of(self.head)


class TokenPass:
    """The logits of new tokens of one sequence in one compiled call, from the embedding to the head.

    Weights that do not fit the caches drive everything else out of them, so that between two tokens one of torch's
    operators takes as long as reading half a megabyte of weights. All that is the same for each token is prepared here,
    for one cache of keys and values, and a token calls only the operator that allocates its logits.
    """

    def __init__(self, blocks: Blocks, ends: Ends, caches: Sequence[tuple[Tensor, Tensor]], most_rows: int) -> None:
        self.blocks, self.ends, self.most_rows = blocks, ends, most_rows
        self._team, self._n_threads = team_of_threads()
        (keys, _), d_model, width = caches[0], len(ends.gain), blocks.head_dim
        self._layers, longest = blocks._layers(caches), keys.shape[2]
        self._shared, self._own, sizes = blocks._buffers(most_rows, longest, self._n_threads)
        self._x, self._rotation = torch.empty(most_rows, d_model), torch.empty(2, most_rows, width)
        self._head = torch.tensor(ends.head.described())
        # Its sequence is the first block of the cache, and the only one.
        self._tokens, self._counts, self._table = ((ctypes.c_int64 * most_rows)() for _ in range(3))
        rotates = ends.rotation is not None
        cosine_table, sine_table = ends.rotation or (None, None)
        self._arguments = _Arguments(
            **blocks._sizes(caches),
            **sizes,
            x=self._x.data_ptr(),
            layers=self._layers.data_ptr(),
            counts=ctypes.addressof(self._counts),
            table=ctypes.addressof(self._table),
            n_blocks=1,
            longest=longest,
            cosines=self._rotation[0].data_ptr() if rotates else 0,
            sines=self._rotation[1].data_ptr() if rotates else 0,
            rotation_row=width,
            shared=self._shared.data_ptr(),
            own=self._own.data_ptr(),
            tokens=ctypes.addressof(self._tokens),
            embedding=_address(ends.embedding),
            input_scale=_bits(ends.input_scale),
            positions=_address(ends.positions),
            cosine_table=_address(cosine_table),
            sine_table=_address(sine_table),
            has_bf16_tables=int(cosine_table is not None and cosine_table.dtype == torch.bfloat16),
            last_gain=_address(ends.gain),
            last_shift=_address(ends.shift),
            head=self._head.data_ptr(),
            vocab_size=ends.vocab_size,
        )

    def takes(self, n_rows: int) -> bool:
        """True if it was prepared for so many tokens, and for the threads that torch has now."""
        return n_rows <= self.most_rows and team_of_threads() == (self._team, self._n_threads)

    def __call__(
        self, tokens: Sequence[int], start: int, n_last: int, x: Float[Tensor, "row d_model"] | None = None
    ) -> Float[Tensor, "n_last vocab_size"]:
        """The logits after each of the last `n_last` tokens, which stand from position `start` on, in fp32; x are the
        tokens' vectors, for `Ends` without an embedding."""
        logits, arguments = torch.empty(n_last, self.ends.vocab_size), self._arguments
        if x is not None:
            self._x[: len(tokens)] = x
        for row, token in enumerate(tokens):
            self._tokens[row], self._counts[row] = token, start + row + 1
        arguments.n_rows = arguments.n_new = len(tokens)
        arguments.n_last, arguments.logits = n_last, logits.data_ptr()
        _run(arguments, self._team, self._n_threads)
        return logits


class _Arguments(ctypes.Structure):
    """What the compiled pass is given, see `decode` in numba_blocks.py; what is left out is 0."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "thread_number", "n_threads", "barrier", "x", "layers", "n_layers", "n_rows", "n_new", "d_model", "d_ff",
            "is_bf16", "norm", "activation", "n_heads", "n_kv_heads", "head_dim", "eps", "scale", "counts", "table",
            "n_blocks", "block_size", "block_stride", "head_stride", "longest", "cosines", "sines", "rotation_row",
            "shared", "own", "own_bytes", "widest", "tokens", "embedding", "input_scale", "positions", "cosine_table",
            "sine_table", "has_bf16_tables", "last_gain", "last_shift", "head", "vocab_size", "logits", "n_last",
        )
    )  # fmt: skip


def _run(arguments: _Arguments, team: Team | None, n_threads: int) -> None:
    """Run the compiled pass on all threads of a team, or on this one."""
    KERNELS.load("blocks.numba_blocks")
    from napkin.kernels.blocks.numba_blocks import decode

    if team is None:
        decode(ctypes.addressof(arguments))
    else:
        arguments.thread_number, arguments.n_threads, arguments.barrier = team.functions
        team.parallel(decode.address, ctypes.byref(arguments), n_threads, 0)


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
