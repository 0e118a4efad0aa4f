"""The scan of Mamba-2's state-space layer (Dao & Gu 2024, "Transformers are SSMs"): token by token, and by chunks.

Each head carries a state S [state_size, head_dim], to which a token adds its key times its value, and from which it
reads with its query, after all that was there has decayed by a number of the token:

    S[t] = exp(log_decay[t]) · S[t-1] + key[t] ⊗ value[t]        y[t] = query[t] · S[t]

In the paper's letters keys are B, queries are C, values are Δ·x and log_decay is Δ·A. Heads of a group share keys and
queries. Within a chunk of tokens the sum is attention without a softmax, (query[i] · key[j]) · exp(decay from j to i):
products of matrices. Between chunks only states are passed on.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.operators import in_autocast_dtype
from napkin.kernels.recurrences import CHUNK

Values = Float[Tensor, "batch position heads head_dim"]
Keys = Float[Tensor, "batch position groups state_size"]
LogDecay = Float[Tensor, "batch position heads"]
State = Float[Tensor, "batch heads state_size head_dim"]
Documents = Int[Tensor, "batch position"] | None


def plain_scan(
    queries: Keys,
    keys: Keys,
    values: Values,
    log_decay: LogDecay,
    *,
    state: State | None = None,
    documents: Documents = None,
    document_before: Int[Tensor, " batch"] | None = None,
) -> tuple[Values, State]:
    """The recurrence as it is written, a token at a time: the outputs, and the state after the last token.

    The state before the first token is zeros or `state`, which belongs to document number `document_before`. Where
    `documents` changes, a document begins with a state of zeros.
    """
    heads = values.shape[2]
    queries, keys = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in (queries, keys))
    if state is None:
        state = values.new_zeros(values.shape[0], heads, keys.shape[-1], values.shape[-1])
    outputs = []
    for t, decay in enumerate(token_decays(log_decay, documents, document_before)):
        state = decay[..., None, None] * state + keys[:, t, :, :, None] * values[:, t, :, None]
        outputs.append((queries[:, t, :, None] @ state)[:, :, 0])
    return torch.stack(outputs, dim=1), state


def token_decays(
    log_decay: LogDecay, documents: Documents, document_before: Int[Tensor, " batch"] | None
) -> Iterator[Float[Tensor, "batch heads"]]:
    """The fraction of the state that remains at each token: 0 where a document begins."""
    before = document_before
    for t in range(log_decay.shape[1]):
        decay = log_decay[:, t].exp()
        if documents is not None:
            before = documents[:, 0] if before is None else before
            decay = decay * (documents[:, t] == before)[:, None]
            before = documents[:, t]
        yield decay


def whole_chunks(
    tensors: Sequence[Tensor], documents: Documents, chunk: int
) -> tuple[list[Tensor], Int[Tensor, "batch padded"] | None]:
    """The arguments of a recurrence, [batch, position, ...], padded to whole chunks with tokens of zeros, which add
    nothing and let nothing decay, of the last document."""
    padding = -tensors[0].shape[1] % chunk
    if not padding:
        return list(tensors), documents
    padded = [F.pad(each, (0, 0) * (each.dim() - 2) + (0, padding)) for each in tensors]
    if documents is not None:
        documents = torch.cat((documents, documents[:, -1:].expand(-1, padding)), dim=1)
    return padded, documents


def chunked_scan(
    queries: Keys,
    keys: Keys,
    values: Values,
    log_decay: LogDecay,
    *,
    state: State | None = None,
    documents: Documents = None,
    document_before: Int[Tensor, " batch"] | None = None,
    chunk: int = CHUNK,
) -> tuple[Values, State]:
    """`plain_scan` by chunks: matrix products within each, and one recurrence over the states between them.

    The backward pass keeps the arguments and a state per chunk; weights within chunks are computed again. Decays and
    states are in log_decay's dtype, fp32 or wider; products are in that of the values or, under autocast, autocast's.
    """
    queries, keys, values = in_autocast_dtype(queries, keys, values)
    length = values.shape[1]
    chunk = min(chunk, length)
    (queries, keys, values, log_decay), documents = whole_chunks((queries, keys, values, log_decay), documents, chunk)
    if state is None:
        state = log_decay.new_zeros(values.shape[0], values.shape[2], keys.shape[-1], values.shape[-1])
    outputs, last = _ChunkedScan.apply(queries, keys, values, log_decay, state, documents, document_before, chunk)  # pyright: ignore[reportGeneralTypeIssues]
    return outputs[:, :length], last


class Decays(NamedTuple):
    """The remaining fractions of what a chunk's tokens wrote, by where it is read. All are exp of sums of log_decay,
    and 0 from one document to another."""

    within: Float[Tensor, "chunks groups heads to from"]
    """From a token of the chunk to another."""
    from_start: Float[Tensor, "chunks to groups heads"]
    """From the state before the chunk to a token."""
    to_end: Float[Tensor, "chunks from groups heads"]
    """From a token to the state after the chunk."""
    whole: Float[Tensor, "batch chunk groups heads"]
    """From the state before the chunk to that after it."""


def chunk_decays(
    log_decay: Float[Tensor, "batch chunk token groups heads"],
    documents: Int[Tensor, "batch chunk token"] | None,
    document_before: Int[Tensor, " batch"] | None,
) -> Decays:
    """The decays within chunks of tokens."""
    n_chunks, size = log_decay.shape[1:3]
    sums = log_decay.cumsum(dim=2)
    rows = sums.flatten(0, 1).permute(0, 2, 3, 1)
    seen = torch.ones(size, size, dtype=torch.bool, device=log_decay.device).tril_()
    if documents is not None:
        seen = seen & (documents[..., :, None] == documents[..., None, :]).flatten(0, 1)[:, None, None]
    # Above the diagonal the sums are positive: exp could overflow there. Adding -inf is one vectorised pass, filling
    # by a mask of another shape is not.
    unseen = torch.zeros(seen.shape, dtype=rows.dtype, device=rows.device).masked_fill_(~seen, -torch.inf)
    within = (rows[..., :, None] - rows[..., None, :]).add_(unseen).exp_()
    from_start, to_end, whole = sums.exp(), (sums[:, :, -1:] - sums).exp_(), sums[:, :, -1].exp()
    if documents is not None:
        ends = documents[:, :, -1]
        first = documents[:, :1, 0] if document_before is None else document_before[:, None]
        before = torch.cat((first, ends[:, : n_chunks - 1]), dim=1)
        from_start = from_start * (documents == before[..., None])[..., None, None]
        to_end = to_end * (documents == ends[..., None])[..., None, None]
        whole = whole * (ends == before)[..., None, None]
    return Decays(within, from_start.flatten(0, 1), to_end.flatten(0, 1), whole)


class _Chunks:
    """The arguments of a scan as matrices of its chunks, which are numbered batch first, then in order, then by group.

    `wide` is log_decay's dtype; of what is multiplied all is in the values' dtype.
    """

    def __init__(self, queries: Tensor, keys: Tensor, values: Tensor, log_decay: Tensor, chunk: int) -> None:
        batch, length, groups, self.state_size = keys.shape
        heads, self.head_dim = values.shape[2:]
        self.batch, self.n_chunks, self.chunk = batch, length // chunk, chunk
        self.groups, self.heads = groups, heads // groups
        self.dtype, self.wide = values.dtype, log_decay.dtype
        self.queries, self.keys = self.by_group(queries), self.by_group(keys)
        self.values = self.by_head(values)
        self.log_decay = log_decay.unflatten(1, (self.n_chunks, chunk)).unflatten(3, (groups, self.heads))

    def by_group(self, x: Tensor) -> Tensor:
        """[batch, position, groups, width] as [chunk of group, token, width]."""
        return x.unflatten(1, (self.n_chunks, self.chunk)).transpose(2, 3).flatten(0, 2)

    def by_head(self, x: Tensor) -> Tensor:
        """[batch, position, heads, head_dim] as [chunk of group, token, head, head_dim]."""
        return self.by_group(x.unflatten(2, (self.groups, self.heads)).flatten(3)).unflatten(2, (self.heads, -1))

    def in_order(self, x: Tensor) -> Tensor:
        """[chunk of group, token, ...] as [batch, position, groups, ...]."""
        return x.unflatten(0, (self.batch, self.n_chunks, self.groups)).transpose(2, 3).flatten(1, 2)

    def per_token(self, decay: Tensor) -> Tensor:
        """Decays [chunk, token, groups, heads] as factors of [chunk of group, token, head, head_dim]."""
        return decay.transpose(1, 2).flatten(0, 1)[..., None].to(self.dtype)

    def per_chunk(self, states: Tensor) -> Tensor:
        """States of chunks [batch, chunk, groups, state_size, heads, head_dim] as matrices [chunk of group, state_size,
        heads · head_dim]."""
        return states.flatten(0, 2).flatten(2).to(self.dtype)

    def as_states(self, x: Tensor) -> Tensor:
        """The other way, in `wide`."""
        shape = (self.batch, self.n_chunks, self.groups, self.state_size, self.heads, self.head_dim)
        return x.view(shape).to(self.wide)

    def grouped(self, state: Tensor) -> Tensor:
        """[batch, heads, state_size, head_dim] as [batch, groups, state_size, heads, head_dim]."""
        return state.unflatten(1, (self.groups, self.heads)).transpose(2, 3).to(self.wide)

    def ungrouped(self, state: Tensor) -> Tensor:
        """The other way."""
        return state.transpose(2, 3).flatten(1, 2)


class _ChunkedScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        log_decay: Tensor,
        state: Tensor,
        documents: Tensor | None,
        document_before: Tensor | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(values.device.type, enabled=False):
            chunks = _Chunks(queries, keys, values, log_decay, chunk)
            decays = _decays_of(chunks, documents, document_before)
            weights = (chunks.queries @ chunks.keys.mT)[:, None] * decays.within.flatten(0, 1)
            y = (weights.to(chunks.dtype) @ chunks.values.transpose(1, 2)).transpose(1, 2)
            written = chunks.values * chunks.per_token(decays.to_end)
            added = chunks.as_states(chunks.keys.mT @ written.flatten(2))
            # The state before each chunk.
            states = torch.empty_like(added)
            current = chunks.grouped(state)
            for number in range(chunks.n_chunks):
                states[:, number] = current
                current = current * decays.whole[:, number, :, None, :, None] + added[:, number]
            read = (chunks.queries @ chunks.per_chunk(states)).view(y.shape)
            y = chunks.in_order(y + read * chunks.per_token(decays.from_start)).flatten(2, 3)
        ctx.save_for_backward(queries, keys, values, log_decay, states, documents, document_before)
        ctx.chunk = chunk
        return y, chunks.ungrouped(current)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        queries, keys, values, log_decay, states, documents, document_before = ctx.saved_tensors
        with torch.autocast(values.device.type, enabled=False):
            chunks = _Chunks(queries, keys, values, log_decay, ctx.chunk)
            decays = _decays_of(chunks, documents, document_before)
            grad_y = chunks.by_head(grad_outputs[0].to(chunks.dtype))
            by_head = grad_y.transpose(1, 2)

            # Within chunks: y = weights · values, weights = scores ∘ within.
            within = decays.within.flatten(0, 1)
            scores = chunks.queries @ chunks.keys.mT
            weights = scores[:, None] * within
            grad_values = (weights.to(chunks.dtype).mT @ by_head).transpose(1, 2)
            grad_weights = by_head @ chunks.values.permute(0, 2, 3, 1)
            grad_scores = (grad_weights * within).sum(dim=1).to(chunks.dtype)
            # The derivative of each weight with respect to the sum of log decays from one token to the other.
            by_decay = weights.mul_(grad_weights)
            grad_sums = (by_decay.sum(dim=-1) - by_decay.sum(dim=-2)).transpose(1, 2)

            # Reading the state before the chunk.
            matrices = chunks.per_chunk(states)
            from_start, to_end = chunks.per_token(decays.from_start), chunks.per_token(decays.to_end)
            arriving = (grad_y * from_start).flatten(2)
            read = (chunks.queries @ matrices).view(grad_y.shape)
            grad_sums = grad_sums + (arriving.view(grad_y.shape) * read).sum(dim=-1)
            grad_queries = grad_scores @ chunks.keys + arriving @ matrices.mT

            # The recurrence over chunks, backwards: the gradient of the state after each.
            added = chunks.as_states(chunks.queries.mT @ arriving)
            after = torch.empty_like(added)
            current = chunks.grouped(grad_outputs[1])
            for number in range(chunks.n_chunks - 1, -1, -1):
                after[:, number] = current
                current = current * decays.whole[:, number, :, None, :, None] + added[:, number]

            # Writing to the state after the chunk.
            grad_after = chunks.per_chunk(after)
            written = chunks.values * to_end
            from_state = (chunks.keys @ grad_after).view(grad_y.shape) * to_end
            grad_values = grad_values + from_state
            grad_keys = grad_scores.mT @ chunks.queries + written.flatten(2) @ grad_after.mT
            by_end = (chunks.values * from_state).sum(dim=-1).to(chunks.wide)
            grad_sums = (grad_sums - by_end).to(chunks.wide)
            # The last sum of a chunk is in the decays to its end, and in that of the whole chunk.
            by_whole = (states * after).sum(dim=(3, 5)).flatten(0, 2) * decays.whole.flatten(0, 2)
            grad_sums[:, -1] += by_end.sum(dim=1) + by_whole
            # Each log decay is a part of all sums from its token to the end of the chunk.
            grad_log_decay = grad_sums.flip(1).cumsum(dim=1).flip(1)
        return (
            chunks.in_order(grad_queries),
            chunks.in_order(grad_keys),
            chunks.in_order(grad_values).flatten(2, 3),
            chunks.in_order(grad_log_decay).flatten(2, 3),
            chunks.ungrouped(current),
            None,
            None,
            None,
        )


def _decays_of(chunks: _Chunks, documents: Tensor | None, document_before: Tensor | None) -> Decays:
    by_chunk = None if documents is None else documents.unflatten(1, (chunks.n_chunks, chunks.chunk))
    return chunk_decays(chunks.log_decay, by_chunk, document_before)


def scan_step(
    queries: Float[Tensor, "batch groups state_size"],
    keys: Float[Tensor, "batch groups state_size"],
    values: Float[Tensor, "batch heads head_dim"],
    log_decay: Float[Tensor, "batch heads"],
    state: State,
) -> tuple[Float[Tensor, "batch heads head_dim"], State]:
    """One token of the recurrence: its output, and the state after it."""
    heads = values.shape[1]
    queries, keys = (each.repeat_interleave(heads // each.shape[1], dim=1).to(state.dtype) for each in (queries, keys))
    state = log_decay.exp()[..., None, None] * state + keys[..., None] * values[:, :, None].to(state.dtype)
    return (queries[:, :, None] @ state)[:, :, 0].to(values.dtype), state
