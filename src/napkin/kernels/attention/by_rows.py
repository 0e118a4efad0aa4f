"""Causal attention for a CPU by blocks of queries: matrix products, and compiled loops over rows of scores; or, where
that is faster, in tiles that never leave the cache (by_tiles.py).

The scores of a block, of some heads of one sequence, stay in cache while they become weights, in place. Keys that no
query of the block sees are not multiplied: none after it, and none before the first that a window or a document leaves.
Kept for the backward pass are queries, keys, values and each row's logsumexp; the scores are computed again, as in
FlashAttention-2 (Dao 2023).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.attention import by_tiles
from napkin.kernels.attention.reference import plain_attention, softcapped_attention
from napkin.kernels.operators import COMPUTED, cpu_operator, in_autocast_dtype, is_bf16, on_threads

Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
Values = Float[Tensor, "batch kv_heads key value_dim"]
Mixed = Float[Tensor, "batch heads query value_dim"]
FirstKeys = Int[Tensor, "#batch query"]

BLOCK = {torch.bfloat16: 256, torch.float32: 128}
"""Queries of a block. 512 tie with 256 in bf16, and 128 take 1.2 to 1.4 times as long."""

MOST_SCORES = {torch.bfloat16: 2**22, torch.float32: 2**20}
"""Scores of a block, at most, unless one head's are more: of 2^20 to 2^23 the fastest at 1,024 to 4,096 tokens."""


def compiled_attention(
    queries: Queries,
    keys: Keys,
    values: Values,
    scale: float | None = None,
    *,
    first_keys: FirstKeys | None = None,
    softcap: float | None = None,
) -> Mixed:
    """softmax(softcap(q · kᵀ · scale)) · v, each query over the keys from its first to its own position.

    The last query stands at the last key. `first_keys` of None is all zeros. A scale of None is 1/sqrt(head_dim). Under
    autocast it computes in autocast's dtype. The loops are for a CPU, in bf16 and fp32: elsewhere, and while
    torch.compile traces, this is plain attention with a mask.
    """
    queries, keys, values = in_autocast_dtype(queries, keys, values)
    factor = queries.shape[-1] ** -0.5 if scale is None else scale
    if first_keys is None:
        first_keys = torch.zeros(1, queries.shape[-2], dtype=torch.int64, device=queries.device)
    if torch.compiler.is_compiling() or queries.device.type != "cpu" or queries.dtype not in COMPUTED:
        mask = _mask(first_keys, keys.shape[-2])
        if softcap is None:
            return plain_attention(queries, keys, values, mask, factor)
        return softcapped_attention(queries, keys, values, mask, factor, softcap)
    # As the loops read them, which check nothing.
    first_keys = first_keys.to(torch.int64).contiguous()
    return _Attention.apply(queries, keys, values, first_keys, factor, softcap or 0.0)  # pyright: ignore[reportReturnType]


def first_keys_of(
    documents: Int[Tensor, "batch key"] | None, window: int | None, n_keys: int, query_offset: int, device: torch.device
) -> FirstKeys:
    """The first key that each query from query_offset on sees: of its document, a run of equal ids, and its window.

    >>> first_keys_of(torch.tensor([[0, 0, 2, 2, 2]]), 2, 5, 1, torch.device("cpu")).tolist()
    [[0, 2, 2, 3]]
    """
    places = torch.arange(n_keys, device=device)[None]
    firsts = torch.zeros_like(places) if window is None else (places - (window - 1)).clamp(min=0)
    if documents is not None:
        begins = torch.ones_like(documents, dtype=torch.bool)
        begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
        firsts = torch.maximum(firsts, places.where(begins, 0).cummax(dim=1).values)
    return firsts[:, query_offset:].contiguous()


def _mask(first_keys: Tensor, n_keys: int) -> Tensor:
    keys, n_queries = torch.arange(n_keys, device=first_keys.device), first_keys.shape[1]
    seen = (keys >= first_keys[:, :, None]) & (keys <= keys[n_keys - n_queries :, None])
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))[:, None]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, first_keys: Tensor, scale: float, cap: float
    ) -> Tensor:
        mixed, logsumexps = _forward(queries, keys, values, first_keys, scale, cap)
        ctx.save_for_backward(queries, keys, values, first_keys, logsumexps)
        ctx.options = scale, cap
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (*_backward(grad_outputs[0], *ctx.saved_tensors, *ctx.options), None, None, None)


def _heads_after_positions(x: Tensor, width: int) -> Tensor:
    """An empty tensor of x's shape, but for its width, laid out as a model's linear layers read and write it."""
    batch, heads, length, _ = x.shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


