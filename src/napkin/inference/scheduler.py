"""The engine's schedule, without a model: the order of requests, and their blocks of the KV cache.

A step computes one token of every sequence whose prompt is done, together, and beside them a chunk of prompts of at
most `prefill_chunk` tokens (Yu et al. 2022, "Orca"; Agrawal et al. 2023, "SARATHI"):

    waiting --admit: blocks for all its tokens and one more, shared prefixes first--> running
    running --passes: a token of each that decodes, then chunks of prompts; advance--> running
    running --no block is free: who came last gives back its own (preemption)-------> waiting
    running --finish----------------------------------------------------------------> its blocks are free

Who came first is served first, and no request is lost. Numbers alone are handled here, so that the engine runs this
schedule with a model and a plan simulates it with seconds (`napkin.planning.services.this_machine`).
"""

import hashlib
import itertools
import math
import random
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

from napkin.errors import NapkinError

Digest = bytes
FIRST: Digest = b""
"""The digest before the first block."""


def refuse_unclear_load(concurrency: float | None, rate: float | None) -> None:
    """Raise NapkinError unless a load has either requests in flight or a finite rate of requests per second."""
    if (concurrency is None) == (rate is None):
        raise NapkinError("a load has a concurrency or a rate: give one of them")
    if rate is not None and not 0 < rate < math.inf:
        raise NapkinError(f"rate is {rate}: use a finite number of requests per second above 0")


def random_arrivals(draw: random.Random, rate: float, requests: int) -> list[float]:
    """Return the seconds at which requests come at random moments, `rate` per second (a Poisson process)."""
    return list(itertools.accumulate(draw.expovariate(rate) for _ in range(requests)))


@dataclass(eq=False)
class ScheduledSequence:
    """A prompt with the tokens drawn so far: how many are computed, and in which blocks their keys and values are."""

    number: int
    """Position in the order of arrival."""
    tokens: list[int]
    """The prompt and what was drawn."""
    n_prompt: int
    max_new_tokens: int
    shares: bool = True
    """Whether it may use blocks that other sequences have computed; not if each of its prompt tokens is to be
    scored."""
    n_computed: int = field(default=0, init=False)
    """Tokens whose keys and values are in the cache."""
    table: list[int] = field(default_factory=list, init=False)
    """Its blocks, in order."""
    digests: list[Digest] = field(default_factory=list, init=False)
    """Names of those of its blocks that are full."""
    running: bool = field(default=False, init=False)
    n_speculative: int = field(default=0, init=False)
    """Tokens beyond the next that its next pass is to test; a pass lowers it to those that have room."""

    @property
    def decodes(self) -> bool:
        """True once all but the newest token is computed."""
        return self.n_computed == len(self.tokens) - 1 and self.n_computed >= self.n_prompt

    @property
    def wants_more(self) -> bool:
        """True while more tokens are to be drawn."""
        return len(self.tokens) - self.n_prompt < self.max_new_tokens


S = TypeVar("S", bound=ScheduledSequence)


@dataclass(frozen=True)
class Pass(Generic[S]):
    """Sequences whose next `n_new` tokens go through the model together."""

    sequences: list[S]
    n_new: int
    firsts: Sequence[int]
    """For each sequence the place of the first that is equal to it: only that one need be computed."""


