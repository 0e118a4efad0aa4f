"""FlashAttention-2 (Dao 2023): attention that reads the keys block by block and never holds a row of scores.

`forward_reference` and `backward_reference` are the algorithm in torch, one block after another, and what computes on a
CPU; on a GPU the operators `napkin::flash_attention` and its backward pass are Triton kernels
(`napkin.kernels.attention.triton_flash`, `attention_backward`). Kept for the backward pass are queries, keys, values,
the result and, of each row of scores, log(sum(exp(scores))).

A query sees the keys of its own document up to its own position, and of these the last `window`.
"""

from typing import Any

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from napkin.errors import NapkinError
from napkin.kernels.operators import DTYPES, in_autocast_dtype, operator, triton_is_installed

Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
Logsumexp = Float[Tensor, "batch heads query"]
Bounds = Int32[Tensor, "2 batch key"]
"""The positions of the first key of each key's document, and after its last."""

MOST_HEAD_DIM = 256
BLOCK = 128


def flash_attention(
    queries: Queries,
    keys: Keys,
    values: Keys,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    bounds: Bounds | None = None,
    query_offset: int | None = None,
) -> Queries:
    """softmax(softcap(q · kᵀ · scale)) · v over the keys that each query sees.

    Query head h reads key and value head h // (heads / kv_heads). `bounds` keeps packed documents apart, see
    `document_bounds`. Without `is_causal` every query sees every key. A scale of None is 1/sqrt(head_dim); the first
    query stands at position `query_offset` among the keys, None is n_keys - n_queries. Under autocast in autocast's
    dtype.

    Raises NapkinError for shapes that do not fit, for heads wider than 256, and for a window or bounds that are not
    causal.
    """
    settings = {"scale": scale, "is_causal": is_causal, "window": window, "softcap": softcap, "bounds": bounds}
    return flash_attention_with_logsumexp(queries, keys, values, query_offset=query_offset, **settings)[0]


def flash_attention_with_logsumexp(
    queries: Queries,
    keys: Keys,
    values: Keys,
    *,
    scale: float | None = None,
    is_causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    bounds: Bounds | None = None,
    query_offset: int | None = None,
) -> tuple[Queries, Logsumexp]:
    """`flash_attention`, and log(sum(exp(score))) over the keys that each query sees, in fp32 or wider.

    By it attention over parts of the keys can be joined. It has no gradient.
    """
    queries, keys, values = in_autocast_dtype(queries, keys, values)
    offset = keys.shape[2] - queries.shape[2] if query_offset is None else query_offset
    _check(queries, keys, values, is_causal=is_causal, bounded=window is not None or bounds is not None, offset=offset)
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    settings = (bounds, scale, softcap or 0.0, window or 0, is_causal, offset if is_causal else 0)
    return _forward(*map(_rows_together, (queries, keys, values)), *settings)


def document_bounds(documents: Int[Tensor, "batch key"]) -> Bounds:
    """The positions where each token's document, a run of equal ids, begins and where it ends.

    >>> document_bounds(torch.tensor([[0, 0, 2, 2, 2]])).tolist()
    [[[0, 0, 2, 2, 2]], [[2, 2, 5, 5, 5]]]
    """
    length = documents.shape[1]
    places = torch.arange(length, device=documents.device, dtype=torch.int32).expand(documents.shape)
    first = torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    last = first.roll(-1, dims=1)
    starts = places.where(first, 0).cummax(dim=1).values
    ends = (places + 1).where(last, length).flip(1).cummin(dim=1).values.flip(1)
    return torch.stack((starts, ends))


