"""Ring attention: causal attention over sequences that the ranks of a ring split (Liu et al. 2023).

With n ranks a sequence is cut into 2 · n chunks; rank i has the queries, keys and values of chunks i and 2n - 1 - i, so
that all have equally many pairs to compute (Grattafiori et al. 2024, section 3.3.2). Keys and values go around the
ring: while a rank attends to those of one rank it receives those of the next. Of the pairs with another rank's keys it
computes half: if that rank is earlier, all queries see its first chunk; if it is later, the queries of the second chunk
see both.

The results o of two sets of keys, whose scores have the logsumexps l, are merged with l₁₂ = log(exp l₁ + exp l₂) as
o₁ · exp(l₁ - l₁₂) + o₂ · exp(l₂ - l₁₂). In the backward pass each set of keys needs only the merged result and
logsumexp (Dao et al. 2022, section 3.1 and appendix B); the gradients of keys and values travel with them.

A block of pairs is attended to in a form whose results can be merged, with the logsumexp of the scores: by fused
operators where a device has one and nothing but the causal mask is to be added to the scores; else by matrix products,
which hold the scores of the block.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from einops import repeat
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.operators import in_autocast_dtype, operator

Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
Mask = Float[Tensor, "*#batch_and_heads query all_keys"]
BlockMask = Float[Tensor, "*#batch_and_heads query key"]
Logsumexp = Float[Tensor, "batch heads query"]

_FLASH_WIDTH = 8
_HALF = (torch.float16, torch.bfloat16)
_ROWS = 32
"""The memory-efficient kernel's logsumexp has a multiple of so many rows; what is beyond the queries is infinite."""


def ring_attention(
    queries: Queries,
    keys: Keys,
    values: Keys,
    mask: Mask | None,
    scale: float,
    *,
    group: str,
    ranks: int,
    softcap: float = 0.0,
) -> Queries:
    """Attention of this rank's queries to the keys of all ranks of a process group; a collective of its ranks.

    `group` is the group's name, and `ranks` how many it has. `mask` is added to the scores, of the keys of rank 0, then
    of rank 1, and so on; None is causal. Scores are bounded by `softcap` unless it is 0. Under autocast the products
    are in autocast's dtype.
    """
    device_type, head_dim = queries.device.type, queries.shape[-1]
    queries, keys, values = in_autocast_dtype(queries, keys, values)
    if device_type != "cpu" and head_dim % _FLASH_WIDTH:
        # The kernels for GPUs read so many numbers at once; zeros change no product.
        more = -head_dim % _FLASH_WIDTH
        queries, keys, values = (F.pad(each, (0, more)) for each in (queries, keys, values))
    mixed, _ = _forward(queries, keys, values, mask, scale, softcap, group, ranks)
    return mixed[..., :head_dim]


@runtime_checkable
class Ring(Protocol):
    """Ranks in a circle, each of which sends to the next and receives from the one before."""

    rank: int
    size: int

    def pass_on(self, sent: Tensor) -> Callable[[], Tensor]:
        """Begin to send a tensor to the next rank; the result waits for the one that the rank before has sent."""
        ...


class GroupRing:
    """The ranks of a process group, in their order."""

    def __init__(self, group: str) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import _resolve_process_group

        self.group = _resolve_process_group(group)  # pyright: ignore[reportArgumentType]
        self.rank, self.size = self.group.rank(), self.group.size()
        self.after = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        self.before = dist.get_global_rank(self.group, (self.rank - 1) % self.size)

    def pass_on(self, sent: Tensor) -> Callable[[], Tensor]:
        """Send and receive at the same time, while the device computes."""
        import torch.distributed as dist

        received = torch.empty_like(sent)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, self.after, self.group),
                dist.P2POp(dist.irecv, received, self.before, self.group),
            ]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return received

        return wait


