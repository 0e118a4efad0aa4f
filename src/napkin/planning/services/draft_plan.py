"""A draft model beside the model of a service: its bytes, the tokens of a pass, and the seconds that it gains.

The tokens that a pass of the model is expected to give are Leviathan et al.'s (2023, equation 1), of an acceptance that
was measured or is assumed; a pass takes the draft's steps and one of the model over a token and its proposals.
"""

from dataclasses import dataclass
from typing import Any

import torch

from napkin.errors import NapkinError
from napkin.inference.paged_cache import KVFormat, bytes_per_token
from napkin.inference.service_load import ServiceLoad
from napkin.inference.settings import MOST_PROPOSED
from napkin.inference.speculation import expected_tokens
from napkin.model.config import ModelConfig
from napkin.model.quantized import weight_bytes_of
from napkin.model.transformer import Transformer
from napkin.planning.services.replica import Replica, count_parameters
from napkin.planning.services.server_schedule import Load
from napkin.planning.services.this_machine import StepSeconds, probe_steps


@dataclass(frozen=True)
class DraftPlan:
    """The costs of a draft model, and the gain of its proposals."""

    parameters: int
    weight_bytes: float
    """Bytes of the draft's weights, on all ranks of a replica together."""
    kv_bytes_per_sequence: float
    """Bytes of a sequence at its longest in the draft's cache, on all ranks together."""
    acceptance: float
    proposed: int
    tokens_per_pass: float
    """Expected tokens of a sequence per pass of the model."""
    draft_seconds: float
    """Seconds of the draft before one pass, where as many sequences run as in the best degree."""
    pass_seconds: float
    """Seconds of the pass, over a token and its proposals."""
    plain_seconds: float
    """Seconds of a step of as many sequences without a draft."""

    @property
    def improvement(self) -> float:
        """Tokens per second while decoding, over those without a draft."""
        return self.tokens_per_pass * self.plain_seconds / (self.draft_seconds + self.pass_seconds)


def config_of(model: ModelConfig | Transformer) -> ModelConfig:
    """The config of a model, or a config itself."""
    return model.config if isinstance(model, Transformer) else model


@dataclass(frozen=True)
class Drafting:
    """A draft of the engine of this machine."""

    model: ModelConfig | Transformer
    acceptance: float
    proposed: int

    @property
    def tokens_per_pass(self) -> float:
        """Expected tokens of a sequence per pass of the model."""
        return expected_tokens(self.acceptance, self.proposed)

    @property
    def parameters(self) -> int:
        """Parameters of the draft."""
        return count_parameters(config_of(self.model))

    def bytes_per_token(self, dtype: torch.dtype, kv: KVFormat) -> int:
        """Bytes per token in the draft's cache; `dtype` is for a draft that is given as a config only."""
        return bytes_per_token(config_of(self.model), self._dtype(dtype), kv)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of its weights."""
        if isinstance(self.model, Transformer):
            return weight_bytes_of(self.model)
        return self.parameters * dtype.itemsize

    def probe(self, load: ServiceLoad, running: int, chunk: int, dtype: torch.dtype, **how: Any) -> StepSeconds:
        """Time its steps."""
        given = self.model if isinstance(self.model, Transformer) else None
        return probe_steps(config_of(self.model), load, running, chunk, self._dtype(dtype), model=given, **how)

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.model.dtype if isinstance(self.model, Transformer) else dtype


def refuse_draft(
    config: ModelConfig, draft: ModelConfig | Transformer | None, acceptance: float | None, proposed: int
) -> None:
    """Raise NapkinError for a draft that cannot propose the model's tokens, or about which too little is known."""
    if draft is None:
        if acceptance is not None:
            raise NapkinError(f"acceptance is {acceptance} and there is no draft: name one, or leave acceptance out")
        return
    own = config_of(draft)
    if config.has_states:
        raise NapkinError(
            f"mixers is '{config.mixers}': tokens are not taken back from a state, so that none are proposed: leave "
            "the draft out"
        )
    if acceptance is None:
        raise NapkinError(
            "a draft is named and not its acceptance: measure it with napkin generate --draft, or assume one, 0 to 1"
        )
    if not 0 <= acceptance <= 1:
        raise NapkinError(f"acceptance is {acceptance}: use a share of the proposals, 0 to 1")
    if not 1 <= proposed <= MOST_PROPOSED:
        raise NapkinError(f"proposed is {proposed}: use 1 to {MOST_PROPOSED}")
    if own.has_states:
        raise NapkinError(f"mixers of the draft is '{own.mixers}': use a draft with attention in all layers")
    if own.vocab_size != config.vocab_size:
        raise NapkinError(
            f"the draft has {own.vocab_size:,} tokens, the model {config.vocab_size:,}: use a draft with the same "
            "tokenizer"
        )
    if own.context_length < config.context_length:
        raise NapkinError(
            f"the draft has a context of {own.context_length:,} tokens, the model {config.context_length:,}: use a "
            "draft with at least as many"
        )


def draft_on_devices(replica: Replica, running: float, load: Load) -> DraftPlan:
    """Costs and gain of a replica's draft, with this many running sequences."""
    draft, drafting = replica.draft, replica.drafting
    assert draft is not None
    assert drafting is not None
    context, longest = load.input_tokens + load.output_tokens / 2, load.input_tokens + load.output_tokens
    return DraftPlan(
        draft.work.parameters,
        drafting.weight_bytes * replica.tensor,
        draft.work.kept(longest) * drafting.kv_token_bytes * replica.tensor,
        draft.acceptance,
        draft.proposed,
        draft.tokens_per_pass,
        draft_seconds=float(replica.proposal_seconds(running, context)),
        pass_seconds=float(replica.tested_seconds(running, context)),
        plain_seconds=float(replica.model_seconds(running, context)),
    )
