"""Layers that mix tokens through a state in place of attention: its size does not grow with the sequence.

A layer's forward pass is computed by chunks in training and of prompts, and token by token in generation, from the
state that the tokens before have left. No state passes from one packed document to the next.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.kernels.recurrences.convolution import causal_convolution
from napkin.kernels.recurrences.delta_rule import chunked_delta_rule, delta_step
from napkin.kernels.recurrences.state_space import chunked_scan, scan_step
from napkin.model.attention import Documents, ForwardContext
from napkin.model.config import ModelConfig
from napkin.model.layers import LinearFactory, truncated_normal
from napkin.model.norm import RMSNorm
from napkin.model.recurrent_state import StatePass

Residual = Float[Tensor, "batch position d_model"]
Mixed = Float[Tensor, "batch position heads head_dim"]

# Mamba's: a head's step is first between these, in which its state forgets a part of exp(-A) (Gu & Dao 2023).
_FIRST_STEPS = 1e-3, 1e-1
_FIRST_DECAYS = 1.0, 16.0
_GOLDEN = (5**0.5 - 1) / 2
_SMALLEST_SQUARE = 1e-6
"""Added to the square of a key's length, as in Qwen3-Next, so that a key of zeros stays finite."""


class CausalConvolution(nn.Module):
    """A convolution of each channel over the last `width` tokens, and SiLU."""

    bias: Float[Tensor, " channels"] | None

    def __init__(self, channels: int, width: int, *, bias: bool, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.weight = truncated_normal(channels, 1, width, std=(3 * width) ** -0.5, generator=generator)
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)) if bias else None)

    def forward(
        self,
        x: Float[Tensor, "batch position channels"],
        documents: Documents = None,
        states: StatePass | None = None,
        before: Tensor | None = None,
    ) -> Float[Tensor, "batch position channels"]:
        """Convolve; `before` are the inputs before the first, which a sequence of `states` has."""
        of_before = None if states is None else states.document_before
        return F.silu(
            causal_convolution(x, self.weight, self.bias, before=before, documents=documents, document_before=of_before)
        )

    def last_inputs(self, x: Tensor, before: Tensor, states: StatePass) -> Tensor:
        """The inputs that the next tokens see: the last of each sequence that are not padding, zeros of others'
        documents."""
        padded = torch.cat((before.to(x.dtype), x), dim=1)
        kept = self.weight.shape[-1] - 1
        places = states.counts[:, None] + torch.arange(kept, device=x.device)
        inputs = padded.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        if states.documents is None or states.document_before is None:
            return inputs
        documents = torch.cat((states.document_before[:, None].expand(-1, kept), states.documents), dim=1)
        of = documents.gather(1, places)
        return inputs * (of == of[:, -1:])[..., None]