def _fake_forward(
    query: Tensor, key: Tensor, value: Tensor, first_keys: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    return _heads_after_positions(query, value.shape[-1]), query.new_empty(query.shape[:-1], dtype=torch.float32)


@cpu_operator(
    "compiled_attention(Tensor query, Tensor key, Tensor value, Tensor first_keys, float scale, float cap) "
    "-> (Tensor, Tensor)",
    _fake_forward,
)
def _forward(
    query: Tensor, key: Tensor, value: Tensor, first_keys: Tensor, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    mixed, logsumexps = _fake_forward(query, key, value, first_keys, scale, cap)
    if by_tiles.takes_tiles(query, key, value):
        by_tiles.attend(query, key, value, first_keys, mixed, logsumexps, scale, cap)
        return mixed, logsumexps
    rooms = _rooms(query, key, value, backward=False)

    def mix(block: _Block) -> None:
        q = block.grouped(query, rooms["queries"])
        scores = _product(q, _copy(block.seen(key), rooms["keys"]).mT, rooms["scores"])
        sums = _shaped(rooms["logsumexps"], block.shape)
        block.on_rows("weights_of_scores", (scores,), sums, scale, cap)
        block.queries(logsumexps).copy_(sums)
        mixture = _product(scores, _copy(block.seen(value), rooms["values"]), rooms["mixed"])
        block.queries(mixed).copy_(mixture.view(*block.shape, -1))

    for heads in _all_heads(query, key):
        for block in heads.blocks(first_keys):
            mix(block)
    return mixed, logsumexps


def _fake_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_keys: Tensor,
    logsumexps: Tensor,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (_heads_after_positions(each, each.shape[-1]) for each in (query, key, value))
    return grad_query, grad_key, grad_value


@cpu_operator(
    "compiled_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor first_keys, "
    "Tensor logsumexps, float scale, float cap) -> (Tensor, Tensor, Tensor)",
    _fake_backward,
)
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_keys: Tensor,
    logsumexps: Tensor,
    scale: float,
    cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = _fake_backward(gradient, query, key, value, first_keys, logsumexps, scale, cap)
    if by_tiles.takes_tiles(query, key, value):
        by_tiles.differentiate(gradient, query, key, value, first_keys, logsumexps, gradients, scale, cap)
        return gradients
    grad_query, *of_keys = gradients
    rooms = _rooms(query, key, value, backward=True)

    def differentiate(block: _Block, *totals: Tensor) -> None:
        q, g = block.grouped(query, rooms["queries"]), block.grouped(gradient, rooms["gradients"])
        k, v = _copy(block.seen(key), rooms["keys"]), _copy(block.seen(value), rooms["values"])
        scores, grad_scores = _product(q, k.mT, rooms["scores"]), _product(g, v.mT, rooms["grad_scores"])
        sums = _copy(block.queries(logsumexps), rooms["logsumexps"])
        block.on_rows("score_gradients", (scores, grad_scores), sums, scale, cap)
        grad_q = _product(grad_scores, k, rooms["mixed"])
        block.queries(grad_query).copy_(grad_q.view(*block.shape, -1))
        # The keys and values of this block are not needed any more.
        block.add_to(totals[0], _product(grad_scores.mT, q, rooms["keys"]))
        block.add_to(totals[1], _product(scores.mT, g, rooms["values"]))

    for heads in _all_heads(query, key):
        ends = [heads.keys(each) for each in of_keys]
        # Gradients that several blocks have a part in are summed in fp32.
        names = ("key_sums", "value_sums")
        totals = (
            ends
            if heads.n_blocks == 1
            else [_shaped(rooms[name], each.shape).zero_() for name, each in zip(names, ends, strict=True)]
        )
        for block in heads.blocks(first_keys):
            differentiate(block, *totals)
        if heads.n_blocks > 1:
            for end, total in zip(ends, totals, strict=True):
                end.copy_(total)
    return gradients


@dataclass(frozen=True)
class _Heads:
    """Some heads of one sequence."""

    sequence: int
    of_queries: slice
    of_keys: slice
    n_queries: int
    n_keys: int
    block: int

    @property
    def n_blocks(self) -> int:
        return -(-self.n_queries // self.block)

    def keys(self, x: Tensor) -> Tensor:
        return x[self.sequence, self.of_keys]

    def blocks(self, first_keys: Tensor) -> "Iterator[_Block]":
        firsts = first_keys[min(self.sequence, len(first_keys) - 1)]
        offset = self.n_keys - self.n_queries
        for start in range(0, self.n_queries, self.block):
            rows = slice(start, min(start + self.block, self.n_queries))
            begin = int(firsts[rows].min()) if self.n_blocks > 1 else 0
            yield _Block(self, rows, slice(begin, offset + rows.stop), firsts[rows] - begin)


@dataclass(frozen=True)
class _Block:
    """A block of queries of some heads, and the keys that at least one of them sees."""

    heads: _Heads
    rows: slice
    seen_keys: slice
    first_keys: Tensor
    """The first key that each query sees, counted from the first of the seen keys."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.heads.of_queries.stop - self.heads.of_queries.start, self.rows.stop - self.rows.start

    def queries(self, x: Tensor) -> Tensor:
        return x[self.heads.sequence, self.heads.of_queries, self.rows]

    def seen(self, x: Tensor) -> Tensor:
        return self.heads.keys(x)[:, self.seen_keys]

    def grouped(self, x: Tensor, room: Tensor) -> Tensor:
        """A copy in which the rows of queries that share a key are one matrix."""
        n_kv_heads = self.heads.of_keys.stop - self.heads.of_keys.start
        return _copy(self.queries(x), room).view(n_kv_heads, -1, x.shape[-1])

    def on_rows(self, kernel: str, rows: tuple[Tensor, ...], logsumexps: Tensor, scale: float, cap: float) -> None:
        """Let one of the kernels of numba_rows.py change rows of scores, or of their gradients too, in place."""
        n_keys, n_rows = rows[0].shape[-1], prod(self.shape)
        # The first row's query is at the position of its own key, the last key that it may see.
        sizes = self.shape[1], n_keys, n_rows, n_keys - self.shape[1]
        on_threads(
            f"attention.numba_rows.{kernel}",
            (*rows, is_bf16(rows[0]), logsumexps, self.first_keys),
            (*sizes, scale, cap),
            n_rows=n_rows,
            n_columns=n_keys,
            # Rows of a multiple of 32 numbers.
            buffer_size=(len(rows) + 1) * (-(-n_keys // 32) * 32),
        )

    def add_to(self, total: Tensor, part: Tensor) -> None:
        """Add what these queries make of the gradient of keys or values; of a single block, it is all."""
        if self.heads.n_blocks == 1:
            total.copy_(part)
            return
        n_heads, n_seen, width = part.shape
        before = total.data_ptr() + 4 * self.seen_keys.start * width, part, is_bf16(part)
        sizes = n_seen, self.heads.n_keys, width
        on_threads("attention.numba_rows.add_rows", before, sizes, n_rows=n_heads * n_seen, n_columns=width)


def _all_heads(query: Tensor, key: Tensor) -> Iterator[_Heads]:
    block, at_once = _division(query, key)
    n_kv_heads, group = key.shape[1], query.shape[1] // key.shape[1]
    for sequence in range(query.shape[0]):
        for start in range(0, n_kv_heads, at_once):
            stop = min(start + at_once, n_kv_heads)
            of_queries = slice(start * group, stop * group)
            yield _Heads(sequence, of_queries, slice(start, stop), query.shape[2], key.shape[2], block)


def _division(query: Tensor, key: Tensor) -> tuple[int, int]:
    """Number of queries in a block, and of key heads that are processed at a time."""
    block = min(BLOCK[query.dtype], max(query.shape[2], 1))
    scores = block * key.shape[2] * query.shape[1] // key.shape[1]
    return block, min(max(MOST_SCORES[query.dtype] // max(scores, 1), 1), key.shape[1])


def _shaped(room: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The beginning of memory that is used again for each block."""
    return room[: prod(shape)].view(shape)


def _copy(x: Tensor, room: Tensor) -> Tensor:
    # Contiguous, as products need it: otherwise each product would make its own copy.
    return _shaped(room, x.shape).copy_(x)


def _product(left: Tensor, right: Tensor, room: Tensor) -> Tensor:
    return torch.bmm(left, right, out=_shaped(room, (*left.shape[:2], right.shape[2])))


def _rooms(query: Tensor, key: Tensor, value: Tensor, *, backward: bool) -> dict[str, Tensor]:
    sizes = _room_sizes(query, key, value, backward=backward)
    return {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in sizes.items()}


def _room_sizes(query: Tensor, key: Tensor, value: Tensor, *, backward: bool) -> dict[str, tuple[int, torch.dtype]]:
    """Sizes and format of the buffers that a pass needs besides its results."""
    block, n_kv_heads = _division(query, key)
    n_rows, n_keys = block * n_kv_heads * query.shape[1] // key.shape[1], n_kv_heads * key.shape[2]
    width, value_width = query.shape[-1], value.shape[-1]
    sizes = {
        "queries": n_rows * width,
        "keys": n_keys * width,
        "values": n_keys * value_width,
        "scores": n_rows * key.shape[2],
        "mixed": n_rows * value_width,
    }
    if backward:
        sizes |= {"gradients": n_rows * value_width, "grad_scores": sizes["scores"], "mixed": n_rows * width}
    rooms = {name: (size, query.dtype) for name, size in sizes.items()}
    rooms["logsumexps"] = n_rows, torch.float32
    if backward and block < query.shape[2]:
        rooms |= {"key_sums": (n_keys * width, torch.float32), "value_sums": (n_keys * value_width, torch.float32)}
    return rooms


def scratch_bytes(query: Tensor, key: Tensor, value: Tensor, *, backward: bool) -> int:
    """Bytes that a pass takes from torch's allocator and gives back before it returns."""
    if by_tiles.takes_tiles(query, key, value):
        return 0
    sizes = _room_sizes(query, key, value, backward=backward).values()
    # The first keys of a block and of the next one, and one number.
    return sum(size * dtype.itemsize for size, dtype in sizes) + 8 * (2 * _division(query, key)[0] + 1)
