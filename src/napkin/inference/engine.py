"""Many requests at a time: continuous batching over one pool of KV blocks.

`scheduler.py` says which sequences a step computes and in which blocks; here their tokens go through the model, and the
next ones are drawn. A draw depends on the request's seed and not on what else is running. With a draft model or a
lookup, a pass tests several tokens of each sequence: `engine_speculation.py`.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from napkin.errors import NapkinError, first_line
from napkin.inference.decoding_forms import choose_decoding_forms
from napkin.inference.decoding_graphs import DecodingGraphs
from napkin.inference.engine_speculation import PagedDraft, ProposalPlanner, Proposals, refuse_unfit, tokens_decided
from napkin.inference.paged_cache import KVFormat, PagedCache, bytes_per_token, n_blocks_that_fit
from napkin.inference.requests import Completion, EngineSequence, Finish, Progress, Request
from napkin.inference.sampling import NOT_FINITE, Draw, draw, told, told_draws
from napkin.inference.scheduler import BlockPool, Pass, Scheduler
from napkin.inference.settings import Speculation
from napkin.inference.speculation import Acceptance
from napkin.model.kernel_forms import use_decoding_kernels
from napkin.model.kv_cache import bucket_of
from napkin.model.transformer import Transformer
from napkin.tensors import sent_to


@dataclass(frozen=True)
class _Computed:
    """The results of a pass for its sequences."""

    scored: dict[EngineSequence, list[Draw]]
    """Draws of prompt tokens, where log-probabilities of prompts are requested."""
    drawn: dict[EngineSequence, list[Draw]]
    """Draws where a sequence is computed to its end: one, and one more for each proposal, even after a rejected one."""
    proposed: dict[EngineSequence, list[int]]
    draft_seconds: float = 0.0


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
    proposed_tokens: int
    tested_tokens: int
    """Proposed tokens that were accepted or rejected; those behind a rejected one are neither."""
    accepted_tokens: int
    preempted: int
    """How often a sequence gave its blocks back, to be computed again."""
    steps: int
    seconds: float
    """Seconds spent in steps."""


class Engine:
    """Continues requests together. `step` belongs to one thread; `submit` and `cancel` may be called from any.

    Args:
        model: a trained model, in evaluation mode from now on.
        cache_bytes: memory of the pool; None is what `max_running` sequences of `longest` tokens need, at most half of
            the free memory.
        longest: tokens of the longest request, prompt and completion, where that is known; None is the context length.
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
        draft: a smaller model with the same tokenizer that proposes tokens, several of which the model tests in one
            pass: texts have the same distribution, at temperature 0 they are the same but for rounding. Its keys and
            values are in the same blocks, a part of `cache_bytes`.
        lookup: propose what followed the last tokens of a sequence where they occurred in it before, up to so many of
            them compared; texts are the same but for rounding. 0 is off.
        proposed: tokens proposed for a pass; None is as many as are fastest by each request's acceptance and the
            seconds of passes. Texts do not depend on it.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        cache_bytes: int | None = None,
        longest: int | None = None,
        max_running: int = 16,
        prefill_chunk: int = 512,
        block_size: int = 16,
        stop_ids: Iterable[int] = (),
        batch_invariant: bool = False,
        kv: KVFormat = "auto",
        prompts_together: bool = False,
        draft: Transformer | None = None,
        lookup: int = 0,
        proposed: int | None = None,
    ) -> None:
        # The settings check which options exclude each other; the draft is open already, so its name does not matter.
        speculates = Speculation("draft" if draft is not None else None, lookup, proposed).on
        if speculates and batch_invariant:
            raise NapkinError(
                "batch_invariant computes each token by itself, and a draft or a lookup has several computed at once: "
                "use one of them"
            )
        if speculates:
            refuse_unfit(model, "the model")
        for name, value in (("max_running", max_running), ("prefill_chunk", prefill_chunk), ("block_size", block_size)):
            if value < 1:
                raise NapkinError(f"{name} is {value}: use 1 or more")
        for name in _SHAPE_CACHES:
            os.environ.setdefault(name, str(_SHAPES_KEPT))
        self.model = model.eval()
        self.longest = min(longest or model.config.context_length, model.config.context_length)
        self.stop_ids = frozenset(stop_ids)
        self.kv: KVFormat = kv
        each = block_size * bytes_per_token(model.config, model.dtype, kv)
        each += 0 if draft is None else block_size * bytes_per_token(draft.config, draft.dtype, kv)
        self.scheduler = Scheduler[EngineSequence](
            n_blocks_that_fit(model, each, block_size, max_running, cache_bytes, self.longest),
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
        if not torch.is_autocast_enabled(model.device.type):
            for each_model in (model,) if draft is None else (model, draft):
                use_decoding_kernels(each_model)
                choose_decoding_forms(each_model)
        self.graphs = DecodingGraphs(model, self.cache)
        self.draft = None if draft is None else PagedDraft(draft, model, self.pool.n_blocks, block_size, kv)
        self.planner = ProposalPlanner(proposed, drafts=draft is not None) if speculates else None
        self._lookup = lookup
        self._arrived: deque[EngineSequence] = deque()
        self._unwanted: deque[Completion] = deque()
        self._lock = threading.Lock()
        self._submitted = 0
        self._prompt_tokens = self._cached_tokens = self._generated = self._steps = 0
        self._seconds = 0.0

    @property
    def caches(self) -> list[PagedCache]:
        """The keys and values of the model, and of its draft."""
        return [self.cache] if self.draft is None else [self.cache, self.draft.cache]

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
            self._arrived.append(EngineSequence.of(completion, self._lookup))
        return completion

    def cancel(self, completion: Completion) -> None:
        """End a completion before the next step; one that has ended stays as it is."""
        self._unwanted.append(completion)

    @property
    def has_work(self) -> bool:
        """True while there is anything to compute."""
        return bool(self._arrived or self._unwanted or self.scheduler.waiting or self.scheduler.running)

    def stats(self) -> EngineStats:
        """The figures of now."""
        speculation = Acceptance() if self.planner is None else self.planner.all
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._arrived),
            blocks_free=self.pool.n_free,
            blocks_total=self.pool.n_blocks,
            cache_bytes=sum(each.nbytes for each in self.caches),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            proposed_tokens=speculation.proposed,
            tested_tokens=speculation.tested,
            accepted_tokens=speculation.accepted,
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
        """Compute one token of every running sequence whose prompt is done, and a chunk of prompts; returns what
        changed.

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
        if self.planner is not None:
            decoding = [each for each in self.scheduler.running if each.decodes]
            for sequence in decoding:
                wanted = self.planner.next_proposed(len(decoding), sequence.completion.speculation)
                # A pass draws one token itself.
                left = sequence.n_prompt + sequence.max_new_tokens - len(sequence.tokens) - 1
                sequence.n_speculative = min(wanted, left)
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
        # If the device itself has failed, every step raises, and the message says so.
        with contextlib.suppress(Exception):
            for cache in self.caches:
                cache.clear(range(self.pool.n_blocks))
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
        """Queue new requests, and end cancelled ones."""
        while self._arrived:
            self.scheduler.add(self._arrived.popleft())
        changed: list[Progress] = []
        while self._unwanted:
            completion = self._unwanted.popleft()
            known = (*self.scheduler.running, *self.scheduler.waiting)
            sequence = next((each for each in known if each.completion is completion), None)
            if sequence is not None:
                changed.append(self._end(sequence, "cancelled", len(completion.draws)))
        return changed

    def _compute(self, work: Pass[EngineSequence], isolate: bool) -> list[Progress]:
        """Pass new tokens of sequences through the model, and draw where a sequence is computed to its end.

        Where that raises, each sequence is computed alone: those for which it raises again fail.
        """
        started = time.perf_counter()
        try:
            computed = self._pass(work)
        except Exception as error:
            if not isolate:
                raise
            if len(work.sequences) == 1:
                return [self._fail(work.sequences[0], error)]
            alone = [Pass([each], work.n_new, [0]) for each in work.sequences]
            return [progress for each in alone for progress in self._compute(each, isolate)]
        if self.planner is not None and work.n_new == 1 and work.sequences[0].decodes:
            most, seconds = max(map(len, computed.proposed.values()), default=0), time.perf_counter() - started
            self.planner.add(len(work.sequences), most, computed.draft_seconds, seconds - computed.draft_seconds)
        return self._advance(work, computed)

    def _pass(self, work: Pass[EngineSequence]) -> _Computed:
        """Run the model over the next tokens of sequences: requested scores of prompts, and draws for sequences that
        are computed to their end. Only the cache changes: after an error nothing else has changed, since the same
        places are written again."""
        sequences, n_new, firsts = work.sequences, work.n_new, work.firsts
        row_of = {place: row for row, place in enumerate(dict.fromkeys(firsts))}
        computed = [sequences[place] for place in row_of]
        rows = {sequence: row_of[first] for sequence, first in zip(sequences, firsts, strict=True)}
        tables, lengths = [each.table for each in computed], [each.n_computed for each in computed]
        new = [each.tokens[start : start + n_new] for each, start in zip(computed, lengths, strict=True)]
        drawing = [each for each in sequences if each.n_computed + n_new == len(each.tokens) and each.wants_more]
        started = time.perf_counter()
        proposals, drafted_finite = self._proposals(drawing, rows, tables, lengths, new)
        draft_seconds = time.perf_counter() - started
        # Proposals are tested only for sequences that decode, all of which are computed.
        proposed = {each: found.tested for each, found in proposals.items() if found.n_tested}
        if all(each.decodes for each in sequences) and not proposed:
            replayed = self.graphs.step([each[0] for each in new], tables, lengths)
            if replayed is not None:
                logits, finite = replayed
                finite = finite if drafted_finite is None else finite & drafted_finite
                return _Computed({}, self._draws(sequences, proposals, logits, finite), {}, draft_seconds)
        new = [[*tokens, *proposed.get(each, [])] for each, tokens in zip(computed, new, strict=True)]
        counts = [len(each) for each in new]
        width = bucket_of(max(counts), self.cache.device)
        slots = self._slots_of(computed)
        extending = self.cache.extend(tables, lengths, counts, width, states=slots)
        padded = torch.tensor([[*each, *[0] * (width - len(each))] for each in new])
        hidden = self.model.hidden(sent_to(self.cache.device, padded), cache=extending)
        real = (
            [hidden[row, :count] for row, count in enumerate(counts)]
            if len(set(counts)) > 1
            else [hidden[:, : counts[0]]]
        )
        self._copy_to_equals(work)
        finite = (
            torch.stack([each.isfinite().all() for each in real]).all() if len(real) > 1 else real[0].isfinite().all()
        )
        finite = finite if drafted_finite is None else finite & drafted_finite
        scored = {each: self._scores(each, hidden[row, :n_new]) for each, row in rows.items() if not each.shares}
        drawn: dict[EngineSequence, list[Draw]] = {}
        if drawing:
            states = torch.cat([hidden[rows[each], n_new - 1 : counts[rows[each]]] for each in drawing])
            # One product for each row, where a row's must not depend on how many there are.
            parts = states[:, None] if self.scheduler.batch_invariant else states[None]
            logits = torch.cat([self.model.logits_of(part) for part in parts])
            drawn = self._draws(drawing, proposals, logits, finite)
        elif not bool(finite):
            # Checked before other sequences may share the blocks of these.
            raise NapkinError(NOT_FINITE)
        if extending.states is not None:
            # Last, since a pass that raises is computed again from the states that it read.
            extending.states.keep([*rows.values()], self._slots_of(sequences))
        return _Computed(scored, drawn, proposed, draft_seconds)

    def _proposals(
        self,
        drawing: list[EngineSequence],
        rows: dict[EngineSequence, int],
        tables: list[list[int]],
        lengths: list[int],
        new: list[list[int]],
    ) -> tuple[dict[EngineSequence, Proposals], Tensor | None]:
        """The tokens proposed for each sequence, and whether everything that a draft computed was finite. A draft
        computes the new tokens of all sequences, also of those that are not `drawing`."""
        if self.planner is None:
            return {}, None
        proposals = {
            each: Proposals(
                each.tokens,
                each.table,
                each.n_speculative,
                each.completion.request.sampling,
                len(each.completion.draws),
            )
            for each in drawing
        }
        if self.draft is None:
            for each, made in proposals.items():
                assert each.lookup is not None
                n_wanted = made.n_tested
                made.drawn = each.lookup.propose(each.tokens, n_wanted, made.sampling, made.number) if n_wanted else []
                made.n_tested = len(made.drawn)
            return proposals, None
        logits, finite = self.draft.extend(tables, lengths, new)
        if not drawing:
            return proposals, finite
        rows_drawing = [rows[each] for each in drawing]
        return proposals, finite & self.draft.propose([*proposals.values()], logits[rows_drawing])

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
        for cache in self.caches if blocks else ():
            cache.copy(blocks, others)

    def _draws(
        self,
        sequences: Sequence[EngineSequence],
        proposals: dict[EngineSequence, Proposals],
        logits: Tensor,
        finite: Tensor,
    ) -> dict[EngineSequence, list[Draw]]:
        """The tokens of each sequence, from the logits of its last one and of its proposals; `finite` says if these can
        be drawn from."""
        counts = [1 + (proposals[each].n_tested if each in proposals else 0) for each in sequences]
        decided = {each: None for each in sequences if self.draft is not None and proposals[each].decides}
        places = [(each, place) for each, count in zip(sequences, counts, strict=True) for place in range(count)]
        alone = [row for row, (each, _) in enumerate(places) if each not in decided]
        by_row: dict[int, Draw] = {}
        if alone:
            of = [places[row] for row in alone]
            found = draw(
                logits if len(alone) == len(places) else logits[alone],
                [each.completion.request.sampling for each, _ in of],
                [len(each.completion.draws) + place for each, place in of],
                [proposals[each].before(place) if place else each.tokens for each, place in of],
                tell_sampled=any(each.completion.request.sampled_logprobs for each, _ in of),
                finite=finite,
            )
            by_row |= zip(alone, found, strict=True)
        if decided:
            if not bool(finite):
                raise NapkinError(NOT_FINITE)
            others = [row for row in range(len(places)) if row not in by_row]
            tokens, logprobs = tokens_decided([proposals[each] for each in decided], logits[others].float())
            settings = [places[row][0].completion.request.sampling for row in others]
            found = [
                replace(each, sampled_logprob=logprob)
                for each, logprob in zip(told(logits[others].float(), tokens, settings), logprobs, strict=True)
            ]
            by_row |= zip(others, found, strict=True)
        drawn: dict[EngineSequence, list[Draw]] = {each: [] for each in sequences}
        for row, (each, _) in enumerate(places):
            drawn[each].append(by_row[row])
        return drawn

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

    def _advance(self, work: Pass[EngineSequence], computed: _Computed) -> list[Progress]:
        """Apply the results of a pass; nothing here raises."""
        for place, (sequence, first) in enumerate(zip(work.sequences, work.firsts, strict=True)):
            # Keys and values of an equal prompt were copied, not computed.
            if place != first and not sequence.completion.draws:
                sequence.completion.cached_tokens += work.n_new
                self._cached_tokens += work.n_new
        for sequence, scores in computed.scored.items():
            found = sequence.completion.prompt_draws
            # After a preemption the prompt is scored again from its beginning.
            found[:] = [*found[: sequence.n_computed + 1], *scores] if sequence.n_computed else [None, *scores]
        now = time.perf_counter()
        changed: list[Progress] = []
        for sequence in work.sequences:
            if sequence.n_computed + work.n_new < len(sequence.tokens):
                self.scheduler.advance(sequence, work.n_new)
            elif sequence not in computed.drawn:
                self.scheduler.advance(sequence, work.n_new)
                changed.append(self._end(sequence, "length", 0))
            else:
                drawn, proposed = computed.drawn[sequence], computed.proposed.get(sequence, [])
                changed.append(self._drawn(sequence, work.n_new, drawn, proposed, now))
        return changed

    def _drawn(
        self, sequence: EngineSequence, n_new: int, drawn: list[Draw], proposed: list[int], now: float
    ) -> Progress:
        """A sequence that is computed to its end gets its next tokens: those before the first that was not proposed,
        and this one; a stop id ends it."""
        completion, index = sequence.completion, len(sequence.completion.draws)
        completion.first_token_at = completion.first_token_at or now
        n_accepted = next((place for place, token in enumerate(proposed) if drawn[place].token != token), len(proposed))
        if self.planner is not None and sequence.decodes:
            for meter in (completion.speculation, self.planner.all):
                meter.count(len(proposed), n_accepted)
        kept = drawn[: n_accepted + 1]
        ends = next((place for place, each in enumerate(kept) if self._stops(sequence, each.token)), None)
        new = kept[:ends]
        completion.draws += new
        sequence.tokens += [each.token for each in new]
        self._generated += len(new)
        # The last drawn token is not computed yet, and a stop id never is.
        self.scheduler.advance(sequence, n_new + (n_accepted if ends is None else ends))
        if ends is not None:
            completion.stop_draw = kept[ends]
            return self._end(sequence, "stop", index)
        return (completion, index) if sequence.wants_more else self._end(sequence, "length", index)

    def _stops(self, sequence: EngineSequence, token: int) -> bool:
        return token in self.stop_ids or token in sequence.stop_ids

    def _fail(self, sequence: EngineSequence, error: Exception) -> Progress:
        """End a sequence that cannot be computed. It may have left NaN in its blocks, which would reach later sequences
        there: hidden values are multiplied by 0, not skipped."""
        for cache in self.caches:
            cache.clear(sequence.table[len(sequence.digests) :])
        sequence.completion.failure = first_line(error)
        return self._end(sequence, "failed", len(sequence.completion.draws))

    def _end(self, sequence: EngineSequence, finish: Finish, index: int) -> Progress:
        self.scheduler.finish(sequence)
        sequence.completion.finished_at = time.perf_counter()
        sequence.completion.finish = finish
        return sequence.completion, index
