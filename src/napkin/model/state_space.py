"""Layers that mix tokens through a state in place of attention: its size does not grow with the sequence.

A layer's forward pass is computed by chunks in training and of prompts, and token by token in generation, from the
state that the tokens before have left. Between documents that are packed into a sequence nothing is passed on.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.kernels.recurrences.convolution import causal_convolution
from napkin.kernels.recurrences.state_space import chunked_scan, scan_step
from napkin.model.attention import Documents, ForwardContext
from napkin.model.config import ModelConfig
from napkin.model.layers import LinearFactory, truncated_normal
from napkin.model.norm import RMSNorm
from napkin.model.recurrent_state import StatePass

Residual = Float[Tensor, "batch position d_model"]

# Mamba's: a head's step is first between these, in which its state forgets a part of exp(-A) (Gu & Dao 2023).
_FIRST_STEPS = 1e-3, 1e-1
_FIRST_DECAYS = 1.0, 16.0
_GOLDEN = (5**0.5 - 1) / 2


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


class Mamba2(nn.Module):
    """Mamba-2's layer (Dao & Gu 2024), with one number A per head.

    One product makes a gate, the inputs of a convolution and a step Δ per head; the convolution makes values x, keys B
    and queries C. A token's state decays by exp(Δ·A) and gets B ⊗ Δ·x; D·x is added to what C reads. The sum is gated,
    normed group by group, and multiplied with the output matrix.
    """

    def __init__(
        self, config: ModelConfig, *, linears: LinearFactory | None = None, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        linears = linears or LinearFactory(generator=generator)
        bias = config.biases == "all"
        self.n_heads, self.head_dim = config.resolved_state_heads, config.state_head_dim
        self.n_groups, self.state_size = config.state_groups, config.state_size
        width = self.n_heads * self.head_dim
        self.widths = width, config.state_channels, self.n_heads
        self.input = linears.linear(config.d_model, *self.widths, bias=bias)
        self.convolution = CausalConvolution(config.state_channels, config.conv_width, bias=True, generator=generator)
        spread = torch.linspace(0, 1, self.n_heads) if self.n_heads > 1 else torch.full((1,), 0.5)
        # Any step meets any decay: the golden ratio's multiples spread evenly.
        mixed = (torch.arange(self.n_heads) * _GOLDEN).remainder(1)
        smallest, largest = (math.log(each) for each in _FIRST_STEPS)
        steps = (smallest + mixed * (largest - smallest)).exp()
        self.step_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        first, last = _FIRST_DECAYS
        self.log_decay = nn.Parameter((first + spread * (last - first)).log())
        self.skip = nn.Parameter(torch.ones(self.n_heads))
        self.norm = GroupedRMSNorm(width, self.n_groups, eps=config.norm_eps)
        self.output = linears.residual_output(width, config.d_model, bias=bias)

    def forward(self, x: Residual, context: ForwardContext | None = None) -> Residual:
        """Mix the tokens of x; `context` has their documents, and the states before them."""
        gate, inputs, step = self.input(x).split(self.widths, dim=-1)
        states = None if context is None or context.cache is None else context.cache.states
        if states is None or context is None:
            documents = None if context is None else context.mask
            mixed, _ = self._scan(self.convolution(inputs, documents), step, documents)
        else:
            before = states.before(context.layer)
            convolved = self.convolution(inputs, states.documents, states, before.inputs)
            mixed, sums = self._scan(convolved, step, states.documents, states, before.sums)
            states.leave(context.layer, self.convolution.last_inputs(inputs, before.inputs, states), sums)
        return self.output(self.norm(mixed.flatten(2) * F.silu(gate)))

    def _scan(
        self,
        convolved: Float[Tensor, "batch position channels"],
        step: Float[Tensor, "batch position heads"],
        documents: Documents,
        states: StatePass | None = None,
        before: Tensor | None = None,
    ) -> tuple[Float[Tensor, "batch position heads head_dim"], Tensor]:
        """What the scan reads, with the skip, and the state after the last token."""
        of_keys = self.n_groups * self.state_size
        x, keys, queries = convolved.split((self.widths[0], of_keys, of_keys), dim=-1)
        x = x.unflatten(2, (self.n_heads, self.head_dim))
        keys, queries = (each.unflatten(2, (self.n_groups, self.state_size)) for each in (keys, queries))
        wide = torch.promote_types(step.dtype, torch.float32)
        step = F.softplus(step.to(wide) + self.step_bias)
        real = None if states is None else states.real
        if real is not None:
            # Padding writes nothing, and lets nothing decay.
            step = step * real[..., None]
        log_decay, values = -self.log_decay.to(wide).exp() * step, x * step[..., None].to(x.dtype)
        skipped = x * self.skip[:, None].to(x.dtype)
        if before is not None and values.shape[1] == 1 and documents is None:
            y, sums = scan_step(queries[:, 0], keys[:, 0], values[:, 0], log_decay[:, 0], before)
            return y[:, None] + skipped, sums
        of_before: Int[Tensor, " batch"] | None = None if states is None else states.document_before
        y, sums = chunked_scan(
            queries, keys, values, log_decay, state=before, documents=documents, document_before=of_before
        )
        return y + skipped, sums


STATEFUL_MIXERS: dict[str, Any] = {"mamba2": Mamba2}
"""Layers with a state by their name in `ModelConfig.mixers`; those of a table are made of a config."""
