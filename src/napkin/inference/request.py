"""What an engine is asked, and what it answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from napkin.errors import NapkinError
from napkin.inference.sampling import Draw
from napkin.inference.settings import Sampling

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
    """Of each prompt token, if they were asked for; None for the first."""
    finish: Finish | None = None
    failure: str | None = None
    """Why it failed, in a line."""
    cached_tokens: int = 0
    """Of the prompt, those whose keys and values other requests had left."""
    submitted_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def tokens(self) -> list[int]:
        """The ids drawn so far."""
        return [draw.token for draw in self.draws]
