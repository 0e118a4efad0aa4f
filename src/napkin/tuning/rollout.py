"""Rollouts: the inference engine samples completions of the model in training, and an environment judges them.

The engine computes with the module itself: no weight is copied, and none is stale. Its KV pool exists during the
rollout only; a prefix that it shares is never older than that. Training gets the tokens as they were sampled, with
their log-probabilities: no text is tokenized a second time.

Samples and schedule are a pure function of weights, seed, step, prompt and completion, so a resumed run samples what an
uninterrupted one would. An environment may judge in threads while other completions are sampled.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from napkin.chats.chat_format import Message
from napkin.chats.token_sequence import TokenSequence
from napkin.data.permutation import random_word
from napkin.environments.environment import Environment, Outcome, Task
from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.paged_cache import bytes_per_token, state_bytes_per_sequence
from napkin.inference.requests import Completion, Request
from napkin.inference.settings import Sampling
from napkin.model.transformer import Transformer, evaluation_mode
from napkin.train_step.step import Watch
from napkin.tuning.policy_gradient import SAMPLER


class BackgroundJudging:
    """Starts to judge completions in the order in which they end; outcomes depend neither on threads nor on time."""

    def __init__(self, environment: Environment) -> None:
        n_parallel = getattr(environment, "n_parallel", 0)
        self._environment, self._pool = environment, ThreadPoolExecutor(n_parallel) if n_parallel > 0 else None
        self.may_wait = self._pool is not None and getattr(environment, "one_turn", False)
        """True if outcomes are best collected when no completion is running any more."""

    def begin(self, state: Any, answer: str) -> Callable[[], Outcome]:
        """Return a function that gives the outcome: it waits for a thread, or judges where the environment allows
        none."""
        if self._pool is None:
            return partial(self._environment.step, state, answer)
        return self._pool.submit(self._environment.step, state, answer).result

    def __enter__(self) -> "BackgroundJudging":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            # After an error, judgements that have not begun are dropped.
            self._pool.shutdown(wait=kind is None, cancel_futures=True)


BLOCK_SIZE = 16
PREFILL_CHUNK = 4096
"""Prompt tokens per step of the engine, as many as pay off: nobody waits for a first token here."""

Ending = Literal["done", "cut", "no room"]
"""The environment ended the episode; a completion was truncated at max_completion_tokens; the context held no further
turn."""


@runtime_checkable
class ConversationTokens(Protocol):
    """Encodes messages and decodes tokens."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that each end a completion, and belong to it."""
        ...

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Encode messages up to where the completion begins."""
        ...

    def sequence(self, messages: Sequence[Message]) -> TokenSequence:
        """Encode a whole conversation; the loss mask has the assistant's turns, with the tokens that end them."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class RolloutSettings:
    """Sampling settings of a rollout."""

    group_size: int
    """Completions per prompt."""
    max_completion_tokens: int
    temperature: float
    """0 is greedy."""
    seed: int
    max_running: int = 256
    """Completions that are computed at a time."""


@dataclass(frozen=True, eq=False)
class Episode:
    """A completion of a prompt, or several turns of them, and its reward."""

    prompt: int
    """The prompt's number in the batch."""
    completion: int
    """The completion's number in its group."""
    sequence: TokenSequence
    """The loss mask has the sampled tokens, and `SAMPLER` the log-probabilities that they were sampled with."""
    reward: float
    """The sum over turns."""
    ending: Ending
    turns: int
    messages: tuple[Message, ...]
    parts: dict[str, float] = field(default_factory=dict)
    """Parts of the reward, by name."""
    failure: str | None = None
    """The reason if a reward could not be computed, which counts as 0."""

    @property
    def truncated(self) -> bool:
        """True if the model did not end its last completion."""
        return self.ending == "cut"


@dataclass(frozen=True)
class Rollout:
    """Groups of episodes, a group per prompt, and what they took."""

    groups: list[list[Episode]]
    prompt_tokens: int
    """Tokens of prompts and of messages between turns, counted for each completion even where they were shared."""
    computed_prompt_tokens: int
    """Prompt tokens that were computed instead of shared."""
    generated_tokens: int
    passes: int
    """Steps of the engine."""
    preempted: int
    """Completions that gave their blocks back, and were computed again."""
    cache_bytes: int
    """The size of the KV pool."""
    redrawn: int = 0
    """Groups that replaced others whose completions all had the same reward."""

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups for episode in group]


