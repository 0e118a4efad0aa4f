"""Builds a model's layers from its config: each choice is looked up here, and nowhere else.

`DeepLinear` is another model: all matrix products, so the smallest on which to compare the rule 6·N·T with the count.
"""

import functools
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.model.attention import (
    ATTENTION_IMPLEMENTATIONS,
    CausalMask,
    CausalSelfAttention,
    PlainAttention,
    SharedAttention,
    SlidingWindowMask,
)
from napkin.model.block import BLOCKS, Block, BlockParts, ParallelBlock, StatefulBlock
from napkin.model.config import ModelConfig
from napkin.model.feed_forward import (
    FEED_FORWARDS,
    CapacityExperts,
    DroplessExperts,
    FeedForward,
    GatedFeedForward,
    MixtureOfExperts,
    RoutingRule,
    SharedMixtureOfExperts,
)
from napkin.model.latent_attention import LatentAttention
from napkin.model.layers import INITIAL_STDS, Linear, LinearFactory, make_dropout
from napkin.model.norm import NORMS, QK_NORMS, QUERY_NORMS, LayerNorm
from napkin.model.positions import (
    AlibiPositions,
    LearnedPositions,
    NoPositions,
    RotaryEmbedding,
    RotaryPositions,
    SinusoidalPositions,
)
from napkin.model.state_space import STATEFUL_MIXERS


