"""Many requests at a time: continuous batching over one pool of KV blocks.

`scheduler.py` says which sequences a step computes and in which blocks; here their tokens go through the model, and the
next ones are drawn. A draw depends on the request's seed and not on what else is running.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from napkin.errors import NapkinError, first_line
from napkin.inference.decoding_graphs import DecodingGraphs
from napkin.inference.paged_cache import KVFormat, PagedCache, bytes_per_token, n_blocks_that_fit
from napkin.inference.sampling import NOT_FINITE, Draw, draw, told_draws
from napkin.inference.scheduler import BlockPool, Pass, ScheduledSequence, Scheduler
from napkin.inference.settings import Sampling
from napkin.kernels.operators import is_interpreted
from napkin.model.kernel_forms import use_decoding_kernels
from napkin.model.kv_cache import bucket_of
from napkin.model.transformer import Transformer
from napkin.tensors import sent_to

Finish = Literal["stop", "length", "cancelled", "failed"]
"""A stop id was drawn; as many tokens were drawn as asked for; the rest is not wanted; it cannot be computed."""


@dataclass(frozen=True)
class Request:
    """Token ids to continue, and how."""

    prompt: Sequence[int]
    """At least one."""
    max_new_tokens: int
    """Tokens to draw at most; 0 only scores the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    """Its stop texts are for whoever turns ids into text."""
    prompt_logprobs: bool = False
    """Whether to tell the log-probability of each prompt token after those before it."""
    sampled_logprobs: bool = False
    """Whether to tell the log-probability with which each token was drawn."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise NapkinError("the prompt holds no token: begin with a separator or with text")
        if self.max_new_tokens < 0:
            raise NapkinError(f"max_new_tokens is {self.max_new_tokens}: use 0 or more")


@dataclass(eq=False)
class Completion:
    """A request on its way; only the engine writes to it."""

    request: Request
    number: int
    """In the order of arrival."""
    draws: list[Draw] = field(default_factory=list)
    """The tokens so far, the stop id left out."""
    stop_draw: Draw | None = None
    """The stop id that ended it, if one did."""
    prompt_draws: list[Draw | None] = field(default_factory=list)
    """A draw per prompt token, if they were asked for; None for the first."""
    finish: Finish | None = None
    failure: str | None = None
    """Why it failed, in a line."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values other requests had left."""
    submitted_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def tokens(self) -> list[int]:
        """The ids drawn so far."""
        return [draw.token for draw in self.draws]


@dataclass(eq=False)
class EngineSequence(ScheduledSequence):
    """A completion on its way, as the scheduler sees it."""

    completion: Completion = field(kw_only=True)

    @classmethod
    def of(cls, completion: Completion) -> "EngineSequence":
        """The prompt of a completion that has drawn nothing yet."""
        request = completion.request
        return cls(
            completion.number,
            list(request.prompt),
            len(request.prompt),
            request.max_new_tokens,
            shares=not request.prompt_logprobs,
            completion=completion,
        )

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end it, besides those of the engine."""
        return frozenset(self.completion.request.sampling.stop_ids)


Progress = tuple[Completion, int]
"""A completion that changed, and the index of its first new draw."""

_SHAPE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Two caches of machine code, torch's and oneDNN's, an entry of half a megabyte for each shape of a product in bf16 on
a CPU. The shapes of requests are without number, and each cache would keep 1,024 of them. They read their capacity from
the environment at the first such product of the process."""
_SHAPES_KEPT = 128