def forward_around(
    ring: Ring, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """The result [batch, head, query, head_dim] in fp32 or wider, and the logsumexp [batch, head, query] of scores."""
    visiting = torch.stack((keys, values))
    mixed = logsumexp = queries.new_empty(0)
    for source in _sources(ring):
        coming = ring.pass_on(visiting) if source != (ring.rank + 1) % ring.size else None
        seeing, seen = _needed(ring, source, queries.shape[-2])
        near, part = visiting[..., seen, :], _part(ring, mask, source)
        one, its_logsumexp = attend(
            queries[..., seeing, :], near[0], near[1], part, scale, softcap, causal=source == ring.rank
        )
        if source == ring.rank:
            mixed, logsumexp = one.to(its_logsumexp.dtype), its_logsumexp
        else:
            _merge(mixed[..., seeing, :], logsumexp[..., seeing], one, its_logsumexp)
        visiting = visiting if coming is None else coming()
    return mixed, logsumexp


def _merge(mixed: Tensor, logsumexp: Tensor, more: Tensor, its_logsumexp: Tensor) -> None:
    both = torch.logaddexp(logsumexp, its_logsumexp)
    mixed.mul_((logsumexp - both).exp_()[..., None])
    mixed.add_(more * (its_logsumexp - both).exp_()[..., None])
    logsumexp.copy_(both)


def backward_around(
    ring: Ring,
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    mixed: Tensor,
    logsumexp: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's queries, and of its keys and values, stacked; in fp32 or wider."""
    visiting = torch.stack((keys, values))
    grad_queries = torch.zeros_like(queries, dtype=logsumexp.dtype)
    returned: Callable[[], Tensor] | None = None
    for source in _sources(ring):
        coming = ring.pass_on(visiting) if source != (ring.rank + 1) % ring.size else None
        seeing, seen = _needed(ring, source, queries.shape[-2])
        near, part = visiting[..., seen, :], _part(ring, mask, source)
        grads = attend_backward(
            gradient[..., seeing, :],
            queries[..., seeing, :],
            near[0],
            near[1],
            part,
            mixed[..., seeing, :],
            logsumexp[..., seeing].contiguous(),
            scale,
            softcap,
            causal=source == ring.rank,
        )
        grad_queries[..., seeing, :] += grads[0]
        # The gradients that other ranks have summed for these keys and values arrive while this rank computes its own.
        total = torch.zeros_like(visiting, dtype=logsumexp.dtype) if returned is None else returned()
        total[..., seen, :] += torch.stack(grads[1:])
        returned = ring.pass_on(total)
        visiting = visiting if coming is None else coming()
    assert returned is not None
    return grad_queries, returned()


def _sources(ring: Ring) -> list[int]:
    """The ranks whose keys this rank holds, in turn."""
    return [(ring.rank - step) % ring.size for step in range(ring.size)]


def _needed(ring: Ring, source: int, length: int) -> tuple[slice, slice]:
    """The range of this rank's queries that see keys of rank `source`, and the range of these keys."""
    everything, half = slice(0, length), length // 2
    if source == ring.rank:
        return everything, everything
    return (everything, slice(0, half)) if source < ring.rank else (slice(half, length), everything)


def _part(ring: Ring, mask: Tensor | None, source: int) -> Tensor | None:
    """The mask that is added to the scores of the needed pairs with keys of rank `source`."""
    if mask is None:
        return None
    length = mask.shape[-2]
    seeing, seen = _needed(ring, source, length)
    return mask[..., source * length : (source + 1) * length][..., seeing, seen]


def attend(
    queries: Queries, keys: Keys, values: Keys, mask: BlockMask | None, scale: float, softcap: float, *, causal: bool
) -> tuple[Queries, Logsumexp]:
    """The mixed values, and the logsumexp of each query's scores, in fp32 or wider: -infinity where it sees no key.

    `causal` only counts without a mask; then there are as many keys as queries. Scores are bounded by `softcap` unless
    it is 0.
    """
    if mask is not None or softcap:
        return _attend_by_products(queries, keys, values, _with_causal(mask, queries, causal=causal), scale, softcap)
    aten = torch.ops.aten
    if not queries.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(queries, keys, values, 0.0, causal, scale=scale)
    if queries.dtype in _HALF:
        return aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, causal, scale=scale)[:2]
    keys, values = _repeated(queries, keys), _repeated(queries, values)
    mixed, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
        queries, keys, values, None, True, 0.0, causal, scale=scale
    )
    return mixed, logsumexp[..., : queries.shape[-2]]