class ModelBuilder:
    """Makes the layers of one model. Random draws from the generator happen in the order of the calls."""

    def __init__(self, config: ModelConfig, generator: torch.Generator) -> None:
        self.config = config
        self.generator = generator
        self.linears = LinearFactory(
            std=INITIAL_STDS.get(config.init, lambda inputs, outputs: config.init_std),
            residual_scale=(2 * config.n_layers) ** -0.5 if config.depth_scaled else 1.0,
            mup_multiplier=None if config.mup_base_d_model is None else config.mup_base_d_model / config.d_model,
            generator=generator,
        )
        norm = NORMS[config.norm]
        settings = {"bias": config.biases == "all"} if norm is LayerNorm else {}
        self.make_norm: Callable[[int], nn.Module] = functools.partial(norm, eps=config.norm_eps, **settings)

    def positions(self, embedding_rms: float) -> NoPositions:
        """The position scheme; learned positions start at `embedding_rms`, as large as the token embeddings."""
        config = self.config

        match config.positions:
            case "rope":
                return RotaryPositions(
                    RotaryEmbedding(
                        config.resolved_qk_rope_head_dim,
                        config.context_length,
                        theta=config.rope_theta,
                        pairing=config.rope_pairing,
                        scaling=config.rope_scaling,
                        factor=config.rope_factor,
                        original_context=config.resolved_original_context,
                        length=config.rope_length,
                    )
                )
            case "learned":
                return LearnedPositions(
                    config.context_length, config.d_model, std=embedding_rms, generator=self.generator
                )
            case "sinusoidal":
                return SinusoidalPositions(config.context_length, config.d_model)
            case "alibi":
                return AlibiPositions(config.n_heads)
            case "none":
                return NoPositions()

    def attention_implementations(self) -> list[PlainAttention]:
        """The implementation of attention in each layer; layers that see the same tokens share it."""
        config = self.config
        scale = config.resolved_head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        implementations = {
            window: ATTENTION_IMPLEMENTATIONS[config.resolved_attention](
                config.n_heads,
                scale=scale,
                sees=CausalMask() if window is None else SlidingWindowMask(window),
                softcap=config.attention_softcap,
            )
            for window in dict.fromkeys(config.attention_windows)
        }
        return [implementations[window] for window in config.attention_windows]

    def block(
        self, layer: int, attend: PlainAttention, positions: NoPositions
    ) -> Block | ParallelBlock | StatefulBlock:
        """Block number `layer`, counted from 0."""
        config = self.config
        mixer = config.layer_mixers[layer]
        if mixer in STATEFUL_MIXERS:
            return StatefulBlock(
                STATEFUL_MIXERS[mixer](config, linears=self.linears, generator=self.generator),
                None if config.feed_forward == "none" else self._feed_forward_of(layer),
                functools.partial(self.make_norm, config.d_model),
                functools.partial(make_dropout, config.dropout),
            )
        if config.kv_sources[layer] != layer:
            make = self._shared_attention
        else:
            make = self._attention if config.kv_lora_rank is None else self._latent_attention
        attention = make(attend, positions)
        parts = BlockParts(
            attention=attention,
            feed_forward=self._feed_forward_of(layer),
            make_norm=functools.partial(self.make_norm, config.d_model),
            make_dropout=functools.partial(make_dropout, config.dropout),
        )
        return BLOCKS[config.block](parts)

    def final_norm(self) -> nn.Module:
        """The norm before the head; an identity if the blocks end with one."""
        return nn.Identity() if BLOCKS[self.config.block].output_is_normalized else self.make_norm(self.config.d_model)

    def _feed_forward_of(self, layer: int) -> nn.Module:
        if self.config.n_experts and layer >= self.config.n_dense_layers:
            return self._experts()
        return self._feed_forward(self.config.resolved_d_ff)

    def _attention(self, attend: PlainAttention, positions: NoPositions) -> CausalSelfAttention:
        config = self.config
        n_heads, n_kv_heads, head_dim = config.n_heads, config.resolved_n_kv_heads, config.resolved_head_dim
        return CausalSelfAttention(
            config.d_model,
            n_heads,
            n_kv_heads,
            head_dim=head_dim,
            attend=attend,
            rotate=positions.rotate,
            qk_norm=QK_NORMS[config.qk_norm](n_heads, n_kv_heads, head_dim, self.make_norm),
            qkv_bias=config.biases != "none",
            output_bias=config.biases == "all",
            linears=self.linears,
        )

    def _shared_attention(self, attend: PlainAttention, positions: NoPositions) -> SharedAttention:
        config = self.config
        return SharedAttention(
            config.d_model,
            config.n_heads,
            head_dim=config.resolved_head_dim,
            attend=attend,
            rotate=positions.rotate,
            qk_norm=QUERY_NORMS[config.qk_norm](config.n_heads, config.resolved_head_dim, self.make_norm),
            query_bias=config.biases != "none",
            output_bias=config.biases == "all",
            linears=self.linears,
        )

    def _latent_attention(self, attend: PlainAttention, positions: NoPositions) -> LatentAttention:
        config = self.config
        assert config.kv_lora_rank is not None
        return LatentAttention(
            config.d_model,
            config.n_heads,
            kv_rank=config.kv_lora_rank,
            query_rank=config.q_lora_rank,
            plain_dim=config.resolved_qk_nope_head_dim,
            rotated_dim=config.resolved_qk_rope_head_dim,
            value_dim=config.resolved_v_head_dim,
            attend=attend,
            rotate=positions.rotate,
            make_norm=self.make_norm,
            linears=self.linears,
        )

    def _feed_forward(self, d_ff: int) -> FeedForward | GatedFeedForward:
        kind = FEED_FORWARDS[self.config.feed_forward]
        return kind(self.config.d_model, d_ff, bias=self.config.biases == "all", linears=self.linears)

    def _experts(self) -> nn.Module:
        config, kind = self.config, FEED_FORWARDS[self.config.feed_forward]
        d_expert = config.resolved_d_expert
        assert d_expert is not None
        sizes = config.n_experts, config.d_model, d_expert
        experts = (
            DroplessExperts(kind, *sizes, self.linears)
            if config.expert_capacity is None
            else CapacityExperts(kind, *sizes, self.linears, capacity=config.expert_capacity)
        )
        settings = {
            "experts_per_token": config.experts_per_token,
            "normalize": config.normalize_expert_weights,
            "routing": RoutingRule(
                config.router, config.n_expert_groups, config.expert_groups_per_token, config.expert_scale
            ),
            "choice_bias": config.router_bias,
            "linears": self.linears,
        }
        if not config.n_shared_experts:
            return MixtureOfExperts(config.d_model, experts, **settings)
        shared = self._feed_forward(config.n_shared_experts * d_expert)
        return SharedMixtureOfExperts(config.d_model, experts, shared, **settings)


class DeepLinear(nn.Module):
    """n_layers matrices of d_model × d_model and a head of d_model × 1, without activations.

    Raises NapkinError for sizes below 1.
    """

    def __init__(self, d_model: int, n_layers: int, *, seed: int = 0) -> None:
        super().__init__()
        for name, size in (("d_model", d_model), ("n_layers", n_layers)):
            if size < 1:
                raise NapkinError(f"{name} is {size}: use a number above 0")
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(Linear(d_model, d_model, generator=generator) for _ in range(n_layers))
        self.head = Linear(d_model, 1, generator=generator)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)