def roll_out(
    model: Transformer,
    environment: Environment,
    tokens: ConversationTokens,
    settings: RolloutSettings,
    *,
    step: int,
    prompts: Sequence[int],
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    watch: Watch = lambda part: nullcontext(),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Rollout:
    """Sample completions of a step's prompts, given by number, and let the environment judge them.

    Prompt p of step s is the same on any rank, beside any others. The model is left in the mode that it was in. `watch`
    times "rollout" and "reward", the time spent waiting for outcomes.

    Raises NapkinError for a prompt that leaves no room in the model's context.
    """
    with watch("rollout"):
        drafts: list[_Draft] = []
        for number in prompts:
            task = environment.start(task_seed(settings.seed, step, number))
            ids = tokens.prompt(task.messages)
            drafts += [
                _Draft(number, completion, task, ids, tokens, model.config.context_length)
                for completion in range(settings.group_size)
            ]
        if not drafts:
            return Rollout([], 0, 0, 0, 0, 0, 0)
        # Enough for turns with tools, unless each output is as long as allowed.
        turns = getattr(environment, "most_turns", 1)
        longest = max(len(draft.ids) for draft in drafts) + turns * settings.max_completion_tokens
    with evaluation_mode(model), autocast(), BackgroundJudging(environment) as judging:
        with watch("rollout"):
            max_running = min(settings.max_running, len(drafts))
            engine = Engine(
                model,
                cache_bytes=pool_bytes(model, max_running, longest),
                max_running=max_running,
                prefill_chunk=PREFILL_CHUNK,
                block_size=BLOCK_SIZE,
                stop_ids=tokens.stop_ids,
                prompts_together=True,
            )
            running = {engine.submit(draft.request(settings, step)): draft for draft in drafts}
        done, judged = 0, list[tuple[_Draft, Callable[[], Outcome]]]()
        while engine.has_work:
            with watch("rollout"):
                ended = [completion for completion, _ in engine.step() if completion.finish is not None]
                for completion in ended:
                    draft = running.pop(completion)
                    judged.append((draft, judging.begin(draft.state, draft.add_completion(completion))))
            # The schedule is the same however long judging takes: outcomes are waited for at fixed steps of the engine.
            if not (judging.may_wait and engine.has_work):
                with watch("reward"):
                    for draft, outcome in judged:
                        draft.add_outcome(outcome())
                again = [draft for draft, _ in judged if draft.ending is None]
                done += len(judged) - len(again)
                judged.clear()
                with watch("rollout"):
                    for draft in again:
                        running[engine.submit(draft.request(settings, step))] = draft
            if ended:
                progress(done + len(judged), len(drafts))
        stats = engine.stats()
    size = settings.group_size
    episodes = [draft.episode() for draft in drafts]
    return Rollout(
        groups=[episodes[first : first + size] for first in range(0, len(episodes), size)],
        prompt_tokens=stats.prompt_tokens,
        computed_prompt_tokens=stats.prompt_tokens - stats.cached_tokens,
        generated_tokens=sum(episode.sequence.n_trained for episode in episodes),
        passes=stats.steps,
        preempted=stats.preempted,
        cache_bytes=stats.cache_bytes,
    )


def roll_out_unequal(roll: Callable[[int, Sequence[int]], Rollout], prompts: Sequence[int], redraws: int) -> Rollout:
    """Roll out prompts, then up to `redraws` times those again whose completions all had the same reward: dynamic
    sampling (Yu et al. 2025, section 3.2).

    `roll(n, prompts)` makes the rollout of draw n, whose tasks are others than those of the draws before. A group that
    is equal in the last draw stays.
    """
    rollout = roll(0, prompts)
    for draw in range(1, redraws + 1):
        equal = [place for place, group in enumerate(rollout.groups) if len({episode.reward for episode in group}) == 1]
        if not equal:
            break
        again = roll(draw, [prompts[place] for place in equal])
        groups = list(rollout.groups)
        for place, group in zip(equal, again.groups, strict=True):
            groups[place] = group
        rollout = Rollout(
            groups,
            prompt_tokens=rollout.prompt_tokens + again.prompt_tokens,
            computed_prompt_tokens=rollout.computed_prompt_tokens + again.computed_prompt_tokens,
            generated_tokens=rollout.generated_tokens + again.generated_tokens,
            passes=rollout.passes + again.passes,
            preempted=rollout.preempted + again.preempted,
            cache_bytes=max(rollout.cache_bytes, again.cache_bytes),
            redrawn=rollout.redrawn + len(equal),
        )
    return rollout


def seed_of_draw(seed: int, draw: int) -> int:
    """The seed of prompts and completions that are drawn in place of others; draw 0 is the first, of the seed itself.

    Words 0 and 1 of a seed are those of tasks and completions.
    """
    return random_word(seed, 1 + draw) >> 2 if draw else seed


def task_seed(seed: int, step: int, prompt: int) -> int:
    return random_word(random_word(random_word(seed, 0), step), prompt) >> 2


def completion_seed(seed: int, step: int, prompt: int, completion: int, turn: int) -> int:
    word = random_word(seed, 1)
    for number in (step, prompt, completion, turn):
        word = random_word(word, number)
    return word >> 2


def pool_bytes(model: Transformer, n_completions: int, longest: int) -> int:
    """The size of a KV pool for so many completions, prompts and states included; one sequence of the context always
    fits.

    It depends on nothing else, above all not on free memory: the schedule is the same wherever it runs.
    """
    context = model.config.context_length
    blocks = max(n_completions * -(-min(longest + 1, context) // BLOCK_SIZE), -(-context // BLOCK_SIZE))
    dtype = model.dtype
    states = n_completions * state_bytes_per_sequence(model.config, dtype)
    return blocks * BLOCK_SIZE * bytes_per_token(model.config, dtype) + states


class _Draft:
    """An episode in progress."""

    def __init__(
        self,
        prompt: int,
        completion: int,
        task: Task,
        ids: Sequence[int],
        tokens: ConversationTokens,
        context: int,
    ) -> None:
        self.prompt, self.completion, self.state = prompt, completion, task.state
        self.tokens, self.context = tokens, context
        self.messages: list[Message] = list(task.messages)
        self.ids = list(ids)
        if len(self.ids) >= context:
            raise NapkinError(
                f"prompt {prompt} has {len(self.ids):,} tokens, the model's context {context:,}: use shorter prompts"
            )
        self.loss_mask = [False] * len(self.ids)
        self.log_probabilities: list[float] = []
        self.reward, self.turns = 0.0, 0
        self.parts: dict[str, float] = {}
        self.ending: Ending | None = None
        self.is_truncated = False
        self.failure: str | None = None

    def request(self, settings: RolloutSettings, step: int) -> Request:
        sampling = Sampling(
            temperature=settings.temperature,
            top_p=1.0,
            seed=completion_seed(settings.seed, step, self.prompt, self.completion, self.turns),
        )
        most = min(settings.max_completion_tokens, self.context - len(self.ids))
        return Request(tuple(self.ids), most, sampling, sampled_logprobs=True)

    def add_completion(self, completion: Completion) -> str:
        text = self.tokens.decode(completion.tokens)
        sampled = [*completion.draws, *([] if completion.stop_draw is None else [completion.stop_draw])]
        self.ids += [each.token for each in sampled]
        self.loss_mask += [True] * len(sampled)
        self.log_probabilities += [each.sampled_logprob or 0.0 for each in sampled]
        self.messages.append(Message("assistant", text))
        self.turns += 1
        self.is_truncated = completion.stop_draw is None
        return text

    def add_outcome(self, outcome: Outcome) -> None:
        reward, parts, failure = outcome.reward, outcome.parts, outcome.failure
        if not math.isfinite(reward):
            failure, reward, parts = failure or f"the reward is {reward}", 0.0, {}
        self.failure = self.failure or failure
        self.reward += reward
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        self.state = outcome.state
        if self.is_truncated:
            self.ending = "cut"
        elif not outcome.messages:
            self.ending = "done"
        else:
            between = continuation(self.tokens, self.messages, outcome.messages)
            self.messages += outcome.messages
            if len(self.ids) + len(between) >= self.context:
                self.ending = "no room"
            else:
                self.ids += between
                self.loss_mask += [False] * len(between)

    def episode(self) -> Episode:
        assert self.ending is not None
        sequence = TokenSequence(
            np.array(self.ids, dtype=np.int64),
            np.array(self.loss_mask, dtype=bool),
            {SAMPLER: np.array(self.log_probabilities, dtype=np.float32)},
        )
        return Episode(
            self.prompt,
            self.completion,
            sequence,
            self.reward,
            self.ending,
            self.turns,
            tuple(self.messages),
            self.parts,
            self.failure,
        )


def continuation(tokens: ConversationTokens, messages: Sequence[Message], said: Sequence[Message]) -> list[int]:
    """The tokens between the end of a completion and the beginning of the next, where `said` stands between.

    The last of `messages` is the completion. Raises NapkinError where a template renders earlier messages differently
    when others follow.
    """
    before = tokens.sequence(messages)
    n_before = int(np.flatnonzero(before.loss_mask)[-1]) + 1
    whole = tokens.prompt([*messages, *said])
    if whole[:n_before] != before.tokens[:n_before].tolist():
        raise NapkinError(
            "the chat template renders a completion differently when a message follows it: several turns need one that "
            "does not"
        )
    return whole[n_before:]