def attend_backward(
    gradient: Queries,
    queries: Queries,
    keys: Keys,
    values: Keys,
    mask: BlockMask | None,
    mixed: Queries,
    logsumexp: Logsumexp,
    scale: float,
    softcap: float,
    *,
    causal: bool,
) -> tuple[Queries, Keys, Keys]:
    """The gradients of queries, keys and values by this block; `mixed` and `logsumexp` are those of all keys."""
    if mask is not None or softcap:
        mask = _with_causal(mask, queries, causal=causal)
        return _products_backward(gradient, queries, keys, values, mask, mixed, logsumexp, scale, softcap)
    aten = torch.ops.aten
    if not queries.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, queries, keys, values, mixed, logsumexp, 0.0, causal, scale=scale
        )
    if queries.dtype in _HALF:
        # Without dropout the state of the random generator is not read.
        state = torch.zeros(2, dtype=torch.uint64, device=queries.device)
        lengths = None, None, queries.shape[-2], keys.shape[-2]
        return aten._scaled_dot_product_flash_attention_backward(
            gradient, queries, keys, values, mixed, logsumexp, *lengths, 0.0, causal, state, state[1], scale=scale
        )
    logsumexp = F.pad(logsumexp, (0, -logsumexp.shape[-1] % _ROWS), value=float("inf"))
    state = torch.zeros((), dtype=torch.int64, device=queries.device)
    wanted = [True, True, True, False]
    repeated = _repeated(queries, keys), _repeated(queries, values)
    grad_queries, grad_keys, grad_values, _ = aten._scaled_dot_product_efficient_attention_backward(
        gradient, queries, *repeated, None, mixed, logsumexp, state, state, 0.0, wanted, causal, scale=scale
    )
    return grad_queries, _summed(grad_keys, keys), _summed(grad_values, values)


def _attend_by_products(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(queries, keys, mask, scale, softcap)
    logsumexp = scores.logsumexp(dim=-1)
    # Where a query sees no key, its weights are 0, not NaN.
    weights = (scores - logsumexp.masked_fill(logsumexp.isneginf(), 0.0)[..., None]).exp_()
    return weights.to(queries.dtype) @ _repeated(queries, values), logsumexp


def _products_backward(
    gradient: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    mixed: Tensor,
    logsumexp: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    scores = _scores(queries, keys, None, scale, softcap)
    masked = scores if mask is None else scores + mask
    weights = (masked - logsumexp[..., None]).exp_()
    grad_values = weights.to(queries.dtype).mT @ gradient
    grad_weights = (gradient @ _repeated(queries, values).mT).to(weights.dtype)
    grad_scores = weights * (grad_weights - (gradient * mixed).sum(dim=-1, keepdim=True, dtype=weights.dtype))
    if softcap:
        grad_scores *= 1 - (scores / softcap).square_()
    grad_scores = (grad_scores * scale).to(queries.dtype)
    grad_keys = grad_scores.mT @ queries
    return grad_scores @ _repeated(queries, keys), _summed(grad_keys, keys), _summed(grad_values, values)


def _scores(queries: Tensor, keys: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    scores = (queries @ _repeated(queries, keys).mT).to(torch.promote_types(queries.dtype, torch.float32)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return scores if mask is None else scores + mask


def _with_causal(mask: Tensor | None, queries: Tensor, *, causal: bool) -> Tensor | None:
    if mask is not None or not causal:
        return mask
    length = queries.shape[-2]
    hidden = torch.full((length, length), float("-inf"), device=queries.device)
    return hidden.triu_(1)


def _repeated(queries: Tensor, keys: Tensor) -> Tensor:
    """The keys that each query head reads, one by one."""
    group = queries.shape[1] // keys.shape[1]
    return keys if group == 1 else repeat(keys, "b h t c -> b (h group) t c", group=group)


def _summed(gradient: Tensor, keys: Tensor) -> Tensor:
    """Sum over the query heads that read the same keys."""
    return gradient.unflatten(1, (keys.shape[1], -1)).sum(dim=2)


def _by_position(heads: Tensor) -> Tensor:
    """The heads in the order in which the next layer reads them, as the fused operators return them."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


@operator(
    "ring_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, float softcap, str group, "
    "int ranks) -> (Tensor, Tensor)",
    fake=lambda query, *others: (
        _by_position(torch.empty_like(query)),
        query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32)),
    ),
)
def _forward(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *inputs, group, _ = others
    mixed, logsumexp = forward_around(GroupRing(group), query, *inputs)
    return _by_position(mixed.to(query.dtype)), logsumexp.contiguous()


@operator(
    "ring_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor mixed, "
    "Tensor logsumexp, float scale, float softcap, str group, int ranks) -> (Tensor, Tensor)",
    fake=lambda gradient, query, key, *others: (
        _by_position(torch.empty_like(query)),
        key.new_empty((2, *key.shape)),
    ),
)
def _backward(gradient: Tensor, query: Tensor, key: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *inputs, group, _ = others
    grad_query, grad_key_value = backward_around(GroupRing(group), gradient, query, key, *inputs)
    return _by_position(grad_query.to(query.dtype)), grad_key_value.to(key.dtype)


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    queries, keys, values, mask, *ctx.settings = inputs
    ctx.save_for_backward(queries, keys, values, mask, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grad_queries, others = _backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return grad_queries, *others, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
