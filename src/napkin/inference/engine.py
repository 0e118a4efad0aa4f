"""Many requests at a time: continuous batching over one pool of KV blocks.

Each step computes one token of every sequence whose prompt is done, together, and beside them a chunk of prompts (Yu et
al. 2022, "Orca"; Agrawal et al. 2023, "SARATHI"). Who came first is served first. Where blocks run out, the sequence
that came last gives back its own and is computed again later: no request is lost, and a draw depends on the request's
seed and not on what else is running.

A sequence in an engine: how far it is computed, and in which blocks its keys and values are.

Prompts of one pass that are equal: the first is computed, and the others get copies of its keys and values.
"""

import contextlib
import os
import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from napkin.errors import NapkinError, first_line
from napkin.inference.paged_cache import (
    FIRST,
    BlockPool,
    Digest,
    KVFormat,
    PagedCache,
    bytes_per_token,
    digest_of,
    n_blocks_that_fit,
)
from napkin.inference.request import Completion, Finish, Request
from napkin.inference.sampling import NOT_FINITE, Draw, draw, told_draws
from napkin.model.transformer import Transformer


@dataclass(eq=False)
class EngineSequence:
    """A completion and the blocks that it holds."""

    completion: Completion
    tokens: list[int]
    """The prompt and what was drawn."""
    n_computed: int = 0
    """Tokens whose keys and values are held."""
    table: list[int] = field(default_factory=list)
    digests: list[Digest] = field(default_factory=list)
    """Of its full blocks that are named, in order."""
    running: bool = False
    """Whether it is among those that are computed."""

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end it, besides those of the engine."""
        return frozenset(self.completion.request.sampling.stop_ids)

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.completion.request.prompt)

    @property
    def decodes(self) -> bool:
        """Whether all but the newest token is computed."""
        return self.n_computed == len(self.tokens) - 1 and self.n_computed >= self.n_prompt

    @property
    def shares(self) -> bool:
        """Whether prefixes of others may be used: not by a request that asks what each prompt token scores."""
        return not self.completion.request.prompt_logprobs

    @property
    def wants_more(self) -> bool:
        """Whether more tokens are to be drawn."""
        return len(self.completion.draws) < self.completion.request.max_tokens


def firsts_of_equals(sequences: Sequence[EngineSequence]) -> list[int]:
    """For each sequence the number of the first that has the same tokens, as many of them computed.

    >>> from napkin.inference.request import Completion, Request
    >>> prompts = [[1, 2], [3], [1, 2]]
    >>> firsts_of_equals([EngineSequence(Completion(Request(each, 1), 0), each) for each in prompts])
    [0, 1, 0]
    """
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault((each.n_computed, *each.tokens), number) for number, each in enumerate(sequences)]


def blocks_to_copy(
    sequences: Sequence[EngineSequence], counts: Sequence[int], firsts: Sequence[int], block_size: int
) -> tuple[list[int], list[int]]:
    """The blocks in which a pass over counts[i] tokens of sequence i has written, and the same of those that are equal
    to their sequences."""
    blocks: list[int] = []
    others: list[int] = []
    for number, (sequence, count, first) in enumerate(zip(sequences, counts, firsts, strict=True)):
        if number != first:
            end = sequence.n_computed + count
            written = slice(sequence.n_computed // block_size, -(-end // block_size))
            blocks += sequences[first].table[written]
            others += sequence.table[written]
    return blocks, others


Progress = tuple[Completion, int]
"""A completion that changed, and the index of its first new draw."""

_SHAPE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Two caches of machine code, torch's and oneDNN's, an entry of half a megabyte for each shape of a product in bf16 on
a CPU. The shapes of requests are without number, and each cache would keep 1,024 of them. They read their capacity from
the environment at the first such product of the process."""
_SHAPES_KEPT = 128


@dataclass(frozen=True)
class _Computed:
    """What a pass gave, before any sequence is changed by it."""

    scored: dict[EngineSequence, list[Draw]]
    """Of sequences that want their prompts scored."""
    drawn: dict[EngineSequence, Draw]
    ended: list[EngineSequence]
    """Those that are computed to their end; those without a draw want none."""
    copies: list[EngineSequence]
    """Those whose keys and values are copies of others'."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine is doing, and did since it was made."""

    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    cache_bytes: int
    prompt_tokens: int
    """Of prompts, computed or shared."""
    cached_tokens: int
    """Of these, shared with requests before."""
    generated_tokens: int
    preempted: int
    """How often a sequence gave its blocks back, to be computed again."""
    steps: int
    seconds: float
    """In steps."""


