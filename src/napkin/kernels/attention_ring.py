"""Ring attention: causal attention over sequences that the ranks of a ring split (Liu et al. 2023).

With n ranks a sequence is cut into 2 · n chunks; rank i has the queries, keys and values of chunks i and 2n - 1 - i, so
that all have equally many pairs to compute (Grattafiori et al. 2024, section 3.3.2). Keys and values go around the
ring: while a rank attends to those of one rank it receives those of the next. Of the pairs with another rank's keys it
computes half: if that rank is earlier, all queries see its first chunk; if it is later, the queries of the second chunk
see both.

The results o of two sets of keys, whose scores have the logsumexps l, are merged with l₁₂ = log(exp l₁ + exp l₂) as
o₁ · exp(l₁ - l₁₂) + o₂ · exp(l₂ - l₁₂). In the backward pass each set of keys needs only the merged result and
logsumexp (Dao et al. 2022, section 3.1 and appendix B); the gradients of keys and values travel with them.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from napkin.kernels.attention_blocks import attend, attend_backward
from napkin.kernels.autocast import in_autocast_dtype

Queries = Float[Tensor, "batch heads query head_dim"]
Keys = Float[Tensor, "batch kv_heads key head_dim"]
Mask = Float[Tensor, "*#batch_and_heads query all_keys"]
_FLASH_WIDTH = 8


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
    mixed, _ = torch.ops.napkin.ring_attention(queries, keys, values, mask, scale, softcap, group, ranks)
    return mixed[..., :head_dim]


@runtime_checkable
class Ring(Protocol):
    """Ranks in a circle."""

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
        """Sent and received at the same time, and while the device computes."""
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
        # What the other ranks have added up for these keys and values arrives while this rank's is computed.
        total = torch.zeros_like(visiting, dtype=logsumexp.dtype) if returned is None else returned()
        total[..., seen, :] += torch.stack(grads[1:])
        returned = ring.pass_on(total)
        visiting = visiting if coming is None else coming()
    assert returned is not None
    return grad_queries, returned()


def _sources(ring: Ring) -> list[int]:
    """Whose keys are here, one after the other."""
    return [(ring.rank - step) % ring.size for step in range(ring.size)]


def _needed(ring: Ring, source: int, length: int) -> tuple[slice, slice]:
    """Which of this rank's queries see which keys of rank `source`."""
    everything, half = slice(0, length), length // 2
    if source == ring.rank:
        return everything, everything
    return (everything, slice(0, half)) if source < ring.rank else (slice(half, length), everything)


def _part(ring: Ring, mask: Tensor | None, source: int) -> Tensor | None:
    """What is added to the scores of the needed pairs with keys of rank `source`."""
    if mask is None:
        return None
    length = mask.shape[-2]
    seeing, seen = _needed(ring, source, length)
    return mask[..., source * length : (source + 1) * length][..., seeing, seen]


@torch.library.custom_op(
    "napkin::ring_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, float softcap, str group, int ranks)"
    " -> (Tensor, Tensor)",
)
def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float, group: str, ranks: int
) -> tuple[Tensor, Tensor]:
    mixed, logsumexp = forward_around(GroupRing(group), query, key, value, mask, scale, softcap)
    return _by_position(mixed.to(query.dtype)), logsumexp.contiguous()


def _by_position(heads: Tensor) -> Tensor:
    """In the order in which the next layer reads it, as the fused operators return it."""
    return heads.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op(
    "napkin::ring_attention_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor mixed, Tensor logsumexp, "
    "float scale, float softcap, str group, int ranks) -> (Tensor, Tensor)",
)
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    mixed: Tensor,
    logsumexp: Tensor,
    scale: float,
    softcap: float,
    group: str,
    ranks: int,
) -> tuple[Tensor, Tensor]:
    ring = GroupRing(group)
    grads = backward_around(ring, gradient, query, key, value, mask, mixed, logsumexp, scale, softcap)
    return _by_position(grads[0].to(query.dtype)), grads[1].to(key.dtype)


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *settings: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return _by_position(torch.empty_like(query)), query.new_empty(query.shape[:-1], dtype=wide)


@_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return _by_position(torch.empty_like(query)), key.new_empty((2, *key.shape))


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    queries, keys, values, mask, *ctx.settings = inputs
    ctx.save_for_backward(queries, keys, values, mask, *output)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    grad_queries, others = torch.ops.napkin.ring_attention_backward(gradient, *ctx.saved_tensors, *ctx.settings)
    return grad_queries, *others, None, None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_save)
