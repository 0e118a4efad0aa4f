"""A ring of threads, each with its chunks of the sequence, against attention to the whole of it in fp64."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from napkin.kernels.attention import ring
from napkin.kernels.attention.reference import plain_attention, softcapped_attention
from napkin.kernels.attention.ring import backward_around, forward_around


class ThreadRing:
    """The threads of a process in a circle: what one sends lies in the queue of the next."""

    def __init__(self, rank: int, queues: list[queue.Queue[Tensor]]) -> None:
        self.rank, self.size, self.queues = rank, len(queues), queues

    def pass_on(self, sent: Tensor) -> Callable[[], Tensor]:
        self.queues[(self.rank + 1) % self.size].put(sent.clone())
        return lambda: self.queues[self.rank].get(timeout=60)


def in_ring(size: int, work: Callable[[ThreadRing], Any]) -> list[Any]:
    queues: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadRing(rank, queues)), range(size)))


def places(rank: int, size: int, length: int) -> Tensor:
    """By brute force: the positions whose chunk is `rank` from one end or from the other."""
    chunk = torch.arange(length) * 2 * size // length
    return torch.nonzero((chunk == rank) | (chunk == 2 * size - 1 - rank)).flatten()


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def causal(length: int) -> Tensor:
    return torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)


MASKS: dict[str, Callable[[int], Tensor | None]] = {
    "causal": lambda length: None,
    "window": lambda length: causal(length) + torch.full((length, length), float("-inf")).tril(-5),
    "by head": lambda length: (
        causal(length) - torch.arange(4)[:, None, None] * (torch.arange(length)[:, None] - torch.arange(length)).abs()
    ).expand(2, -1, -1, -1),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("mask", "kv_heads", "softcap", "dtype"),
    [
        ("causal", 4, 0.0, torch.float64),
        ("causal", 2, 0.0, torch.float64),
        ("causal", 1, 0.0, torch.float32),
        ("causal", 2, 1.5, torch.float64),
        ("window", 2, 0.0, torch.float64),
        ("window", 2, 1.5, torch.float64),
        ("by head", 1, 0.0, torch.float64),
    ],
)
def test_a_ring_computes_what_attention_to_the_whole_sequence_does(
    size: int, mask: str, kv_heads: int, softcap: float, dtype: torch.dtype
) -> None:
    length, scale = 16, 0.4
    queries, keys, values = (
        normal(2, heads, length, 6, seed=seed, dtype=dtype) for seed, heads in enumerate((4, kv_heads, kv_heads))
    )
    whole = MASKS[mask](length)
    added = None if whole is None else whole.to(dtype)
    wanted = [each.clone().requires_grad_() for each in (queries, keys, values)]
    q, k, v = wanted
    expected = (
        softcapped_attention(q, k, v, added, scale, softcap) if softcap else plain_attention(q, k, v, added, scale)
    )
    upstream = normal(*expected.shape, seed=9, dtype=dtype)
    expected_grads = torch.autograd.grad(expected, wanted, upstream)
    order = torch.cat([places(rank, size, length) for rank in range(size)])

    def work(ring: ThreadRing) -> tuple[Tensor, ...]:
        own = places(ring.rank, size, length)
        parts = [each[:, :, own] for each in (queries, keys, values)]
        seen = None if added is None else added[..., own, :][..., order]
        q, k, v = parts
        mixed, logsumexp = forward_around(ring, q, k, v, seen, scale, softcap)
        first, others = backward_around(ring, upstream[:, :, own], q, k, v, seen, mixed, logsumexp, scale, softcap)
        return mixed, first, *others

    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for rank, (mixed, *grads) in enumerate(in_ring(size, work)):
        own = places(rank, size, length)
        torch.testing.assert_close(mixed, expected[:, :, own], rtol=0, atol=tolerance)
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, expected_grad[:, :, own], rtol=0, atol=tolerance)


def test_every_rank_of_a_ring_computes_as_many_pairs(monkeypatch: pytest.MonkeyPatch) -> None:

    pairs: dict[int, int] = {}
    attend = ring.attend

    def counting(queries: Tensor, keys: Tensor, *others: Any, causal: bool) -> Any:
        length = queries.shape[2]
        computed = length * (length + 1) // 2 if causal else length * keys.shape[2]
        pairs[threading.get_ident()] = pairs.get(threading.get_ident(), 0) + computed
        return attend(queries, keys, *others, causal=causal)

    monkeypatch.setattr(ring, "attend", counting)
    barrier = threading.Barrier(4)

    def work(ring: ThreadRing) -> None:
        barrier.wait(60)
        part = torch.zeros(1, 1, 16, 4)
        forward_around(ring, part, part, part, None, 1.0, 0.0)

    in_ring(4, work)
    assert list(pairs.values()) == [64 * 65 // 2 // 4] * 4


@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_is_as_torch_expects_of_operators(monkeypatch: pytest.MonkeyPatch, masked: bool) -> None:
    # Its fake results, which are traced and compiled, have the shapes and strides of the real ones.
    monkeypatch.setattr(ring, "GroupRing", lambda group: ThreadRing(0, [queue.Queue()]))
    parts = [normal(2, 8, heads, 6, seed=heads, dtype=torch.float32).transpose(1, 2) for heads in (4, 2, 2)]
    mask = causal(8).float() if masked else None
    arguments = (*[part.requires_grad_() for part in parts], mask, 0.4, 0.0, "group", 1)
    torch.library.opcheck(torch.ops.napkin.ring_attention.default, arguments)
