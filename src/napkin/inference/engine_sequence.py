"""A sequence in an engine: how far it is computed, and in which blocks its keys and values are."""

from dataclasses import dataclass, field
from functools import cached_property

from napkin.inference.block_pool import Digest
from napkin.inference.request import Completion


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