def forward_reference(
    query: Queries,
    key: Keys,
    value: Keys,
    bounds: Bounds | None,
    scale: float,
    softcap: float,
    window: int,
    is_causal: bool,
    query_offset: int,
) -> tuple[Queries, Logsumexp]:
    """Algorithm 1: the mixed values, and the logsumexp of each row of scores, in fp32 or wider.

    A softcap or a window of 0 is none.
    """
    seen = _Seen(query, key, bounds, window, is_causal, query_offset)
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (key.shape[1], -1))  # [batch, kv_heads, group, query, head_dim]
    mixed = torch.empty_like(grouped)
    logsumexp = torch.empty(grouped.shape[:-1], dtype=wide, device=query.device)
    for rows in _blocks(query.shape[2]):
        of_rows = grouped[..., rows, :]
        mixture = torch.zeros_like(of_rows, dtype=wide)
        total = mixture.new_zeros(mixture.shape[:-1])
        largest = torch.full_like(total, float("-inf"))
        for columns in _blocks(key.shape[2]):
            if (mask := seen(rows, columns)) is None:
                continue
            scores, _ = _scores(of_rows, key, columns, mask, scale, softcap)
            larger = torch.maximum(largest, scores.amax(dim=-1))
            # A query that has seen no key yet: -inf - -inf would be NaN.
            shift = larger.masked_fill(larger.isneginf(), 0.0)
            weights, decay = (scores - shift[..., None]).exp(), (largest - shift).exp()
            total = total * decay + weights.sum(dim=-1)
            mixture = mixture * decay[..., None] + weights.to(value.dtype) @ value[:, :, None, columns]
            largest = larger
        mixed[..., rows, :] = (mixture / total[..., None]).to(query.dtype)
        logsumexp[..., rows] = largest + total.log()
    return mixed.flatten(1, 2), logsumexp.flatten(1, 2)


def backward_reference(
    gradient: Queries,
    query: Queries,
    key: Keys,
    value: Keys,
    bounds: Bounds | None,
    mixed: Queries,
    logsumexp: Logsumexp,
    scale: float,
    softcap: float,
    window: int,
    is_causal: bool,
    query_offset: int,
) -> tuple[Queries, Keys, Keys]:
    """Algorithm 2: the gradients of queries, keys and values from recomputed scores.

    The softmax's own gradient needs no row of weights: with D = sum(gradient · mixed), dS = P · (dP - D).
    """
    seen = _Seen(query, key, bounds, window, is_causal, query_offset)
    groups = (key.shape[1], -1)
    grouped, upstream = query.unflatten(1, groups), gradient.unflatten(1, groups)
    products = (gradient.to(logsumexp.dtype) * mixed).sum(dim=-1).unflatten(1, groups)
    logsumexp = logsumexp.unflatten(1, groups)
    grads = [torch.zeros_like(each, dtype=logsumexp.dtype) for each in (grouped, key, value)]
    grad_query, grad_key, grad_value = grads
    for columns in _blocks(key.shape[2]):
        for rows in _blocks(query.shape[2]):
            if (mask := seen(rows, columns)) is None:
                continue
            scores, slopes = _scores(grouped[..., rows, :], key, columns, mask, scale, softcap)
            weights = (scores - logsumexp[..., rows, None]).exp()
            grad_weights = upstream[..., rows, :] @ value[:, :, None, columns].mT
            grad_scores = weights * (grad_weights - products[..., rows, None]) * (1.0 if slopes is None else slopes)
            grad_scores = (grad_scores * scale).to(query.dtype)
            grad_query[..., rows, :] += grad_scores @ key[:, :, None, columns]
            grad_key[:, :, columns] += (grad_scores.mT @ grouped[..., rows, :]).sum(dim=2)
            grad_value[:, :, columns] += (weights.to(query.dtype).mT @ upstream[..., rows, :]).sum(dim=2)
    return grad_query.flatten(1, 2).to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


