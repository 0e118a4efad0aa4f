"""Feed-forward layers (MLPs), which act on each position by itself.

`FeedForward` puts an activation between two matrices; `GatedFeedForward` multiplies its input by two matrices and
passes one product through the activation as a gate for the other. The kinds differ in their activation.

A mixture of experts is many feed-forward layers, to a few of which a router sends each token (Shazeer et al. 2017). An
assignment is a pair of a token and an expert: each token has experts_per_token assignments.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.kernels.pointwise.activations import gelu_tanh, swiglu
from napkin.kernels.products.grouped import grouped_matmul
from napkin.model.layers import Device, Linear, LinearFactory, moved

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """down(activation(up(x)))."""

    activation: ClassVar[Activation]
    n_up: ClassVar[int] = 1
    """Number of matrices that read the input."""

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        bias: bool = False,
        linears: LinearFactory | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linears = (linears or LinearFactory()).on(device, dtype)
        self.up = linears.linear(d_model, d_ff, bias=bias)
        self.down = linears.residual_output(d_ff, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return self.down(self.activate(self.up(x)))

    @classmethod
    def activate(cls, up: Float[Tensor, "*batch d_ff"]) -> Float[Tensor, "*batch d_ff"]:
        """The numbers between the matrices."""
        return cls.activation(up)


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)) (Shazeer 2020)."""

    activation: ClassVar[Activation]
    n_up: ClassVar[int] = 2

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        bias: bool = False,
        linears: LinearFactory | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        linears = (linears or LinearFactory()).on(device, dtype)
        self.gate_up = linears.linear(d_model, d_ff, d_ff, bias=bias)
        self.down = linears.residual_output(d_ff, d_model, bias=bias)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return self.down(self.activate(self.gate_up(x)))

    @classmethod
    def activate(cls, gate_up: Float[Tensor, "*batch two_d_ff"]) -> Float[Tensor, "*batch d_ff"]:
        """The numbers between the matrices; the gate comes first."""
        gate, up = gate_up.chunk(2, dim=-1)
        return cls.activation(gate) * up


class ReLU(FeedForward):
    """max(z, 0)."""

    activation = staticmethod(F.relu)


class SquaredReLU(FeedForward):
    """max(z, 0)² (So et al. 2021)."""

    @staticmethod
    def activation(z: Tensor) -> Tensor:
        return F.relu(z).square()


class GELU(FeedForward):
    """z · Φ(z), with the normal distribution's Φ (Hendrycks & Gimpel 2016)."""

    activation = staticmethod(F.gelu)


class TanhGELU(FeedForward):
    """GELU with Φ(z) as (1 + tanh(sqrt(2/π) · (z + 0.044715 · z³))) / 2: GPT-2's."""

    activation = staticmethod(gelu_tanh)


class SiLU(FeedForward):
    """z · sigmoid(z)."""

    activation = staticmethod(F.silu)


class GLU(GatedFeedForward):
    """A sigmoid for a gate (Dauphin et al. 2016)."""

    activation = staticmethod(torch.sigmoid)


class ReGLU(GatedFeedForward):
    """A gated layer with ReLU for its gate."""

    activation = staticmethod(F.relu)


class GEGLU(GatedFeedForward):
    """A gated layer with GELU for its gate."""

    activation = staticmethod(F.gelu)


class TanhGEGLU(GatedFeedForward):
    """The approximate GELU for a gate (Gemma)."""

    activation = staticmethod(TanhGELU.activation)


class SwiGLU(GatedFeedForward):
    """SiLU for a gate; its activation is computed again in the backward pass instead of being kept."""

    activation = staticmethod(F.silu)

    @classmethod
    def activate(cls, gate_up: Float[Tensor, "*batch two_d_ff"]) -> Float[Tensor, "*batch d_ff"]:
        return swiglu(gate_up)


FEED_FORWARDS: dict[str, type[FeedForward] | type[GatedFeedForward]] = {
    "swiglu": SwiGLU,
    "geglu": GEGLU,
    "geglu_tanh": TanhGEGLU,
    "reglu": ReGLU,
    "glu": GLU,
    "silu": SiLU,
    "gelu": GELU,
    "gelu_tanh": TanhGELU,
    "relu": ReLU,
    "relu_squared": SquaredReLU,
}


Kind = type[FeedForward] | type[GatedFeedForward]


@dataclass(frozen=True)
class Routing:
    """The choices of a router for the tokens of one forward pass."""

    balance_loss: Float[Tensor, ""]
    """n_experts · Σ fraction of assignments · mean probability, over experts: 1 if both are even (Fedus et al. 2021,
    equations 4 to 6)."""
    z_loss: Float[Tensor, ""]
    """The mean of logsumexp(logits)² (Zoph et al. 2022, equation 5)."""
    tokens_per_expert: Int[Tensor, " n_experts"]
    """Number of assignments that the router made, dropped ones included."""
    dropped: Int[Tensor, ""]
    """Assignments dropped because their expert was full."""

    def detach(self) -> "Routing":
        """A copy without the autograd graph."""
        return Routing(self.balance_loss.detach(), self.z_loss.detach(), self.tokens_per_expert, self.dropped)

    def __deepcopy__(self, memo: dict) -> "Routing":
        """Itself: a record of the past, which a copy of the model does not change."""
        return self