class GroupedRMSNorm(RMSNorm):
    """A norm of each group of heads by itself, with one gain for each number."""

    def __init__(self, width: int, n_groups: int, *, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.n_groups = n_groups

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.n_groups == 1:
            return self.normalize(x, self.gain, self.eps)
        parts = x.unflatten(-1, (self.n_groups, -1))
        normed = self.normalize(parts, self.gain.new_ones(parts.shape[-1]), self.eps)
        return normed.flatten(-2) * self.gain.to(x.dtype)


class StatefulMixer(nn.Module):
    """The parts that layers with a state have in common: a product that makes a gate, the inputs of a convolution and
    some numbers per head; the convolution, which makes values, keys and queries; an output matrix.

    A subclass mixes the tokens, and gates and norms the result.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        numbers_per_head: int,
        convolution_bias: bool,
        linears: LinearFactory | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        linears = linears or LinearFactory(generator=generator)
        bias = config.biases == "all"
        self.n_heads, self.head_dim = config.resolved_state_heads, config.state_head_dim
        self.n_groups, self.state_size = config.state_groups, config.state_size
        width = self.n_heads * self.head_dim
        self.widths = width, config.state_channels, *(self.n_heads,) * numbers_per_head
        self.input = linears.linear(config.d_model, *self.widths, bias=bias)
        self.convolution = CausalConvolution(
            config.state_channels, config.conv_width, bias=convolution_bias, generator=generator
        )
        spread = torch.linspace(0, 1, self.n_heads) if self.n_heads > 1 else torch.full((1,), 0.5)
        # Any step meets any decay: the golden ratio's multiples spread evenly.
        mixed = (torch.arange(self.n_heads) * _GOLDEN).remainder(1)
        smallest, largest = (math.log(each) for each in _FIRST_STEPS)
        steps = (smallest + mixed * (largest - smallest)).exp()
        self.step_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        first, last = _FIRST_DECAYS
        self.log_decay = nn.Parameter((first + spread * (last - first)).log())
        self.output = linears.residual_output(width, config.d_model, bias=bias)

    def forward(self, x: Residual, context: ForwardContext | None = None) -> Residual:
        """Mix the tokens of x; `context` has their documents, and the states before them."""
        gate, inputs, *per_head = self.input(x).split(self.widths, dim=-1)
        states = None if context is None or context.cache is None else context.cache.states
        if states is None or context is None:
            documents = None if context is None else context.mask
            mixed, _ = self.mix(self.convolution(inputs, documents), per_head, documents)
        else:
            before = states.before(context.layer)
            convolved = self.convolution(inputs, states.documents, states, before.inputs)
            mixed, sums = self.mix(convolved, per_head, states.documents, states, before.sums)
            states.leave(context.layer, self.convolution.last_inputs(inputs, before.inputs, states), sums)
        return self.output(self.gated(mixed, gate))

    def mix(
        self,
        convolved: Float[Tensor, "batch position channels"],
        per_head: list[Tensor],
        documents: Documents,
        states: StatePass | None = None,
        before: Tensor | None = None,
    ) -> tuple[Mixed, Tensor]:
        """The tokens' readings of the state, and the state after the last token."""
        raise NotImplementedError

    def gated(self, mixed: Mixed, gate: Float[Tensor, "batch position width"]) -> Float[Tensor, "batch position width"]:
        """The readings, gated and normed."""
        raise NotImplementedError

    def parted(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values by head, keys and queries by group."""
        of_keys = self.n_groups * self.state_size
        values, keys, queries = convolved.split((self.widths[0], of_keys, of_keys), dim=-1)
        keys, queries = (each.unflatten(2, (self.n_groups, self.state_size)) for each in (keys, queries))
        return values.unflatten(2, (self.n_heads, self.head_dim)), keys, queries

    def steps(self, raw: Float[Tensor, "batch position heads"], states: StatePass | None) -> tuple[Tensor, Tensor]:
        """The steps of each head in fp32 or wider, 0 for padding, and the log decays that they make."""
        wide = torch.promote_types(raw.dtype, torch.float32)
        step = F.softplus(raw.to(wide) + self.step_bias)
        if states is not None and states.real is not None:
            # Padding does not decay the state.
            step = step * states.real[..., None]
        return step, -self.log_decay.to(wide).exp() * step


class Mamba2(StatefulMixer):
    """Mamba-2's layer (Dao & Gu 2024), with one number A per head.

    The convolution makes values x, keys B and queries C; a step Δ per head comes of the input. A token's state decays
    by exp(Δ·A) and gets B ⊗ Δ·x; D·x is added to what C reads. The sum is gated, then normed group by group.
    """

    def __init__(
        self, config: ModelConfig, *, linears: LinearFactory | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(config, numbers_per_head=1, convolution_bias=True, linears=linears, generator=generator)
        self.skip = nn.Parameter(torch.ones(self.n_heads))
        self.norm = GroupedRMSNorm(self.widths[0], self.n_groups, eps=config.norm_eps)

    def gated(self, mixed: Mixed, gate: Float[Tensor, "batch position width"]) -> Float[Tensor, "batch position width"]:
        return self.norm(mixed.flatten(2) * F.silu(gate))

    def mix(
        self,
        convolved: Float[Tensor, "batch position channels"],
        per_head: list[Tensor],
        documents: Documents,
        states: StatePass | None = None,
        before: Tensor | None = None,
    ) -> tuple[Mixed, Tensor]:
        x, keys, queries = self.parted(convolved)
        step, log_decay = self.steps(per_head[0], states)
        values = x * step[..., None].to(x.dtype)
        skipped = x * self.skip[:, None].to(x.dtype)
        if before is not None and values.shape[1] == 1 and documents is None:
            y, sums = scan_step(queries[:, 0], keys[:, 0], values[:, 0], log_decay[:, 0], before)
            return y[:, None] + skipped, sums
        of_before: Int[Tensor, " batch"] | None = None if states is None else states.document_before
        y, sums = chunked_scan(
            queries, keys, values, log_decay, state=before, documents=documents, document_before=of_before
        )
        return y + skipped, sums


class GatedDeltaNet(StatefulMixer):
    """Gated DeltaNet (Yang et al. 2024), as in Qwen3-Next.

    Keys and queries are normed to length 1, and queries divided by sqrt(state_size). A token moves what the state has
    under its key towards its value, by a rate between 0 and 1 per head. What is read is normed head by head, with one
    gain for all, then gated.
    """

    def __init__(
        self, config: ModelConfig, *, linears: LinearFactory | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(config, numbers_per_head=2, convolution_bias=False, linears=linears, generator=generator)
        self.norm = RMSNorm(self.head_dim, eps=config.norm_eps)

    def gated(self, mixed: Mixed, gate: Float[Tensor, "batch position width"]) -> Float[Tensor, "batch position width"]:
        return self.norm(mixed).flatten(2) * F.silu(gate)

    def mix(
        self,
        convolved: Float[Tensor, "batch position channels"],
        per_head: list[Tensor],
        documents: Documents,
        states: StatePass | None = None,
        before: Tensor | None = None,
    ) -> tuple[Mixed, Tensor]:
        values, keys, queries = self.parted(convolved)
        keys, queries = _of_length_1(keys), _of_length_1(queries) * self.state_size**-0.5
        _, log_decay = self.steps(per_head[0], states)
        rates = per_head[1].to(log_decay.dtype).sigmoid()
        if states is not None and states.real is not None:
            # Padding writes nothing.
            rates = rates * states.real[..., None]
        if before is not None and values.shape[1] == 1 and documents is None:
            of_token = queries[:, 0], keys[:, 0], values[:, 0]
            y, sums = delta_step(*of_token, log_decay[:, 0].exp(), rates[:, 0], before)
            return y[:, None], sums
        of_before: Int[Tensor, " batch"] | None = None if states is None else states.document_before
        return chunked_delta_rule(
            queries, keys, values, log_decay, rates, state=before, documents=documents, document_before=of_before
        )


def _of_length_1(x: Tensor) -> Tensor:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + _SMALLEST_SQUARE)).to(x.dtype)


STATEFUL_MIXERS: dict[str, type[Mamba2] | type[GatedDeltaNet]] = {"mamba2": Mamba2, "gated_delta": GatedDeltaNet}
"""Layers with a state by their name in `ModelConfig.mixers`."""
