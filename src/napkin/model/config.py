"""The config of a model: its sizes and the layers it is made of, checked before anything is allocated.

`preset` has the configs of published models by name. Nothing here imports torch.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from napkin.bounds import Bounds
from napkin.errors import NapkinError, same_name, suggestion
from napkin.model.config_checks import TokenMixer, mixer_pattern, problems_of, round_up
from napkin.toml_files import packaged_toml

Positions = Literal["rope", "learned", "sinusoidal", "alibi", "none"]
RopePairing = Literal["halves", "interleaved"]
RopeScaling = Literal["none", "linear", "ntk", "yarn", "llama3"]
AttentionImplementation = Literal["auto", "sdpa", "plain", "flex", "flash", "compiled"]
QKNorm = Literal["none", "head", "all_heads"]
FeedForwardKind = Literal[
    "swiglu", "geglu", "geglu_tanh", "reglu", "glu", "silu", "gelu", "gelu_tanh", "relu", "relu_squared", "none"
]
NormKind = Literal["rms", "layer", "none"]
BlockKind = Literal["pre", "post", "sandwich", "reordered", "parallel"]
Biases = Literal["none", "qkv", "all"]
RouterScores = Literal["softmax", "sigmoid"]
InitialStd = Literal["fan_in", "glorot", "fixed"]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and layers of a decoder-only Transformer.

    Raises NapkinError if they do not fit together; the message names the value and a way out.
    """

    vocab_size: Annotated[int, Bounds(0, 2**24)] = 0
    """Number of token ids; 0 is the tokenizer's number, which training fills in."""

    context_length: Annotated[int, Bounds(1, 2**30)] = 256
    """Longest sequence, in tokens. 256 is about a paragraph, and keeps attention below a tenth of the FLOPs."""

    d_model: Annotated[int, Bounds(1, 2**20)] = 256
    """Width of the residual stream, in numbers per token. 256 trains in minutes on a laptop's CPU."""

    n_layers: Annotated[int, Bounds(1, 4096)] = 4
    """Number of blocks, each with one attention and one feed-forward layer. 4 are enough to learn something visible."""

    n_heads: Annotated[int, Bounds(1, 2**20)] = 4
    """Number of query heads; d_model is divided among them. 4 makes heads of 64, the usual size."""

    n_kv_heads: Annotated[int | None, Bounds(1, 2**20)] = None
    """Number of key and value heads, shared by groups of query heads (Ainslie et al. 2023); None is n_heads, 1 is
    multi-query. Fewer make the KV cache of inference smaller, which a small model does not need."""

    head_dim: Annotated[int | None, Bounds(1, 2**20)] = None
    """Width of one head; None is d_model / n_heads."""

    kv_lora_rank: Annotated[int | None, Bounds(1, 2**20)] = None
    """Width of the vector from which the keys and values of all heads of a token are made (multi-head latent attention,
    DeepSeek-V2 2024): a KV cache holds it and the rotated part of a key, in place of keys and values. None is ordinary
    attention. DeepSeek-V3 has 512."""

    q_lora_rank: Annotated[int | None, Bounds(1, 2**20)] = None
    """Width of the vector from which latent attention computes its queries; None computes them from the residual
    stream."""

    qk_nope_head_dim: Annotated[int | None, Bounds(1, 2**20)] = None
    """Width of the part of a latent attention's query or key that is not rotated; None is d_model / n_heads."""

    qk_rope_head_dim: Annotated[int | None, Bounds(1, 2**20)] = None
    """Width of the rotated part of a latent attention's query or key, which all heads of keys share; None is half of
    the other part, as in DeepSeek-V3."""

    v_head_dim: Annotated[int | None, Bounds(1, 2**20)] = None
    """Width of a latent attention's value; None is qk_nope_head_dim."""

    kv_sharing: Annotated[int, Bounds(1, 4096)] = 1
    """Consecutive layers that share the keys and values of the first of them (cross-layer attention, Brandon et al.
    2024): the others have queries of their own alone, and a KV cache holds one layer's keys and values for all of them.
    1 is none; 2 halves the cache."""

    d_ff: Annotated[int | None, Bounds(1, 2**22)] = None
    """Width of the feed-forward layer; None is 4 · d_model, and for the gated kinds 8/3 · d_model rounded up to a
    multiple of 32: with three matrices they then have as many parameters as the plain layer (Shazeer 2020), in sizes
    that fill matrix units."""

    mixers: str = "attention"
    """What mixes the tokens in each layer, a pattern that is repeated over the layers: attention, or a
    layer with a state of one size however long the sequence is: mamba2, Mamba-2's state space (Dao & Gu 2024), or
    gated_delta, Gated DeltaNet (Yang et al. 2024). Names are separated by commas and may have a number of layers:
    mamba2*5,attention is one attention layer in six."""

    state_size: Annotated[int, Bounds(1, 2**16)] = 128
    """Numbers of a key in a layer with a state: the state of a head is state_size · state_head_dim numbers."""

    state_heads: Annotated[int | None, Bounds(1, 2**20)] = None
    """Heads of a layer with a state; None is as many as make it twice as wide as d_model."""

    state_head_dim: Annotated[int, Bounds(1, 2**16)] = 64
    """Width of a head of a layer with a state: the numbers of a value."""

    state_groups: Annotated[int, Bounds(1, 2**20)] = 1
    """Groups of heads in a layer with a state; those of a group share keys and queries."""

    conv_width: Annotated[int, Bounds(2, 64)] = 4
    """Tokens that the convolution before a state sees, the last included."""

    rope_theta: Annotated[float, Bounds(1, 10**12)] = 10000.0
    """Base of the rotary wavelengths, which run from 2π to nearly 2π · rope_theta tokens. 10000 (Su et al. 2021)
    suits contexts up to about 8192; longer ones need a larger base."""

    norm_eps: Annotated[float, Bounds(1e-30, 1)] = 1e-5
    """Added to the mean square (RMSNorm) or variance (LayerNorm) so that an all-zero vector stays finite. 1e-5 is far
    below the mean squares that occur in training."""

    tie_embeddings: bool = True
    """Whether input embedding and output head are one matrix (Press & Wolf 2017). In a small model a second
    matrix would be a large part of all parameters and learn little that the first did not."""

    embedding_scale: Annotated[float | None, Bounds(1e-6, 10**6)] = None
    """Factor of the embedding at the input; None is sqrt(d_model) if it is tied, which brings the head's small numbers
    to the size that the blocks expect, and else 1."""

    positions: Positions = "rope"
    """How the model knows a token's position: rope rotates queries and keys (Su et al. 2021); learned and sinusoidal
    are added to the embedding (Radford et al. 2018; Vaswani et al. 2017); alibi lowers scores with distance (Press et
    al. 2021); none has only the causal mask (Kazemnejad et al. 2023)."""

    rope_pairing: RopePairing = "halves"
    """Which two numbers of a head are rotated together: number i of each half, or neighbours. The models differ by a
    permutation only; weights from other libraries need the pairing they were trained with."""

    rope_scaling: RopeScaling = "none"
    """How rotary wavelengths are scaled for contexts longer than the model was trained on: linear (Chen et al. 2023),
    ntk, yarn (Peng et al. 2023) or llama3 (Llama 3.1)."""

    rope_factor: Annotated[float, Bounds(1, 10**6)] = 1.0
    """Ratio of the context to rope_original_context; 1 scales nothing."""

    rope_original_context: Annotated[int | None, Bounds(1, 2**30)] = None
    """Context that the model was trained on before scaling, for yarn and llama3; None is context_length /
    rope_factor."""

    rope_length: Annotated[float | None, Bounds(1e-6, 10**6)] = None
    """Factor of the length of rotated vectors; None is the scaling's own, 0.1 · ln(rope_factor) + 1 for yarn and else
    1."""

    attention: AttentionImplementation = "auto"
    """The implementation of attention; all compute the same numbers. sdpa is torch's fused operator; plain is products
    and a softmax, and holds all scores; flex is compiled for a GPU, flash is FlashAttention-2 in Triton for a GPU (on a
    CPU: plain, and slow blocks); compiled holds a block of scores, on a CPU (elsewhere plain). auto is sdpa, or another
    that is faster: on a CPU by timing, on a GPU by plan."""

    attention_window: Annotated[int | None, Bounds(1, 2**30)] = None
    """Number of tokens that a token sees, itself included (Beltagy et al. 2020); None is all before it."""

    full_attention_every: Annotated[int | None, Bounds(2, 4096)] = None
    """Every n-th block sees all earlier tokens, the others only attention_window: 2 is every second block (Gemma 2);
    None means that no block does."""

    attention_softcap: Annotated[float | None, Bounds(1e-3, 10**6)] = None
    """Bounds scores, as cap · tanh(score / cap) (Gemma 2); None is no bound. Not available with sdpa."""

    attention_scale: Annotated[float | None, Bounds(1e-6, 10**6)] = None
    """Factor of the scores; None is 1/sqrt(head_dim). µP with heads that grow with the
    width needs sqrt(head_dim of the base model) / head_dim."""

    qk_norm: QKNorm = "none"
    """Norm of queries and keys before positions: none, one per head (Qwen 3), or over all_heads together (OLMo 2). It
    keeps scores from growing without bound."""

    feed_forward: FeedForwardKind = "swiglu"
    """The feed-forward layer: an activation between two matrices (relu, relu_squared, gelu, gelu_tanh, silu), or one
    of two products passed through it as a gate (reglu, geglu, geglu_tanh, swiglu, and glu with a sigmoid). none leaves
    it out, as Mamba does."""

    norm: NormKind = "rms"
    """rms divides by the root mean square (Zhang & Sennrich 2019), layer subtracts the mean first (Ba et al. 2016);
    none leaves norms out, to see what they are for: such a model needs a smaller learning rate."""

    block: BlockKind = "pre"
    """Where norms are: pre normalizes each layer's input (Xiong et al. 2020), post the sum after it (Vaswani et al.
    2017), sandwich its input and output, reordered its output (OLMo 2); parallel has one norm for the input of both
    layers (Wang & Komatsuzaki 2021)."""

    biases: Biases = "none"
    """Which linear layers and layer norms have a bias: none, those of queries, keys and values, or all but the head."""

    dropout: Annotated[float, Bounds(0, 0.99)] = 0.0
    """Probability of dropping a number in training, of the embedding and of all that is written into the residual
    stream. For texts that are read many times; 0 for texts read about once."""

    n_experts: Annotated[int, Bounds(0, 2**16)] = 0
    """Number of routed feed-forward layers, of which each token uses a few (Shazeer et al. 2017); 0 is one layer for
    all tokens."""

    experts_per_token: Annotated[int, Bounds(1, 2**16)] = 2
    """Routed experts per token."""

    n_shared_experts: Annotated[int, Bounds(0, 2**10)] = 0
    """Experts that every token uses in addition (Dai et al. 2024)."""

    d_expert: Annotated[int | None, Bounds(1, 2**22)] = None
    """Width of one expert; None is d_ff."""

    router: RouterScores = "softmax"
    """How a router's logits become the scores of experts: softmax over all, or sigmoid for each alone (DeepSeek-V3
    2024)."""

    router_bias: bool = False
    """Whether a bias per expert is added to the scores for choosing experts, but not for weighting them (DeepSeek-V3).
    Training does not change it."""

    n_expert_groups: Annotated[int, Bounds(1, 2**16)] = 1
    """Groups that experts are divided into; a token's experts are of few of them, by the largest score of a group, or
    with sigmoid by the sum of its two largest (DeepSeek-V2, DeepSeek-V3)."""

    expert_groups_per_token: Annotated[int, Bounds(1, 2**16)] = 1
    """Groups that a token's experts are of."""

    expert_scale: Annotated[float, Bounds(1e-6, 10**6)] = 1.0
    """Factor of the weights of a token's experts."""

    n_dense_layers: Annotated[int, Bounds(0, 4096)] = 0
    """Number of first blocks that keep one feed-forward layer for all tokens."""

    normalize_expert_weights: bool = True
    """Whether the weights of a token's experts are divided by their sum."""

    expert_capacity: Annotated[float | None, Bounds(1e-3, 10**6)] = None
    """Most tokens that an expert takes, as a multiple of an even split; the expert skips the rest (Fedus et al. 2021).
    None drops nothing."""

    balance_weight: Annotated[float, Bounds(0, 1000)] = 0.01
    """Weight of the loss that keeps experts evenly used (Fedus et al. 2021)."""

    router_z_weight: Annotated[float, Bounds(0, 1000)] = 0.001
    """Weight of the router's z-loss, which keeps its logits small (Zoph et al. 2022)."""

    z_weight: Annotated[float, Bounds(0, 1000)] = 0.0
    """Weight of the head's z-loss, the mean of logsumexp(logits)², which keeps logits from drifting (Chowdhery et al.
    2022 use 1e-4)."""

    logit_softcap: Annotated[float | None, Bounds(1e-3, 10**6)] = None
    """Bounds the head's logits, as cap · tanh(logit / cap) (Gemma 2 uses 30); None is no bound."""

    init: InitialStd = "fan_in"
    """Initial std of matrices, truncated at ±3 std: 1/sqrt(inputs) (LeCun et al. 1998), sqrt(2/(inputs +
    outputs)) (Glorot & Bengio 2010), or init_std for all, the embedding among them."""

    init_std: Annotated[float, Bounds(1e-6, 1000)] = 0.02
    """Std if init is fixed; 0.02 is GPT-2's."""

    depth_scaled: bool = True
    """Whether matrices that write into the residual stream start smaller by 1/sqrt(2 · n_layers), so that the stream
    does not grow with depth (Radford et al. 2019)."""

    mup_base_d_model: Annotated[int | None, Bounds(1, 2**20)] = None
    """Width of a small model whose learning rate suits this one too (µP, Yang et al. 2022): multipliers make every
    layer learn as fast as it would there. None has no multipliers."""

    def __post_init__(self) -> None:
        for problem in problems_of(self):
            raise NapkinError(problem)

    def resolved(self, name: str) -> Any:
        """A field by its name, with its default filled in."""
        known = (f"resolved_{name}", f"resolved_{name.removeprefix('rope_')}")
        return getattr(self, next((each for each in known if hasattr(self, each)), name))

    @property
    def resolved_head_dim(self) -> int:
        """Width of a query and of a key: head_dim with its default filled in, or both parts of latent attention's. The
        field keeps None, so that a changed copy resolves it again."""
        if self.kv_lora_rank is not None:
            return self.resolved_qk_nope_head_dim + self.resolved_qk_rope_head_dim
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def resolved_qk_nope_head_dim(self) -> int:
        """qk_nope_head_dim with its default filled in; 0 without latent attention."""
        if self.kv_lora_rank is None:
            return 0
        return self.d_model // self.n_heads if self.qk_nope_head_dim is None else self.qk_nope_head_dim

    @property
    def resolved_qk_rope_head_dim(self) -> int:
        """Width of the part of a query or key that rotary positions rotate: all of it, but in latent attention."""
        if self.kv_lora_rank is None:
            return self.resolved_head_dim
        # Pairs are rotated.
        half = 2 * max(1, self.resolved_qk_nope_head_dim // 4)
        return half if self.qk_rope_head_dim is None else self.qk_rope_head_dim

    @property
    def resolved_v_head_dim(self) -> int:
        """Width of a value: that of a key, but in latent attention."""
        if self.kv_lora_rank is None:
            return self.resolved_head_dim
        return self.resolved_qk_nope_head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def cached_widths(self) -> tuple[int, int, int]:
        """Heads that a layer's KV cache holds of a token, and the numbers of a key and of a value of each.

        Latent attention holds one vector, of which all keys and values are made.
        """
        if self.kv_lora_rank is None:
            return self.resolved_n_kv_heads, self.resolved_head_dim, self.resolved_head_dim
        return 1, self.kv_lora_rank + self.resolved_qk_rope_head_dim, 0

    @property
    def cached_numbers(self) -> int:
        """Numbers that a KV cache holds of one token, in all layers."""
        heads, key, value = self.cached_widths
        return self.n_kv_layers * heads * (key + value)

    @property
    def kv_sources(self) -> list[int]:
        """For each layer, the layer whose keys and values it reads: itself, or the first of the layers that share."""
        return [layer - layer % self.kv_sharing for layer in range(self.n_layers)]

    @property
    def n_kv_layers(self) -> int:
        """Number of layers that make keys and values, and have them in a cache."""
        return self.n_attention_layers if self.kv_sharing == 1 else len(set(self.kv_sources))

    @property
    def resolved_n_kv_heads(self) -> int:
        """n_kv_heads with its default filled in."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def layer_mixers(self) -> list[TokenMixer]:
        """The token mixer of each layer."""
        pattern = mixer_pattern(self.mixers)
        return [pattern[layer % len(pattern)] for layer in range(self.n_layers)]

    @property
    def n_attention_layers(self) -> int:
        """Number of layers whose token mixer is attention, which have keys and values in a cache."""
        return self.layer_mixers.count("attention")

    @property
    def has_states(self) -> bool:
        """True if any layer carries a state."""
        return self.n_attention_layers < self.n_layers

    @property
    def is_hybrid(self) -> bool:
        """True if layers have different token mixers."""
        return len(set(self.layer_mixers)) > 1

    @property
    def resolved_state_heads(self) -> int:
        """state_heads with its default filled in."""
        return 2 * self.d_model // self.state_head_dim if self.state_heads is None else self.state_heads

    @property
    def state_channels(self) -> int:
        """Channels of the convolution before a state: the numbers of a token's values, keys and queries."""
        return self.resolved_state_heads * self.state_head_dim + 2 * self.state_groups * self.state_size

    @property
    def attention_windows(self) -> list[int | None]:
        """The window of each layer; None is all tokens before."""
        window, every = self.attention_window, self.full_attention_every
        return [None if every and (layer + 1) % every == 0 else window for layer in range(self.n_layers)]

    @property
    def resolved_attention(self) -> Literal["sdpa", "plain", "flex", "flash", "compiled"]:
        """attention with auto resolved for no particular device: sdpa, unless there is a softcap."""
        if self.attention == "auto":
            return "sdpa" if self.attention_softcap is None else "plain"
        return self.attention

    @property
    def gated(self) -> bool:
        """True if the feed-forward layer has a gate, and so two matrices that read the input."""
        return self.feed_forward.removesuffix("_tanh").endswith("glu")

    @property
    def resolved_d_ff(self) -> int:
        """d_ff with its default filled in; 0 without feed-forward layers."""
        if self.feed_forward == "none":
            return 0
        if self.d_ff is not None:
            return self.d_ff
        return round_up(-(-8 * self.d_model // 3), 32) if self.gated else 4 * self.d_model

    @property
    def resolved_d_expert(self) -> int | None:
        """d_expert with its default filled in; None without experts."""
        if not self.n_experts:
            return None
        return self.resolved_d_ff if self.d_expert is None else self.d_expert

    @property
    def resolved_embedding_scale(self) -> float:
        """embedding_scale with its default filled in."""
        if self.embedding_scale is not None:
            return self.embedding_scale
        return (self.mup_base_d_model or self.d_model) ** 0.5 if self.tie_embeddings else 1.0

    @property
    def resolved_rope_length(self) -> float:
        """rope_length with its default filled in."""
        if self.rope_length is not None:
            return self.rope_length
        return 0.1 * math.log(self.rope_factor) + 1 if self.rope_scaling == "yarn" else 1.0

    @property
    def resolved_original_context(self) -> float:
        """rope_original_context with its default filled in."""
        return self.rope_original_context or self.context_length / self.rope_factor


@dataclass(frozen=True)
class Preset:
    """A published model; figures and sources in presets.toml."""

    name: str
    model: ModelConfig
    parameters: int
    """Number of parameters as published, each tensor counted once."""
    source: str
    """Source of the figures."""
    beyond: int = 0
    """How many of these parameters are in parts that a config cannot describe, and that `model` lacks."""


def preset(name: str, **changes: Any) -> ModelConfig:
    """The config of a published model, with some fields changed.

    >>> preset("gpt2").n_layers, preset("llama-3-8b", context_length=1024).context_length
    (12, 1024)

    Case does not matter. Raises NapkinError for a name that is not a preset.
    """
    known = presets()
    canonical = same_name(name, known)
    if canonical is None:
        raise NapkinError(f"'{name}' is not a preset: {suggestion(name, known)}")
    return dataclasses.replace(known[canonical].model, **changes)


@functools.cache
def presets() -> dict[str, Preset]:
    """Published models by name, in the order of presets.toml, which has the sources of all figures."""
    tables = packaged_toml("napkin.model", "presets.toml", dict[str, Any])
    shapes = tables.pop("shapes")
    return {name: _preset(name, table, shapes) for name, table in tables.items()}


def _preset(name: str, table: dict[str, Any], shapes: dict[str, dict[str, Any]]) -> Preset:
    own = dict(table["model"])
    model = ModelConfig(**{**shapes[own.pop("like")], **own})
    return Preset(name, model, table["parameters"], table["source"], table.get("beyond", 0))


# Matrices that can have an adapter, by the name that a recipe gives them.
ADAPTED_GROUPS = {
    "attention": ("attention.query", "attention.key", "attention.value", "attention.output"),
    "mlp": ("mlp.gate", "mlp.up", "mlp.down"),
}
ADAPTED_MATRICES = (*ADAPTED_GROUPS["attention"], *ADAPTED_GROUPS["mlp"], "head")


def adapted_matrices(name: str) -> tuple[str, ...]:
    """The matrices of a group, or the one of that name."""
    return ADAPTED_GROUPS.get(name, (name,))


def refuse_unknown_matrices(modules: Sequence[str]) -> None:
    """Raise NapkinError for a name that is neither of a group nor of a matrix."""
    known = [*ADAPTED_GROUPS, *ADAPTED_MATRICES]
    for name in modules:
        if name not in known:
            raise NapkinError(f"adapter.modules names '{name}', which is not a matrix: {suggestion(name, known)}")