@dataclass(frozen=True)
class RoutingRule:
    """The rule by which a router's logits choose a token's experts and weigh them."""

    scores: str = "softmax"
    """softmax over all experts, or sigmoid for each."""
    n_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    """Factor of the weights."""

    def probabilities(
        self, logits: Float[Tensor, "token n_experts"]
    ) -> tuple[Float[Tensor, "token n_experts"], Float[Tensor, "token n_experts"]]:
        """Scores of experts, and the scores normalised to a sum of 1."""
        if self.scores == "softmax":
            scores = logits.softmax(dim=-1)
            return scores, scores
        scores = logits.sigmoid()
        return scores, scores / scores.sum(dim=-1, keepdim=True)

    def choose(
        self, scores: Float[Tensor, "token n_experts"], bias: Float[Tensor, " n_experts"] | None, k: int
    ) -> tuple[Float[Tensor, "token choice"], Int[Tensor, "token choice"]]:
        """The scores of a token's experts and their numbers, by score and bias, the first first."""
        if bias is None and self.n_groups == 1:
            return scores.topk(k, dim=-1)
        ranked = scores.detach() if bias is None else scores.detach() + bias.detach()
        if self.n_groups > 1:
            grouped = ranked.unflatten(-1, (self.n_groups, -1))
            # DeepSeek-V3 sums two, DeepSeek-V2 takes the largest.
            of_groups = grouped.topk(2 if self.scores == "sigmoid" else 1, dim=-1).values.sum(dim=-1)
            best = of_groups.topk(self.groups_per_token, dim=-1).indices
            left_out = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, best, False)
            ranked = grouped.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)
        chosen = ranked.topk(k, dim=-1).indices
        return scores.gather(-1, chosen), chosen


