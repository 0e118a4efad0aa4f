"""Answers of the model that is trained, drawn by the inference engine, and what an environment makes of them.

The engine computes with the module itself: no weight is copied, and none is stale. Its pool of keys and values exists
while answers are drawn; a prefix that it shares is never older than that. Tokens are handed to training as they were
drawn, with the log-probability they were drawn with: no text is tokenized a second time.

All draws are a pure function of weights, seed, step, prompt and answer, and so is the schedule: a resumed run draws
what an uninterrupted one would.

Answers that an environment judges while others are drawn: in threads, where it allows that.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from napkin.inference.paged_cache import bytes_per_token
from napkin.inference.request import Completion, Request
from napkin.inference.settings import Sampling
from napkin.model.transformer import Transformer
from napkin.train_step.step import Watch
from napkin.tuning.policy_loss import SAMPLER


class BackgroundJudging:
    """Begins to judge answers in the order in which they come; outcomes depend neither on threads nor on time."""

    def __init__(self, environment: Environment) -> None:
        n_parallel = getattr(environment, "n_parallel", 0)
        self._environment, self._pool = environment, ThreadPoolExecutor(n_parallel) if n_parallel > 0 else None
        self.may_wait = self._pool is not None and getattr(environment, "one_turn", False)
        """Whether outcomes are best asked for when nothing is left to draw."""

    def begin(self, state: Any, answer: str) -> Callable[[], Outcome]:
        """What gives the outcome: waits for it, or where the environment allows no threads, finds it."""
        if self._pool is None:
            return partial(self._environment.step, state, answer)
        return self._pool.submit(self._environment.step, state, answer).result

    def __enter__(self) -> "BackgroundJudging":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            # After an error nobody waits for what has not begun.
            self._pool.shutdown(wait=kind is None, cancel_futures=True)


BLOCK_SIZE = 16
PREFILL_CHUNK = 4096
"""Prompt tokens of a step of the engine: nobody waits for a first token here."""

Ending = Literal["done", "cut", "no room"]
"""The environment ended it; an answer was cut at max_answer; the context held no further turn."""


@runtime_checkable
class ConversationTokens(Protocol):
    """How messages become tokens, and tokens text."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Each ends an answer, and belongs to it."""
        ...

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens up to where the answer begins."""
        ...

    def sequence(self, messages: Sequence[Message]) -> TokenSequence:
        """All tokens of a conversation; those of answers count, with what ends them."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of an answer."""
        ...


@dataclass(frozen=True)
class RolloutSettings:
    """How answers are drawn."""

    group_size: int
    """Completions of each prompt."""
    max_completion_tokens: int
    temperature: float
    """0 always takes the likeliest token."""
    seed: int
    max_running: int = 256
    """Answers that are computed at a time."""


@dataclass(frozen=True, eq=False)
class Episode:
    """One answer to a prompt, or several turns of them, and its reward."""

    prompt: int
    """Its number in the batch."""
    completion: int
    """Its number in its group."""
    sequence: TokenSequence
    """Generated tokens count; `SAMPLER` has the log-probabilities that they were drawn with."""
    reward: float
    """The sum over its turns."""
    ending: Ending
    turns: int
    messages: tuple[Message, ...]
    parts: dict[str, float] = field(default_factory=dict)
    """Of the reward, by name."""
    failure: str | None = None
    """Why a reward could not be told, which is then 0."""

    @property
    def truncated(self) -> bool:
        """Whether its last answer was not ended by the model."""
        return self.ending == "cut"