class Engine:
    """Continues requests together. `step` belongs to one thread; `submit` and `cancel` may be called from any.

    Args:
        model: a trained model, in evaluation mode from now on.
        cache_bytes: memory of the pool; None is what `max_running` sequences of the context length need, at most half
            of the free memory.
        max_running: sequences that are computed at a time.
        prefill_chunk: prompt tokens that a step computes beside.
        block_size: tokens of a block.
        stop_ids: ids that end every completion, such as a separator of documents.
        batch_invariant: compute each sequence alone, its prompt in chunks that begin at multiples of `prefill_chunk`:
            ids and log-probabilities are then equal, bit for bit, whatever else is running. The price is that of no
            batches: the weights are read once for each sequence and token.
        kv: what keys and values are held in: "auto" is the weights' number format, "int8" about half the bytes of bf16.
        prompts_together: compute prompts of one length in one pass, as those of a rollout are, and equal ones once. One
            after the other, the first answers of a service begin sooner, as plans of services have it.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        cache_bytes: int | None = None,
        max_running: int = 16,
        prefill_chunk: int = 512,
        block_size: int = 16,
        stop_ids: Iterable[int] = (),
        batch_invariant: bool = False,
        kv: KVFormat = "auto",
        prompts_together: bool = False,
    ) -> None:
        for name, value in (("max_running", max_running), ("prefill_chunk", prefill_chunk), ("block_size", block_size)):
            if value < 1:
                raise NapkinError(f"{name} is {value}: use 1 or more")
        for name in _SHAPE_CACHES:
            os.environ.setdefault(name, str(_SHAPES_KEPT))
        self.model = model.eval()
        self.max_running = max_running
        # Blocks that are shared in batch-invariant mode end where chunks do.
        self.prefill_chunk = -(-prefill_chunk // block_size) * block_size
        self.stop_ids = frozenset(stop_ids)
        self.batch_invariant = batch_invariant
        self.prompts_together = prompts_together and not batch_invariant
        weight = model.head_weight
        self.kv: KVFormat = kv
        each = block_size * bytes_per_token(model.config, weight.dtype, kv)
        self.pool = BlockPool(n_blocks_that_fit(model, each, block_size, max_running, cache_bytes), block_size)
        self.cache = PagedCache(
            model.config, self.pool.n_blocks, block_size, dtype=weight.dtype, device=weight.device, kv=kv
        )
        self._arrived: deque[EngineSequence] = deque()
        self._unwanted: deque[Completion] = deque()
        self._lock = threading.Lock()
        self._submitted = 0
        self._waiting: list[EngineSequence] = []
        self._running: list[EngineSequence] = []
        self._prompt_tokens = self._cached_tokens = self._generated = self._preempted = self._steps = 0
        self._seconds = 0.0

    def submit(self, request: Request) -> Completion:
        """Queue a request. Raises NapkinError for one that can never run."""
        self._refuse_impossible(request)
        with self._lock:
            completion = Completion(request, self._submitted)
            self._submitted += 1
            self._arrived.append(EngineSequence(completion, list(request.prompt)))
        return completion

    def cancel(self, completion: Completion) -> None:
        """End a completion before the next step; one that has ended stays as it is."""
        self._unwanted.append(completion)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._arrived or self._unwanted or self._waiting or self._running)

    def stats(self) -> EngineStats:
        """The figures of now."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting) + len(self._arrived),
            blocks_free=self.pool.n_free,
            blocks_total=self.pool.n_blocks,
            cache_bytes=self.cache.nbytes,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            preempted=self._preempted,
            steps=self._steps,
            seconds=self._seconds,
        )

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.has_work:
            self.step()

    @torch.inference_mode()
    def step(self, *, isolate: bool = False) -> list[Progress]:
        """Compute a token of every running sequence whose prompt is done, and a chunk of prompts; what changed.

        What raises in the model or in a draw is raised here, and leaves all sequences as they were. With `isolate`,
        those that cannot be computed end as "failed" instead, and the others go on.
        """
        begin = time.perf_counter()
        changed = self._take_in()
        self._admit()
        decoding = [sequence for sequence in self._running if sequence.decodes]
        prefilling = [sequence for sequence in self._running if not sequence.decodes]
        for batch in [[each] for each in decoding] if self.batch_invariant else [decoding]:
            changed += self._compute(batch, 1, isolate)
        for n_new, batch in self._chunks([each for each in prefilling if each.running]):
            changed += self._compute(batch, n_new, isolate)
        self._steps += 1
        self._seconds += time.perf_counter() - begin
        return changed

    def fail_all(self, error: BaseException) -> list[Progress]:
        """End as failed all that was submitted before the last step, and empty the cache: after a step that raised."""
        ended: list[Progress] = []
        for sequence in (*self._running, *self._waiting):
            completion = sequence.completion
            completion.failure, completion.finish = first_line(error), "failed"
            completion.finished_at = time.perf_counter()
            ended.append((completion, len(completion.draws)))
        self._running, self._waiting = [], []
        self.pool = BlockPool(self.pool.n_blocks, self.pool.block_size)
        # Where the device itself has failed, every step raises, and says so.
        with contextlib.suppress(Exception):
            self.cache.clear(range(self.pool.n_blocks))
        return ended

    def _refuse_impossible(self, request: Request) -> None:
        config, most = self.model.config, len(request.prompt) + request.max_tokens
        asked = f"a prompt of {len(request.prompt):,} tokens and {request.max_tokens:,} more exceed"
        if most > config.context_length:
            raise NapkinError(
                f"{asked} the model's context of {config.context_length:,}: shorten the prompt, or ask for fewer tokens"
            )
        room = self.pool.n_blocks * self.pool.block_size
        if most > room:
            raise NapkinError(
                f"{asked} the {room:,} of the KV cache: ask for fewer tokens, or start the engine with more cache_bytes"
            )
        named = (*request.prompt, *(token for token, _ in request.sampling.logit_bias))
        if not 0 <= min(named) <= max(named) < config.vocab_size:
            wrong = next(token for token in named if not 0 <= token < config.vocab_size)
            raise NapkinError(f"token {wrong} is not one of the model's: use 0 to {config.vocab_size - 1}")

    def _take_in(self) -> list[Progress]:
        """New requests wait; unwanted ones end."""
        while self._arrived:
            self._waiting.append(self._arrived.popleft())
        changed: list[Progress] = []
        while self._unwanted:
            completion = self._unwanted.popleft()
            found = next((each for each in (*self._running, *self._waiting) if each.completion is completion), None)
            if found is not None:
                if not found.running:
                    self._waiting.remove(found)
                changed.append(self._end(found, "cancelled", len(completion.draws)))
        return changed

    def _admit(self) -> None:
        """Start those that wait, first come first, while there are blocks for all of their tokens and one more."""
        while self._waiting and len(self._running) < self.max_running:
            sequence = self._waiting[0]
            self._share_prefix(sequence)
            most = min(len(sequence.tokens) + 1, sequence.n_prompt + sequence.completion.request.max_tokens)
            if -(-most // self.pool.block_size) - len(sequence.table) > self.pool.n_free:
                self._release(sequence)
                return
            del self._waiting[0]
            insort(self._running, sequence, key=lambda each: each.completion.number)
            sequence.running = True
            completion = sequence.completion
            if not completion.draws:
                completion.cached_tokens = sequence.n_computed
                self._prompt_tokens += sequence.n_prompt
                self._cached_tokens += sequence.n_computed

    def _share_prefix(self, sequence: EngineSequence) -> None:
        """Use blocks that hold its first tokens; the last token is computed, since its logits are needed."""
        if not sequence.shares:
            return
        size, most = self.pool.block_size, len(sequence.tokens) - 1
        # Alone, the chunks of the prompt must be those that a sequence without a shared prefix has, and what it has
        # drawn itself is computed token by token: another prompt with the same tokens was computed in chunks.
        step = self.prefill_chunk if self.batch_invariant else size
        if self.batch_invariant:
            most = min(most, sequence.n_prompt)
        found: list[tuple[int, Digest]] = []
        before = FIRST
        for start in range(0, most // size * size, size):
            before = digest_of(before, sequence.tokens[start : start + size])
            block = self.pool.share(before)
            if block is None:
                break
            found.append((block, before))
        n_used = len(found) * size // step * step // size
        for block, _ in reversed(found[n_used:]):
            self.pool.release(block)
        sequence.table = [block for block, _ in found[:n_used]]
        sequence.digests = [digest for _, digest in found[:n_used]]
        sequence.n_computed = n_used * size

    def _chunks(self, sequences: Sequence[EngineSequence]) -> list[tuple[int, list[EngineSequence]]]:
        """How many tokens of which prompts are computed next, and which of them together."""
        chunks: list[tuple[int, list[EngineSequence]]] = []
        by_length: dict[int, list[EngineSequence]] = {}
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

    def _n_next(self, sequence: EngineSequence, budget: int) -> int:
        """Tokens of a sequence that is not decoding to be computed next."""
        if not self.batch_invariant:
            return min(budget, len(sequence.tokens) - sequence.n_computed)
        if sequence.n_computed >= sequence.n_prompt:
            return 1
        to_end_of_chunk = self.prefill_chunk - sequence.n_computed % self.prefill_chunk
        return min(to_end_of_chunk, sequence.n_prompt - sequence.n_computed)

    def _compute(self, batch: list[EngineSequence], n_new: int, isolate: bool) -> list[Progress]:
        """Pass new tokens of sequences through the model, and draw where a sequence is computed to its end.

        Where that raises, each sequence is computed alone: those for which it raises again fail.
        """
        ready = [each for each in batch if each.running and self._make_room(each, n_new)]
        # Making room for a later sequence may have taken the blocks of one before it.
        ready = [each for each in ready if each.running]
        if not ready:
            return []
        try:
            computed = self._pass(ready, n_new)
        except Exception as error:
            if not isolate:
                raise
            if len(ready) == 1:
                return [self._fail(ready[0], error)]
            return [progress for each in ready for progress in self._compute([each], n_new, isolate)]
        return self._advance(ready, n_new, computed)

    def _pass(self, sequences: Sequence[EngineSequence], n_new: int) -> "_Computed":
        """What the model says of the next n_new tokens of sequences. Only the cache changes: what raises changes
        nothing, since the same places are written again."""
        alike = self.prompts_together and not sequences[0].decodes
        firsts = firsts_of_equals(sequences) if alike else range(len(sequences))
        row_of = {number: row for row, number in enumerate(dict.fromkeys(firsts))}
        computed = [sequences[number] for number in row_of]
        lengths, counts = [each.n_computed for each in computed], [n_new] * len(computed)
        new = [each.tokens[start : start + n_new] for each, start in zip(computed, lengths, strict=True)]
        extending = self.cache.extend([each.table for each in computed], lengths, counts, n_new)
        hidden = self.model.hidden(torch.tensor(new, device=self.cache.device), cache=extending)
        if not bool(hidden.isfinite().all()):
            # Before others may share what these sequences leave in the cache.
            raise NapkinError(NOT_FINITE)
        if len(computed) < len(sequences):
            copied = blocks_to_copy(sequences, [n_new] * len(sequences), firsts, self.pool.block_size)
            self.cache.copy(*copied)
        rows = [row_of[first] for first in firsts]
        scored = {
            sequence: self._scores(sequence, hidden[row])
            for row, sequence in zip(rows, sequences, strict=True)
            if not sequence.shares
        }
        ended = [number for number, each in enumerate(sequences) if each.n_computed + n_new == len(each.tokens)]
        drawing = [number for number in ended if sequences[number].wants_more]
        draws = self._draws([sequences[number] for number in drawing], [hidden[rows[number], -1] for number in drawing])
        drawn = dict(zip((sequences[number] for number in drawing), draws, strict=True))
        copies = [sequences[number] for number, first in enumerate(firsts) if number != first]
        return _Computed(scored, drawn, [sequences[number] for number in ended], copies)

    def _draws(self, sequences: Sequence[EngineSequence], last: Sequence[Tensor]) -> list[Draw]:
        """A token for each sequence, from the hidden state of its last one."""
        if not sequences:
            return []
        states = torch.stack(list(last))
        # One product for each row, where a row's must not depend on how many there are.
        parts = states[:, None] if self.batch_invariant else states[None]
        return draw(
            torch.cat([self.model.logits_of(part) for part in parts]).float(),
            [each.completion.request.sampling for each in sequences],
            [len(each.completion.draws) for each in sequences],
            [each.tokens for each in sequences],
            tell_sampled=any(each.completion.request.sampled_logprobs for each in sequences),
        )

    def _scores(self, sequence: EngineSequence, hidden: Tensor) -> list[Draw]:
        """The log-probabilities of the prompt's tokens that follow those just computed."""
        first = sequence.n_computed + 1
        targets = list(sequence.completion.request.prompt[first : first + len(hidden)])
        if not targets:
            return []
        logits = self.model.logits_of(hidden[: len(targets)]).float()
        if not bool(logits.isfinite().all()):
            raise NapkinError(NOT_FINITE)
        return told_draws(logits, targets, sequence.completion.request.sampling.logprobs or 0)

    def _advance(self, sequences: Sequence[EngineSequence], n_new: int, computed: "_Computed") -> list[Progress]:
        """Take over what a pass has computed; nothing here raises."""
        for sequence in computed.copies:
            if not sequence.completion.draws:
                sequence.completion.cached_tokens += n_new
                self._cached_tokens += n_new
        for sequence, told in computed.scored.items():
            found = sequence.completion.prompt_draws
            # After a preemption the prompt is scored again from its beginning.
            found[:] = [*found[: sequence.n_computed + 1], *told] if sequence.n_computed else [None, *told]
        for sequence in sequences:
            sequence.n_computed += n_new
            self._name_blocks(sequence)
        now = time.perf_counter()
        return [self._ended_or_drawn(each, computed.drawn.get(each), now) for each in computed.ended]

    def _ended_or_drawn(self, sequence: EngineSequence, drawn: Draw | None, now: float) -> Progress:
        """A sequence that is computed to its end gets its next token, unless it wants none."""
        completion, index = sequence.completion, len(sequence.completion.draws)
        if drawn is None:
            return self._end(sequence, "length", 0)
        completion.first_token_at = completion.first_token_at or now
        if drawn.token in self.stop_ids or drawn.token in sequence.stop_ids:
            completion.stop_draw = drawn
            return self._end(sequence, "stop", index)
        completion.draws.append(drawn)
        sequence.tokens.append(drawn.token)
        self._generated += 1
        return (completion, index) if sequence.wants_more else self._end(sequence, "length", index)

    def _make_room(self, sequence: EngineSequence, n_new: int) -> bool:
        """Take blocks for new tokens; where there are none, from the sequence that came last. False if that is it."""
        needed = -(-(sequence.n_computed + n_new) // self.pool.block_size)
        while len(sequence.table) < needed:
            block = self.pool.take()
            if block is not None:
                sequence.table.append(block)
                continue
            last = self._running[-1]
            self._running.remove(last)
            self._release(last)
            insort(self._waiting, last, key=lambda each: each.completion.number)
            self._preempted += 1
            if last is sequence:
                return False
        return True

    def _name_blocks(self, sequence: EngineSequence) -> None:
        """Let others find the blocks that are full."""
        size = self.pool.block_size
        full = sequence.n_computed // size
        if self.batch_invariant:
            full = min(full, sequence.n_prompt // self.prefill_chunk * self.prefill_chunk // size)
        for number in range(len(sequence.digests), full):
            before = sequence.digests[-1] if sequence.digests else FIRST
            sequence.digests.append(digest_of(before, sequence.tokens[number * size : (number + 1) * size]))
            self.pool.name(sequence.table[number], sequence.digests[-1])

    def _release(self, sequence: EngineSequence) -> None:
        """Give its blocks back, the last first: a prefix is more use than what follows it."""
        for block in reversed(sequence.table):
            self.pool.release(block)
        sequence.table, sequence.digests, sequence.n_computed = [], [], 0
        sequence.running = False

    def _fail(self, sequence: EngineSequence, error: Exception) -> Progress:
        """End a sequence that cannot be computed. What it left in its own blocks may be no numbers, which others would
        read: what is hidden from them is multiplied by 0."""
        self.cache.clear(sequence.table[len(sequence.digests) :])
        sequence.completion.failure = first_line(error)
        return self._end(sequence, "failed", len(sequence.completion.draws))

    def _end(self, sequence: EngineSequence, finish: Finish, index: int) -> Progress:
        if sequence.running:
            self._running.remove(sequence)
        self._release(sequence)
        sequence.completion.finished_at = time.perf_counter()
        sequence.completion.finish = finish
        return sequence.completion, index