class MixtureOfExperts(nn.Module):
    """The weighted sum of the outputs of each token's chosen experts.

    Logits and probabilities are fp32 (Fedus et al. 2021, section 2.4). `device` and `dtype` are those of the whole
    layer: experts that are not there are moved.
    """

    def __init__(
        self,
        d_model: int,
        experts: "DroplessExperts | CapacityExperts",
        *,
        experts_per_token: int,
        normalize: bool = True,
        routing: RoutingRule | None = None,
        choice_bias: bool = False,
        linears: LinearFactory | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.n_experts = len(experts.up)
        self.rule = routing or RoutingRule()
        self.experts_per_token = experts_per_token
        self.normalize_weights = normalize
        linears = (linears or LinearFactory()).on(device, dtype)
        self.router = Linear(
            d_model, self.n_experts, generator=linears.generator, device=linears.device, dtype=linears.dtype
        )
        zeros = torch.zeros(self.n_experts, device=linears.device, dtype=linears.dtype)
        self.choice_bias = nn.Parameter(zeros) if choice_bias else None
        """Is added to scores where experts are chosen, which has no gradient: an optimizer leaves it as it is."""
        self.experts = moved(experts, device, dtype)
        self._routing: Routing | None = None

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        mixed, self._routing = self.mix(x)
        return mixed

    def mix(self, x: Float[Tensor, "*batch d_model"]) -> tuple[Float[Tensor, "*batch d_model"], Routing]:
        """The experts' output for each token, and how it was routed; tensor parallelism wraps this."""
        tokens = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            logits = self.router(tokens.to(self.router.weight.dtype)).float()
        scores, probabilities = self.rule.probabilities(logits)
        likeliest, chosen = self.rule.choose(scores, self.choice_bias, self.experts_per_token)
        counts = chosen.new_zeros(self.n_experts).scatter_add(0, chosen.flatten(), torch.ones_like(chosen).flatten())
        outputs, dropped = self.experts(tokens, chosen, counts)
        routing = Routing(
            balance_loss=self.n_experts * (counts / chosen.numel() * probabilities.mean(dim=0)).sum(),
            z_loss=logits.logsumexp(dim=-1).square().mean(),
            tokens_per_expert=counts,
            dropped=dropped,
        )
        weights = likeliest / likeliest.sum(dim=-1, keepdim=True) if self.normalize_weights else likeliest
        weights = weights if self.rule.scale == 1 else weights * self.rule.scale
        if self.choice_bias is not None:
            # A gradient of zeros, as every parameter of a step has one.
            weights = weights + 0 * self.choice_bias.sum()
        mixed = (outputs.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        return mixed.to(x.dtype).view(x.shape), routing

    def take_routing(self) -> Routing:
        """The routing of the last forward pass; the first call after it has the autograd graph, later ones only the
        figures.

        Raises NapkinError if there was no forward pass.
        """
        if self._routing is None:
            raise NapkinError("nothing has been routed yet: run the model first")
        taken, self._routing = self._routing, self._routing.detach()
        return taken


class SharedMixtureOfExperts(MixtureOfExperts):
    """A mixture, plus one feed-forward layer for every token (Dai et al. 2024)."""

    def __init__(
        self,
        d_model: int,
        experts: "DroplessExperts | CapacityExperts",
        shared: FeedForward | GatedFeedForward,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(d_model, experts, device=device, dtype=dtype, **settings)
        self.shared = moved(shared, device, dtype)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch d_model"]:
        return self.shared(x) + super().forward(x)


class Experts(nn.Module):
    """n feed-forward layers of one kind, held in two parameters."""

    up: Float[Tensor, "n_experts n_up_d_expert d_model"]
    down: Float[Tensor, "n_experts d_model d_expert"]

    def __init__(self, kind: Kind, n: int, d_model: int, d_expert: int, linears: LinearFactory) -> None:
        super().__init__()
        self.activate = kind.activate
        self.up = linears.expert_stack(n, d_model, d_expert, parts=kind.n_up)
        self.down = linears.expert_stack(n, d_expert, d_model, into_residual=True)

    def matrices(self) -> tuple[Float[Tensor, "n n_up_d_expert d_model"], Float[Tensor, "n d_model d_expert"]]:
        """The matrices of the experts that are computed here: of all, unless ranks divide them."""
        return self.up, self.down


class DroplessExperts(Experts):
    """Each expert takes all the tokens that were sent to it: the assignments are sorted by expert."""

    multiply_groups: Callable[..., Tensor] = staticmethod(grouped_matmul)
    """The form of the products of all experts."""

    def forward(
        self, x: Float[Tensor, "token d_model"], chosen: Int[Tensor, "token choice"], counts: Int[Tensor, " n_experts"]
    ) -> tuple[Float[Tensor, "assignment d_model"], Int[Tensor, ""]]:
        """The outputs of each token's experts, token by token, and 0: none was dropped."""
        order = chosen.flatten().argsort(stable=True)
        outputs = self.compute(x.index_select(0, order // chosen.shape[1]), counts)
        return outputs.index_select(0, order.argsort()), torch.zeros_like(counts[0])

    def compute(
        self, rows: Float[Tensor, "assignment d_model"], counts: Int[Tensor, " n_experts"]
    ) -> Float[Tensor, "assignment d_model"]:
        """The experts' output for rows sorted by expert, of which each has as many as `counts` says."""
        starts, (up, down) = counts.cumsum(0) - counts, self.matrices()
        return self.multiply_groups(self.activate(self.multiply_groups(rows, up, starts)), down, starts)


class CapacityExperts(Experts):
    """Each expert takes at most as many tokens as its capacity; first choices go before second ones."""

    def __init__(
        self, kind: Kind, n: int, d_model: int, d_expert: int, linears: LinearFactory, *, capacity: float
    ) -> None:
        super().__init__(kind, n, d_model, d_expert, linears)
        self.capacity = capacity

    def forward(
        self, x: Float[Tensor, "token d_model"], chosen: Int[Tensor, "token choice"], counts: Int[Tensor, " n_experts"]
    ) -> tuple[Float[Tensor, "assignment d_model"], Int[Tensor, ""]]:
        """The outputs of each token's experts, token by token, 0 where it was dropped, and the number of dropped
        assignments."""
        n_experts, (n_tokens, n_choices) = len(counts), chosen.shape
        room = math.ceil(self.capacity * chosen.numel() / n_experts)
        experts = chosen.T.flatten()
        before = F.one_hot(experts, n_experts).cumsum(0).gather(1, experts[:, None])[:, 0] - 1
        fits = before < room
        # An extra row beyond the experts' capacity takes dropped tokens.
        rows = (experts * room + before).where(fits, n_experts * room)
        dispatched = x.new_zeros(n_experts * room + 1, x.shape[1]).index_copy(0, rows, x.repeat(n_choices, 1))
        outputs = self.compute(dispatched[:-1].view(n_experts, room, -1)).flatten(0, 1)
        by_token = rows.view(n_choices, n_tokens).T.flatten()
        return F.pad(outputs, (0, 0, 0, 1)).index_select(0, by_token), (~fits).sum()

    def compute(self, inputs: Float[Tensor, "n_experts room d_model"]) -> Float[Tensor, "n_experts room d_model"]:
        up, down = self.matrices()
        return torch.bmm(self.activate(torch.bmm(inputs, up.transpose(1, 2))), down.transpose(1, 2))