class Scheduler(Generic[S]):
    """Sequences that wait or run, and the pool of their blocks.

    Args:
        n_blocks: blocks of the KV cache.
        block_size: tokens of a block.
        max_running: sequences that are computed at a time.
        prefill_chunk: prompt tokens of a step, rounded up to whole blocks.
        batch_invariant: each sequence in a pass of its own, its prompt in chunks that begin at multiples of
            `prefill_chunk`, whatever else is running.
        prompts_together: chunks of one length in one pass, and equal prompts once.
        shares_prefixes: whether a sequence uses the blocks of another with the same first tokens. Not where layers
            carry a state, which is that after a sequence's last token and not that after a prefix.
    """

    def __init__(
        self,
        n_blocks: int,
        *,
        block_size: int = 16,
        max_running: int = 16,
        prefill_chunk: int = 512,
        batch_invariant: bool = False,
        prompts_together: bool = False,
        shares_prefixes: bool = True,
    ) -> None:
        self.pool = BlockPool(n_blocks, block_size)
        self.shares_prefixes = shares_prefixes
        self.max_running = max_running
        # Blocks that are shared in batch-invariant mode end where chunks do.
        self.prefill_chunk = -(-prefill_chunk // block_size) * block_size
        self.batch_invariant = batch_invariant
        self.prompts_together = prompts_together and not batch_invariant
        self.waiting: list[S] = []
        self.running: list[S] = []
        self.preempted = 0
        """How often a sequence gave its blocks back, to be computed again."""

    def add(self, sequence: S) -> None:
        """Append a sequence to the queue."""
        self.waiting.append(sequence)

    def admit(self) -> list[S]:
        """Start those that wait, first come first, while there are blocks for all of their tokens and one more."""
        started: list[S] = []
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            self._share_prefix(sequence)
            most = min(len(sequence.tokens) + 1, sequence.n_prompt + sequence.max_new_tokens)
            if -(-most // self.pool.block_size) - len(sequence.table) > self.pool.n_free:
                self._release(sequence)
                break
            del self.waiting[0]
            insort(self.running, sequence, key=lambda each: each.number)
            sequence.running = True
            started.append(sequence)
        return started

    def passes(self) -> Iterator[Pass[S]]:
        """Yield the passes of a step, one at a time, each with its blocks: call `advance` or `finish` for its sequences
        before the next is asked for."""
        decoding = [each for each in self.running if each.decodes]
        prefilling = [each for each in self.running if not each.decodes]
        for batch in [[each] for each in decoding] if self.batch_invariant else [decoding]:
            yield from self._with_room(batch, 1, together=False)
        for n_new, batch in self._chunks([each for each in prefilling if each.running]):
            yield from self._with_room(batch, n_new, together=self.prompts_together)

    def advance(self, sequence: S, n_new: int) -> None:
        """Record that a sequence's next tokens are computed: others may now find the blocks that became full. Blocks of
        rejected tokens are released."""
        sequence.n_computed += n_new
        sequence.n_speculative = 0
        size = self.pool.block_size
        while len(sequence.table) > -(-sequence.n_computed // size):
            self.pool.release(sequence.table.pop())
        full = sequence.n_computed // size if self.shares_prefixes else 0
        if self.batch_invariant:
            full = min(full, sequence.n_prompt // self.prefill_chunk * self.prefill_chunk // size)
        for number in range(len(sequence.digests), full):
            before = sequence.digests[-1] if sequence.digests else FIRST
            sequence.digests.append(digest_of(before, sequence.tokens[number * size : (number + 1) * size]))
            self.pool.name(sequence.table[number], sequence.digests[-1])

    def finish(self, sequence: S) -> None:
        """Forget a sequence, waiting or running, and take its blocks back."""
        (self.running if sequence.running else self.waiting).remove(sequence)
        self._release(sequence)

    def clear(self) -> None:
        """Forget all sequences and what the blocks hold."""
        self.waiting, self.running = [], []
        self.pool = BlockPool(self.pool.n_blocks, self.pool.block_size)

    def _share_prefix(self, sequence: S) -> None:
        """Use blocks that hold its first tokens; the last token is computed, since its logits are needed."""
        if not sequence.shares or not self.shares_prefixes:
            return
        size, most = self.pool.block_size, len(sequence.tokens) - 1
        # Alone, the chunks of the prompt must be those that a sequence without a shared prefix has, and what it has
        # drawn itself is computed token by token: another prompt with the same tokens was computed in chunks.
        step = self.prefill_chunk if self.batch_invariant else size
        if self.batch_invariant:
            most = min(most, sequence.n_prompt)
        shared: list[tuple[int, Digest]] = []
        before = FIRST
        for start in range(0, most // size * size, size):
            before = digest_of(before, sequence.tokens[start : start + size])
            block = self.pool.share(before)
            if block is None:
                break
            shared.append((block, before))
        n_used = len(shared) * size // step * step // size
        for block, _ in reversed(shared[n_used:]):
            self.pool.release(block)
        sequence.table = [block for block, _ in shared[:n_used]]
        sequence.digests = [digest for _, digest in shared[:n_used]]
        sequence.n_computed = n_used * size

    def _chunks(self, sequences: Sequence[S]) -> list[tuple[int, list[S]]]:
        """Return the next chunks of prompts, those that are computed together in one list."""
        chunks: list[tuple[int, list[S]]] = []
        by_length: dict[int, list[S]] = {}
        firsts = firsts_of_equals(sequences) if self.prompts_together else range(len(sequences))
        taken: dict[int, int] = {}
        budget = self.prefill_chunk
        for sequence, first in zip(sequences, firsts, strict=True):
            if first not in taken:
                if budget <= 0:
                    break
                taken[first] = self._n_next(sequence, budget)
                budget -= taken[first]
            n_new = taken[first]
            if n_new in by_length and self.prompts_together:
                by_length[n_new].append(sequence)
            else:
                by_length[n_new] = [sequence]
                chunks.append((n_new, by_length[n_new]))
        return chunks

    def _n_next(self, sequence: S, budget: int) -> int:
        """Tokens of a sequence that is not decoding to be computed next."""
        if not self.batch_invariant:
            return min(budget, len(sequence.tokens) - sequence.n_computed)
        if sequence.n_computed >= sequence.n_prompt:
            return 1
        to_end_of_chunk = self.prefill_chunk - sequence.n_computed % self.prefill_chunk
        return min(to_end_of_chunk, sequence.n_prompt - sequence.n_computed)

    def _with_room(self, batch: list[S], n_new: int, *, together: bool) -> Iterator[Pass[S]]:
        """A pass over those of a batch that have blocks for their new tokens."""
        ready = [each for each in batch if each.running and self._make_room(each, n_new)]
        # Making room for a later sequence may have taken the blocks of one before it.
        ready = [each for each in ready if each.running]
        for each in ready:
            self._make_speculative_room(each, n_new)
        if ready:
            yield Pass(ready, n_new, firsts_of_equals(ready) if together else range(len(ready)))

    def _make_room(self, sequence: S, n_new: int) -> bool:
        """Take blocks for new tokens; where there are none, from the sequence that came last. False if that is it."""
        needed = -(-(sequence.n_computed + n_new) // self.pool.block_size)
        while len(sequence.table) < needed:
            block = self.pool.take()
            if block is not None:
                sequence.table.append(block)
                continue
            last = self.running.pop()
            self._release(last)
            insort(self.waiting, last, key=lambda each: each.number)
            self.preempted += 1
            if last is sequence:
                return False
        return True

    def _make_speculative_room(self, sequence: S, n_new: int) -> None:
        """Take blocks for proposed tokens, as far as there are free ones; nothing is preempted."""
        size, needed = self.pool.block_size, sequence.n_computed + n_new + sequence.n_speculative
        while len(sequence.table) * size < needed and (block := self.pool.take()) is not None:
            sequence.table.append(block)
        sequence.n_speculative = min(sequence.n_speculative, len(sequence.table) * size - sequence.n_computed - n_new)

    def _release(self, sequence: S) -> None:
        """Give its blocks back, the last first: a prefix is more use than what follows it."""
        for block in reversed(sequence.table):
            self.pool.release(block)
        sequence.table, sequence.digests, sequence.n_computed = [], [], 0
        sequence.running, sequence.n_speculative = False, 0


def firsts_of_equals(sequences: Sequence[ScheduledSequence]) -> list[int]:
    """For each sequence the place of the first that has the same tokens, as many of them computed.

    >>> firsts_of_equals([ScheduledSequence(0, prompt, len(prompt), 1) for prompt in ([1, 2], [3], [1, 2])])
    [0, 1, 0]
    """
    places: dict[tuple[int, ...], int] = {}
    return [places.setdefault((each.n_computed, *each.tokens), place) for place, each in enumerate(sequences)]


class BlockPool:
    """A fixed number of blocks, each used by any number of sequences: who uses them, and which prefix each holds.

    A block holds the keys and values of `block_size` tokens that follow each other. A full block is known by the digest
    of its tokens and of all before them, so equal prefixes find each other's blocks (Kwon et al. 2023, "Efficient
    Memory Management for Large Language Model Serving with PagedAttention"). A block that nobody uses stays until its
    place is needed, least recently used first.
    """

    def __init__(self, n_blocks: int, block_size: int) -> None:
        self.n_blocks, self.block_size = n_blocks, block_size
        self._users = [0] * n_blocks
        self._empty = list(range(n_blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Blocks without users that hold a known prefix, least recently used first."""
        self._by_digest: dict[Digest, int] = {}
        self._digests: dict[int, Digest] = {}

    @property
    def n_free(self) -> int:
        """Blocks that can be taken: empty ones, and those with a prefix that is not in use."""
        return len(self._empty) + len(self._unused)

    def known(self) -> list[tuple[int, Digest]]:
        """The blocks that hold known prefixes, those of least recent use first and those in use last."""
        used = [block for block in self._digests if block not in self._unused]
        return [(block, self._digests[block]) for block in (*self._unused, *used)]

    def take(self) -> int | None:
        """A block for new tokens; None if all are in use."""
        if self._empty:
            block = self._empty.pop()
        elif self._unused:
            block, _ = self._unused.popitem(last=False)
            del self._by_digest[self._digests.pop(block)]
        else:
            return None
        self._users[block] = 1
        return block

    def share(self, digest: Digest) -> int | None:
        """The block that holds a prefix, with one user more; None if there is none."""
        block = self._by_digest.get(digest)
        if block is not None:
            self._unused.pop(block, None)
            self._users[block] += 1
        return block

    def name(self, block: int, digest: Digest) -> None:
        """Say what a full block holds. A prefix that is known already keeps its block."""
        if digest not in self._by_digest and block not in self._digests:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def release(self, block: int) -> None:
        """Remove one user of a block."""
        self._users[block] -= 1
        if self._users[block] == 0:
            if block in self._digests:
                self._unused[block] = None
            else:
                self._empty.append(block)


def digest_of(before: Digest, tokens: Sequence[int]) -> Digest:
    """The name of a block: a digest of its tokens and, through `before`, of all before them."""
    return hashlib.blake2b(before + np.asarray(tokens, dtype=np.int64).tobytes(), digest_size=16).digest()
