"""Requests for an engine, and what has become of them: completions, and how the scheduler sees these."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from napkin.errors import NapkinError
from napkin.inference.sampling import Draw
from napkin.inference.scheduler import ScheduledSequence
from napkin.inference.settings import Sampling
from napkin.inference.speculation import Acceptance, PromptLookup

Finish = Literal["stop", "length", "cancelled", "failed"]
"""A stop id was drawn; as many tokens were drawn as asked for; the rest is not wanted; it cannot be computed."""


@dataclass(frozen=True)
class Request:
    """Token ids to continue, and how."""

    prompt: Sequence[int]
    """Token ids of the prompt, at least one."""
    max_new_tokens: int
    """Tokens to draw at most; 0 only scores the prompt."""
    sampling: Sampling = field(default_factory=Sampling)
    """How tokens are drawn; stop texts are left to the code that turns ids into text."""
    prompt_logprobs: bool = False
    """Whether to return the log-probability of each prompt token given those before it."""
    sampled_logprobs: bool = False
    """Whether to return the log-probability with which each token was drawn."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise NapkinError("the prompt holds no token: begin with a separator or with text")
        if self.max_new_tokens < 0:
            raise NapkinError(f"max_new_tokens is {self.max_new_tokens}: use 0 or more")


@dataclass(eq=False)
class Completion:
    """A request and its progress; only the engine writes to it."""

    request: Request
    number: int
    """The place of the request in the order of arrival."""
    draws: list[Draw] = field(default_factory=list)
    """Tokens drawn so far, without the stop id."""
    stop_draw: Draw | None = None
    """The stop id that ended it, if one did."""
    prompt_draws: list[Draw | None] = field(default_factory=list)
    """A draw per prompt token, if they were asked for; None for the first."""
    finish: Finish | None = None
    failure: str | None = None
    """Why it failed, in a line."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the cache."""
    speculation: Acceptance = field(default_factory=Acceptance)
    """The tokens that were proposed to follow its own, and how many were accepted."""
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
    lookup: PromptLookup | None = None
    """Proposes tokens from the request's own tokens."""

    @classmethod
    def of(cls, completion: Completion, lookup: int = 0) -> "EngineSequence":
        """The prompt as a completion without drawn tokens."""
        request = completion.request
        return cls(
            completion.number,
            list(request.prompt),
            len(request.prompt),
            request.max_new_tokens,
            shares=not request.prompt_logprobs,
            completion=completion,
            lookup=PromptLookup(lookup) if lookup else None,
        )

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end the completion, in addition to those of the engine."""
        return frozenset(self.completion.request.sampling.stop_ids)


Progress = tuple[Completion, int]
"""A completion that changed, and the index of its first new draw."""