class _Seen:
    """Decides which pairs of a block of queries and a block of keys count."""

    def __init__(
        self, query: Tensor, key: Tensor, bounds: Tensor | None, window: int, is_causal: bool, offset: int
    ) -> None:
        self.n_keys, self.window, self.is_causal, self.offset = key.shape[2], window, is_causal, offset
        self.positions = torch.arange(offset, offset + query.shape[2], device=query.device)
        self.starts = None if bounds is None else bounds[0][:, self.positions]

    def __call__(self, rows: slice, columns: slice) -> Tensor | None:
        """[batch or 1, 1, 1, query, key]; None if no pair counts."""
        keys = torch.arange(columns.start, min(columns.stop, self.n_keys), device=self.positions.device)
        positions = self.positions[rows, None]
        if not self.is_causal:
            return torch.ones_like(positions + keys, dtype=torch.bool)[None, None, None]
        first, last = self.offset + rows.start, self.offset + rows.stop - 1
        if columns.start > last or (self.window and columns.stop <= first - self.window + 1):
            return None
        seen = (keys <= positions)[None]
        if self.window:
            seen = seen & (keys > positions - self.window)
        if self.starts is not None:
            seen = seen & (keys >= self.starts[:, rows, None])
        return seen[:, None, None]


def _blocks(length: int) -> list[slice]:
    return [slice(start, start + BLOCK) for start in range(0, length, BLOCK)]


def _scores(
    queries: Tensor, key: Tensor, columns: slice, mask: Tensor, scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Scores of one block, -infinity where the mask is False, and the derivative of the soft cap if there is one."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    scores, slopes = (queries @ key[:, :, None, columns].mT).to(wide) * scale, None
    if softcap:
        bounded = torch.tanh(scores / softcap)
        scores, slopes = softcap * bounded, 1 - bounded.square()
    return scores.masked_fill(~mask, float("-inf")), slopes


def _rows_together(tensor: Tensor) -> Tensor:
    """The tensor with the numbers of a row one after another, as the kernels read them."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _check(queries: Tensor, keys: Tensor, values: Tensor, *, is_causal: bool, bounded: bool, offset: int) -> None:
    (batch, heads, n_queries, head_dim), (kv_batch, kv_heads, n_keys, _) = queries.shape, keys.shape
    if batch != kv_batch or heads % kv_heads or head_dim != keys.shape[-1] or keys.shape != values.shape:
        raise NapkinError(
            f"queries of shape {tuple(queries.shape)} do not fit keys of shape {tuple(keys.shape)} and values of shape "
            f"{tuple(values.shape)}: batch and head size have to be equal, and the queries' heads a multiple of the "
            "keys'"
        )
    if head_dim > MOST_HEAD_DIM:
        raise NapkinError(
            f"flash attention takes heads of up to {MOST_HEAD_DIM} numbers, not {head_dim}: use more heads, or "
            'attention = "sdpa"'
        )
    if bounded and not is_causal:
        raise NapkinError("a window and the bounds of documents are those of causal attention: use is_causal=True")
    if is_causal and not 0 <= offset <= n_keys - n_queries:
        raise NapkinError(
            f"{n_queries} queries, the first at position {offset}, and {n_keys} keys: each query sees the key at its "
            f"own position, use a query_offset of 0 to {n_keys - n_queries}"
        )


_SETTINGS = "float scale, float softcap, int window, bool is_causal, int query_offset"


@operator(
    f"flash_attention(Tensor query, Tensor key, Tensor value, Tensor? bounds, {_SETTINGS}) -> (Tensor, Tensor)",
    fake=lambda query, *others: (
        torch.empty_like(query),
        query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32)),
    ),
    triton="attention.triton_flash.attend",
)
def _forward(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    if query.is_cuda and query.dtype in DTYPES and not triton_is_installed():
        raise NapkinError("flash_attention is a Triton kernel and triton is not installed: pip install triton")
    return forward_reference(query, *others)


_backward = operator(
    "flash_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? bounds, Tensor mixed, "
    f"Tensor logsumexp, {_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    fake=lambda gradient, *inputs: tuple(torch.empty_like(each) for each in inputs[:3]),
    triton="attention.triton_flash.attend_backward",
)(backward_reference)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, bounds, *ctx.settings = inputs
    ctx.save_for_backward(query, key, value, bounds, *output)
    # The logsumexp is an auxiliary result, not differentiable.
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if gradient is None:
        return (None,) * 9
    return *_backward(_rows_together(gradient), *ctx.saved_tensors, *ctx.settings), *(None,) * 6


_forward.register_autograd(_differentiate, setup_context=_save)