@dataclass(frozen=True)
class Rollout:
    """Groups of episodes, a group for each prompt, and what they took."""

    groups: list[list[Episode]]
    prompt_tokens: int
    """Of prompts and of messages between turns, for each answer; those that were shared among them."""
    computed_prompt_tokens: int
    """Of these, computed and not shared."""
    generated_tokens: int
    passes: int
    """Steps of the engine."""
    preempted: int
    """Answers that gave their blocks back, and were computed again."""
    cache_bytes: int
    """Of the pool of keys and values."""

    @property
    def episodes(self) -> list[Episode]:
        """Those of all groups."""
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
    """Answer prompts of a step, by number, and let the environment judge.

    Prompt p of step s is the same whichever rank answers it, and with whatever others. The model is left in the mode
    that it was in. `watch` times "rollout" and "reward", which is the time that is spent on waiting for outcomes.

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
        longest = max(len(draft.ids) for draft in drafts) + settings.max_completion_tokens
    with evaluating(model), autocast(), BackgroundJudging(environment) as judging:
        with watch("rollout"):
            engine = _engine(model, settings, len(drafts), longest, tokens.stop_ids)
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


def task_seed(seed: int, step: int, prompt: int) -> int:
    """Of which task a prompt is."""
    return random_word(random_word(random_word(seed, 0), step), prompt) >> 2


def completion_seed(seed: int, step: int, prompt: int, completion: int, turn: int) -> int:
    """Of the draws of an answer."""
    word = random_word(seed, 1)
    for number in (step, prompt, completion, turn):
        word = random_word(word, number)
    return word >> 2


@contextmanager
def evaluating(model: Transformer) -> Iterator[None]:
    """Evaluation mode while the block runs, then the mode of before."""
    training = model.training
    try:
        yield
    finally:
        model.train(training)


def pool_bytes(model: Transformer, n_completions: int, longest: int) -> int:
    """Of the keys and values that so many answers need, prompts included; one sequence of the context always fits.

    It depends on nothing else, above all not on what memory is free: the schedule is the same wherever it runs.
    """
    context = model.config.context_length
    blocks = max(n_completions * -(-min(longest + 1, context) // BLOCK_SIZE), -(-context // BLOCK_SIZE))
    return blocks * BLOCK_SIZE * bytes_per_token(model.config, model.head_weight.dtype)


def _engine(
    model: Transformer, settings: RolloutSettings, n_completions: int, longest: int, stop_ids: Sequence[int]
) -> Engine:
    running = min(settings.max_running, n_completions)
    return Engine(
        model,
        cache_bytes=pool_bytes(model, running, longest),
        max_running=running,
        prefill_chunk=PREFILL_CHUNK,
        block_size=BLOCK_SIZE,
        stop_ids=stop_ids,
        prompts_together=True,
    )


class _Draft:
    """An episode on its way."""

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
        """For the next answer."""
        sampling = Sampling(
            temperature=settings.temperature,
            top_p=1.0,
            seed=completion_seed(settings.seed, step, self.prompt, self.completion, self.turns),
        )
        most = min(settings.max_completion_tokens, self.context - len(self.ids))
        return Request(tuple(self.ids), most, sampling, sampled_logprobs=True)

    def add_completion(self, completion: Completion) -> str:
        """Add an answer, whose text is returned."""
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
        """Add what the environment says to the last answer."""
        self._add_reward(outcome.reward, outcome.parts, outcome.failure)
        self.state = outcome.state
        if self.is_truncated:
            self.ending = "cut"
        elif outcome.done or outcome.message is None:
            self.ending = "done"
        else:
            message = Message("user", outcome.message)
            between = continuation(self.tokens, self.messages, message)
            self.messages.append(message)
            if len(self.ids) + len(between) >= self.context:
                self.ending = "no room"
            else:
                self.ids += between
                self.loss_mask += [False] * len(between)

    def _add_reward(self, reward: float, parts: Mapping[str, float], failure: str | None) -> None:
        if not math.isfinite(reward):
            failure, reward, parts = failure or f"the reward is {reward}", 0.0, {}
        self.failure = self.failure or failure
        self.reward += reward
        for name, value in parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value

    def episode(self) -> Episode:
        """All of it."""
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


def continuation(tokens: ConversationTokens, messages: Sequence[Message], message: Message) -> list[int]:
    """Tokens between the end of the last answer and the beginning of the next, where `message` is said between.

    The last of `messages` is the answer. Raises NapkinError where a template renders earlier messages differently when
    others follow.
    """
    before = tokens.sequence(messages)
    n_before = int(np.flatnonzero(before.loss_mask)[-1]) + 1
    whole = tokens.prompt([*messages, message])
    if whole[:n_before] != before.tokens[:n_before].tolist():
        raise NapkinError(
            "the chat template renders an answer differently when a message follows it: several turns need one that "
            "does not"
        )
    return whole[n_before:]