@dataclass(frozen=True)
class EngineStats:
    """The present load of an engine, and its work since it was made."""

    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    cache_bytes: int
    prompt_tokens: int
    """Tokens of all prompts, computed or shared."""
    cached_tokens: int
    """Prompt tokens that were shared with earlier requests."""
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
        self.stop_ids = frozenset(stop_ids)
        self.kv: KVFormat = kv
        each = block_size * bytes_per_token(model.config, model.dtype, kv)
        self.scheduler = Scheduler[EngineSequence](
            n_blocks_that_fit(model, each, block_size, max_running, cache_bytes),
            block_size=block_size,
            max_running=max_running,
            prefill_chunk=prefill_chunk,
            batch_invariant=batch_invariant,
            prompts_together=prompts_together,
            shares_prefixes=not model.config.has_states,
        )
        self.cache = PagedCache(
            model.config,
            self.pool.n_blocks,
            block_size,
            dtype=model.dtype,
            device=model.device,
            kv=kv,
            n_states=max_running,
        )
        self._state_slots: dict[EngineSequence, int] = {}
        # Triton's interpreter would take minutes for a text.
        if not torch.is_autocast_enabled(model.device.type) and not is_interpreted():
            use_decoding_kernels(model)
        self.graphs = DecodingGraphs(model, self.cache)
        self._arrived: deque[EngineSequence] = deque()
        self._unwanted: deque[Completion] = deque()
        self._lock = threading.Lock()
        self._submitted = 0
        self._prompt_tokens = self._cached_tokens = self._generated = self._steps = 0
        self._seconds = 0.0

    @property
    def pool(self) -> BlockPool:
        """The blocks of the cache."""
        return self.scheduler.pool

    def submit(self, request: Request) -> Completion:
        """Queue a request. Raises NapkinError for one that can never run."""
        self._refuse_impossible(request)
        with self._lock:
            completion = Completion(request, self._submitted)
            self._submitted += 1
            self._arrived.append(EngineSequence.of(completion))
        return completion

    def cancel(self, completion: Completion) -> None:
        """End a completion before the next step; one that has ended stays as it is."""
        self._unwanted.append(completion)

    @property
    def has_work(self) -> bool:
        """True while a step would do anything."""
        return bool(self._arrived or self._unwanted or self.scheduler.waiting or self.scheduler.running)

    def stats(self) -> EngineStats:
        """The figures of now."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._arrived),
            blocks_free=self.pool.n_free,
            blocks_total=self.pool.n_blocks,
            cache_bytes=self.cache.nbytes,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            preempted=self.scheduler.preempted,
            steps=self._steps,
            seconds=self._seconds,
        )

    def stream(self, request: Request) -> Generator[Draw, None, None]:
        """Yield the draws of a request as they come, a step at a time; where the iterator is closed, it is cancelled.

        Raises NapkinError for a request that can never run.
        """
        completion, n_read = self.submit(request), 0
        try:
            while completion.finish is None:
                self.step()
                new = completion.draws[n_read:]
                n_read += len(new)
                yield from new
        finally:
            if completion.finish is None:
                self.cancel(completion)
                self.run()

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
        for sequence in self.scheduler.admit():
            completion = sequence.completion
            if not completion.draws:
                completion.cached_tokens = sequence.n_computed
                self._prompt_tokens += sequence.n_prompt
                self._cached_tokens += sequence.n_computed
        for each in self.scheduler.passes():
            changed += self._compute(each, isolate)
        self._steps += 1
        self._seconds += time.perf_counter() - begin
        return changed

    def fail_all(self, error: BaseException) -> list[Progress]:
        """End as failed all that was submitted before the last step, and empty the cache: after a step that raised."""
        ended: list[Progress] = []
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            completion = sequence.completion
            completion.failure, completion.finish = first_line(error), "failed"
            completion.finished_at = time.perf_counter()
            ended.append((completion, len(completion.draws)))
        self.scheduler.clear()
        self._state_slots.clear()
        # Where the device itself has failed, every step raises, and says so.
        with contextlib.suppress(Exception):
            self.cache.clear(range(self.pool.n_blocks))
        return ended

    def _refuse_impossible(self, request: Request) -> None:
        config, most = self.model.config, len(request.prompt) + request.max_new_tokens
        asked = f"a prompt of {len(request.prompt):,} tokens and {request.max_new_tokens:,} more exceed"
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
            self.scheduler.add(self._arrived.popleft())
        changed: list[Progress] = []
        while self._unwanted:
            completion = self._unwanted.popleft()
            known = (*self.scheduler.running, *self.scheduler.waiting)
            found = next((each for each in known if each.completion is completion), None)
            if found is not None:
                changed.append(self._end(found, "cancelled", len(completion.draws)))
        return changed

    def _compute(self, work: Pass[EngineSequence], isolate: bool) -> list[Progress]:
        """Pass new tokens of sequences through the model, and draw where a sequence is computed to its end.

        Where that raises, each sequence is computed alone: those for which it raises again fail.
        """
        try:
            scored, drawn = self._pass(work)
        except Exception as error:
            if not isolate:
                raise
            if len(work.sequences) == 1:
                return [self._fail(work.sequences[0], error)]
            alone = [Pass([each], work.n_new, [0]) for each in work.sequences]
            return [progress for each in alone for progress in self._compute(each, isolate)]
        return self._advance(work, scored, drawn)

    def _pass(self, work: Pass[EngineSequence]) -> tuple[dict[EngineSequence, list[Draw]], dict[EngineSequence, Draw]]:
        """What the model says of the next tokens of sequences: scores of prompts that are wanted, and draws where a
        sequence is computed to its end. Only the cache changes: what raises changes nothing, since the same places are
        written again."""
        sequences, n_new, firsts = work.sequences, work.n_new, work.firsts
        if all(each.decodes for each in sequences):
            replayed = self.graphs.step(
                [each.tokens[-1] for each in sequences],
                [each.table for each in sequences],
                [each.n_computed for each in sequences],
            )
            if replayed is not None:
                return {}, dict(zip(sequences, self._draws(sequences, *replayed), strict=True))
        row_of = {place: row for row, place in enumerate(dict.fromkeys(firsts))}
        computed = [sequences[place] for place in row_of]
        lengths, counts = [each.n_computed for each in computed], [n_new] * len(computed)
        padding = [0] * (bucket_of(n_new, self.cache.device) - n_new)
        new = [[*each.tokens[start : start + n_new], *padding] for each, start in zip(computed, lengths, strict=True)]
        slots = self._slots_of(computed)
        extending = self.cache.extend([each.table for each in computed], lengths, counts, len(new[0]), states=slots)
        hidden = self.model.hidden(sent_to(self.cache.device, torch.tensor(new)), cache=extending)[:, :n_new]
        finite = hidden.isfinite().all()
        self._copy_to_equals(work)
        rows = [row_of[first] for first in firsts]
        scored = {
            sequence: self._scores(sequence, hidden[row])
            for row, sequence in zip(rows, sequences, strict=True)
            if not sequence.shares
        }
        drawing = {
            sequence: hidden[row, -1]
            for row, sequence in zip(rows, sequences, strict=True)
            if sequence.n_computed + n_new == len(sequence.tokens) and sequence.wants_more
        }
        drawn: dict[EngineSequence, Draw] = {}
        if drawing:
            states = torch.stack([*drawing.values()])
            # One product for each row, where a row's must not depend on how many there are.
            parts = states[:, None] if self.scheduler.batch_invariant else states[None]
            logits = torch.cat([self.model.logits_of(part) for part in parts])
            drawn = dict(zip(drawing, self._draws([*drawing], logits, finite), strict=True))
        elif not bool(finite):
            # Before others may share what these sequences leave in the cache.
            raise NapkinError(NOT_FINITE)
        if extending.states is not None:
            # Last, since a pass that raises is computed again from the states that it read.
            extending.states.keep(rows, self._slots_of(sequences))
        return scored, drawn

    def _slots_of(self, sequences: Sequence[EngineSequence]) -> list[int] | None:
        """The slots of the states of sequences that run, of which there are as many as may run; None without states."""
        if self.cache.states is None:
            return None
        held = self._state_slots = {each: slot for each, slot in self._state_slots.items() if each.running}
        free = iter(sorted(set(range(self.scheduler.max_running)) - set(held.values())))
        for each in sequences:
            if each not in held:
                held[each] = next(free)
        return [held[each] for each in sequences]

    def _copy_to_equals(self, work: Pass[EngineSequence]) -> None:
        """Keys and values that a pass has written, into the blocks of the sequences that are equal to the computed."""
        size, blocks, others = self.pool.block_size, [], []
        for place, (sequence, first) in enumerate(zip(work.sequences, work.firsts, strict=True)):
            if place != first:
                written = slice(sequence.n_computed // size, -(-(sequence.n_computed + work.n_new) // size))
                blocks += work.sequences[first].table[written]
                others += sequence.table[written]
        if blocks:
            self.cache.copy(blocks, others)

    def _draws(self, sequences: Sequence[EngineSequence], logits: Tensor, finite: Tensor) -> list[Draw]:
        """A token for each sequence, from the logits of its last one; `finite` says if these can be drawn from."""
        return draw(
            logits,
            [each.completion.request.sampling for each in sequences],
            [len(each.completion.draws) for each in sequences],
            [each.tokens for each in sequences],
            tell_sampled=any(each.completion.request.sampled_logprobs for each in sequences),
            finite=finite,
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

    def _advance(
        self,
        work: Pass[EngineSequence],
        scored: dict[EngineSequence, list[Draw]],
        drawn: dict[EngineSequence, Draw],
    ) -> list[Progress]:
        """Take over what a pass has computed; nothing here raises."""
        for place, (sequence, first) in enumerate(zip(work.sequences, work.firsts, strict=True)):
            # Keys and values of others' tokens were copied, and not computed.
            if place != first and not sequence.completion.draws:
                sequence.completion.cached_tokens += work.n_new
                self._cached_tokens += work.n_new
        for sequence, told in scored.items():
            found = sequence.completion.prompt_draws
            # After a preemption the prompt is scored again from its beginning.
            found[:] = [*found[: sequence.n_computed + 1], *told] if sequence.n_computed else [None, *told]
        ended = [each for each in work.sequences if each.n_computed + work.n_new == len(each.tokens)]
        for sequence in work.sequences:
            self.scheduler.advance(sequence, work.n_new)
        now = time.perf_counter()
        return [self._ended_or_drawn(each, drawn.get(each), now) for each in ended]

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

    def _fail(self, sequence: EngineSequence, error: Exception) -> Progress:
        """End a sequence that cannot be computed. What it left in its own blocks may be no numbers, which others would
        read: what is hidden from them is multiplied by 0."""
        self.cache.clear(sequence.table[len(sequence.digests) :])
        sequence.completion.failure = first_line(error)
        return self._end(sequence, "failed", len(sequence.completion.draws))

    def _end(self, sequence: EngineSequence, finish: Finish, index: int) -> Progress:
        self.scheduler.finish(sequence)
        sequence.completion.finished_at = time.perf_counter()
        sequence.completion.finish = finish
        return sequence.completion, index
