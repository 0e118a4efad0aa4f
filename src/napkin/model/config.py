"""The shape of a model: every size and every kind of part that can be chosen, checked before anything is allocated."""

from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError

Positions = Literal["rope", "learned", "sinusoidal", "alibi", "none"]
RopePairing = Literal["halves", "interleaved"]
RopeScaling = Literal["none", "linear", "ntk", "yarn", "llama3"]
AttentionImplementation = Literal["auto", "sdpa", "plain", "flex"]
QKNorm = Literal["none", "head", "all_heads"]
FeedForwardKind = Literal[
    "swiglu", "geglu", "geglu_tanh", "reglu", "glu", "silu", "gelu", "gelu_tanh", "relu", "relu_squared"
]
NormKind = Literal["rms", "layer"]
BlockKind = Literal["pre", "post", "sandwich", "reordered", "parallel"]
Biases = Literal["none", "qkv", "all"]
InitialStd = Literal["fan_in", "glorot", "fixed"]


_MAY_BE_ZERO = frozenset(
    "vocab_size dropout n_experts n_shared_experts n_dense_layers balance_weight router_z_weight z_weight".split()
)


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and parts of a decoder-only Transformer.

    Raises NapkinError where they cannot be one model.
    """

    vocab_size: int = 0
    """Number of token ids; 0 is as many as the tokenizer has, which training fills in."""

    context_length: int = 256
    """Most tokens that a sequence may hold. 256 is a paragraph, and keeps attention below a tenth of the FLOPs."""

    d_model: int = 256
    """Width of the residual stream, in numbers per token. 256 trains in minutes on a laptop's CPU."""

    n_layers: int = 4
    """Number of blocks, each one attention and one feed-forward. 4 is enough to be worth watching learn."""

    n_heads: int = 4
    """Number of query heads; d_model is divided among them. 4 makes heads of 64, the usual size."""

    n_kv_heads: int | None = None
    """Number of key and value heads, shared by groups of query heads (Ainslie et al. 2023); None is n_heads, 1 is
    multi-query. Fewer shrink the KV cache of inference, which a small model does not need."""

    head_dim: int | None = None
    """Width of one head; None is d_model / n_heads."""

    d_ff: int | None = None
    """Width of the feed-forward layer; None is 4 · d_model, and for the gated kinds 8/3 · d_model rounded up to a
    multiple of 32: with their three matrices they then have the parameters of the plain layer (Shazeer 2020), in
    shapes that fill matrix units."""

    rope_theta: float = 10000.0
    """Base of the rotary wavelengths, which run from 2π to nearly 2π · rope_theta tokens. 10000 (Su et al. 2021)
    suits contexts up to about 8192; longer ones want more."""

    norm_eps: float = 1e-5
    """Added to the mean square (RMSNorm) or variance (LayerNorm) so that an all-zero vector stays finite. 1e-5 is far
    below any mean square met in training."""

    tie_embeddings: bool = True
    """Whether input embedding and output head are one matrix (Press & Wolf 2017). In a small model a second
    one would hold a good part of all parameters and learn little that the first did not."""

    embedding_scale: float | None = None
    """Factor of the embedding on its way in; None is sqrt(d_model) where it is tied, which brings the head's small
    numbers to the size that the blocks expect, and 1 elsewhere."""

    positions: Positions = "rope"
    """How a token's place is known: rope turns queries and keys (Su et al. 2021); learned and sinusoidal are added to
    the embedding (Radford et al. 2018; Vaswani et al. 2017); alibi lowers scores with distance (Press et al. 2021);
    none leaves it to the causal mask (Kazemnejad et al. 2023)."""

    rope_pairing: RopePairing = "halves"
    """Which two numbers of a head turn together: number i of each half, or neighbours. The same model up to a
    permutation; weights from elsewhere want theirs."""

    rope_scaling: RopeScaling = "none"
    """How rotary wavelengths are stretched beyond the context that they were trained on: linear (Chen et al. 2023),
    ntk, yarn (Peng et al. 2023) or llama3 (Llama 3.1)."""

    rope_factor: float = 1.0
    """How many times longer the context is than rope_original_context; 1 stretches nothing."""

    rope_original_context: int | None = None
    """Context that a scaled rope was trained on, for yarn and llama3; None is context_length / rope_factor."""

    attention: AttentionImplementation = "auto"
    """What computes attention, the same numbers each: torch's fused sdpa; plain, matrix products and a softmax, which
    holds all scores and is fastest in bf16 up to a few hundred tokens on a CPU; flex, compiled for a GPU (a CPU has no
    backward pass of it, there the plain form stands in). auto is sdpa, or what a run finds faster for its shape."""

    attention_window: int | None = None
    """Most tokens per token sees, itself included (Beltagy et al. 2020); None is all before it."""

    attention_softcap: float | None = None
    """Bound that scores approach as cap · tanh(score / cap) (Gemma 2); None is no bound. Not with sdpa."""

    attention_scale: float | None = None
    """Factor of the scores; None is 1/sqrt(head_dim). µP with heads that widen wants
    sqrt(head_dim of the base model) / head_dim."""

    qk_norm: QKNorm = "none"
    """Norm of queries and keys before positions: none, of each head (Qwen 3) or over all_heads together (OLMo 2). It
    keeps scores from growing without bound."""

    feed_forward: FeedForwardKind = "swiglu"
    """The feed-forward layer: an activation between two matrices (relu, relu_squared, gelu, gelu_tanh, silu), or one
    of two products passed through it as a gate (reglu, geglu, geglu_tanh, swiglu, and glu with a sigmoid)."""

    norm: NormKind = "rms"
    """rms divides by the root mean square (Zhang & Sennrich 2019), layer takes the mean off first (Ba et al. 2016)."""

    block: BlockKind = "pre"
    """Where norms stand: pre reads through them (Xiong et al. 2020), post normalises the sum (Vaswani et al. 2017),
    sandwich reads and writes through them, reordered writes through them (OLMo 2), parallel reads once for both layers
    (Wang & Komatsuzaki 2021)."""

    biases: Biases = "none"
    """Which linear layers and layer norms add a bias: none, those of queries, keys and values, or all but the head."""

    dropout: float = 0.0
    """Share of numbers dropped in training, of the embedding and of all that is written into the residual stream. For
    texts that are read many times; 0 for those read about once."""

    n_experts: int = 0
    """Number of routed feed-forward layers, of which each token visits a few (Shazeer et al. 2017); 0 is one layer
    for all tokens."""

    experts_per_token: int = 2
    """Experts that a token visits."""

    n_shared_experts: int = 0
    """Experts that every token visits besides (Dai et al. 2024)."""

    d_expert: int | None = None
    """Width of one expert; None is d_ff."""

    n_dense_layers: int = 0
    """Blocks at the start that keep one feed-forward layer for all tokens."""

    normalize_expert_weights: bool = True
    """Whether the weights of a token's experts are divided by their sum."""

    expert_capacity: float | None = None
    """Most tokens that an expert takes, as a multiple of an even share; the rest is dropped and passes by (Fedus et al.
    2021). None drops nothing."""

    balance_weight: float = 0.01
    """Weight of the loss that keeps experts evenly used (Fedus et al. 2021)."""

    router_z_weight: float = 0.001
    """Weight of the router's z-loss, which keeps its logits small (Zoph et al. 2022)."""

    z_weight: float = 0.0
    """Weight of the head's z-loss, the mean of logsumexp(logits)², which keeps logits from drifting (Chowdhery et al.
    2022 use 1e-4)."""

    init: InitialStd = "fan_in"
    """Std that matrices start with, cut off at ±3 of it: 1/sqrt(inputs) (LeCun et al. 1998), sqrt(2/(inputs +
    outputs)) (Glorot & Bengio 2010), or init_std for all, the embedding among them."""

    init_std: float = 0.02
    """Std of the init named fixed; 0.02 is GPT-2's."""

    depth_scaled: bool = True
    """Whether what writes into the residual stream starts smaller by 1/sqrt(2 · n_layers), so that the stream does not
    grow with depth (Radford et al. 2019)."""

    mup_base_d_model: int | None = None
    """Width of a small model whose learning rate this one shall share (Yang et al. 2022): multipliers make every layer
    learn as it would there. None has none."""

    def __post_init__(self) -> None:
        _check(self)

    @property
    def resolved_head_dim(self) -> int:
        """head_dim, its default filled in. A field keeps its None, so that a changed copy resolves anew."""
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def resolved_n_kv_heads(self) -> int:
        """n_kv_heads, its default filled in."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def resolved_attention(self) -> Literal["sdpa", "plain", "flex"]:
        """attention, where nobody has chosen for a device: sdpa, if it can."""
        if self.attention == "auto":
            return "sdpa" if self.attention_softcap is None else "plain"
        return self.attention

    @property
    def gated(self) -> bool:
        """Whether the feed-forward layer has a gate, and so two matrices in."""
        return self.feed_forward.removesuffix("_tanh").endswith("glu")

    @property
    def resolved_d_ff(self) -> int:
        """d_ff, its default filled in."""
        if self.d_ff is not None:
            return self.d_ff
        return _round_up(-(-8 * self.d_model // 3), 32) if self.gated else 4 * self.d_model

    @property
    def resolved_d_expert(self) -> int | None:
        """d_expert, its default filled in; None where there are no experts to be so wide."""
        if not self.n_experts:
            return None
        return self.resolved_d_ff if self.d_expert is None else self.d_expert

    @property
    def resolved_embedding_scale(self) -> float:
        """embedding_scale, its default filled in."""
        if self.embedding_scale is not None:
            return self.embedding_scale
        return (self.mup_base_d_model or self.d_model) ** 0.5 if self.tie_embeddings else 1.0

    @property
    def resolved_original_context(self) -> float:
        """rope_original_context, its default filled in."""
        return self.rope_original_context or self.context_length / self.rope_factor


def _check(config: ModelConfig) -> None:
    """Raise NapkinError for the first of the config's values that does not fit the others."""
    _check_sizes(config)
    _check_heads(config)
    _check_positions(config)
    _check_attention(config)
    _check_experts(config)


def _round_up(value: int, multiple: int) -> int:
    """The first multiple that is not below value."""
    return -(-value // multiple) * multiple


def _check_sizes(config: ModelConfig) -> None:
    for name, value in vars(config).items():
        if value is None or isinstance(value, (bool, str)):
            continue
        if name in _MAY_BE_ZERO:
            # A negated comparison catches NaN too.
            if not value >= 0:
                raise NapkinError(f"{name} is {value}: use 0 or more")
        elif not value > 0:
            raise NapkinError(f"{name} is {value}: use a number above 0")
    if config.dropout >= 1:
        raise NapkinError(f"dropout is {config.dropout}: use less than 1, or nothing is left")


def _check_heads(config: ModelConfig) -> None:
    if config.head_dim is None and config.d_model % config.n_heads:
        raise NapkinError(
            f"d_model {config.d_model} does not divide into n_heads {config.n_heads}: use d_model "
            f"{_round_up(config.d_model, config.n_heads)}, another n_heads, or name head_dim"
        )
    if config.n_heads % config.resolved_n_kv_heads:
        raise NapkinError(
            f"n_heads {config.n_heads} does not divide into n_kv_heads {config.resolved_n_kv_heads} groups: use "
            f"a divisor of {config.n_heads}"
        )


def _check_positions(config: ModelConfig) -> None:
    if config.positions == "rope" and config.resolved_head_dim % 2:
        raise NapkinError(
            f"d_model {config.d_model} over n_heads {config.n_heads} makes heads of {config.resolved_head_dim}, rotary "
            f"positions need an even number: use d_model {config.n_heads * (config.resolved_head_dim + 1)}"
            if config.head_dim is None
            else f"head_dim is {config.head_dim}, rotary positions need an even number: use {config.head_dim + 1}"
        )
    if config.positions == "sinusoidal" and config.d_model % 2:
        raise NapkinError(
            f"d_model is {config.d_model}, sinusoidal positions need an even number: use {config.d_model + 1}"
        )
    if config.rope_scaling != "none" and config.positions != "rope":
        raise NapkinError(
            f"rope_scaling is '{config.rope_scaling}' and positions are '{config.positions}': use positions 'rope', or "
            "rope_scaling 'none'"
        )
    if config.rope_factor < 1:
        raise NapkinError(f"rope_factor is {config.rope_factor}: use 1 or more, rotary positions are only stretched")
    if (config.rope_scaling == "none") != (config.rope_factor == 1):
        raise NapkinError(
            f"rope_scaling is '{config.rope_scaling}' and rope_factor is {config.rope_factor}: use a scaling with a "
            "factor above 1, or 'none' with 1"
        )
    if config.rope_scaling == "none" and config.rope_original_context is not None:
        raise NapkinError(
            f"rope_original_context is {config.rope_original_context} and rope_scaling is 'none': name a rope_scaling "
            "too, or leave it out"
        )
    if config.rope_scaling == "ntk" and config.resolved_head_dim == 2:
        raise NapkinError(
            "rope_scaling is 'ntk' and heads are 2 wide: their one wavelength cannot be stretched, use 'linear'"
        )


def _check_attention(config: ModelConfig) -> None:
    if config.attention_softcap is not None and config.attention == "sdpa":
        raise NapkinError(
            f"attention_softcap is {config.attention_softcap}, which the fused operator of attention 'sdpa' cannot do: "
            "use attention 'plain' or 'flex'"
        )


def _check_experts(config: ModelConfig) -> None:
    if not config.n_experts:
        for name in ("n_shared_experts", "n_dense_layers", "d_expert", "expert_capacity"):
            if getattr(config, name):
                raise NapkinError(f"{name} is {getattr(config, name)} and there are no experts: name n_experts too")
        return
    if config.n_experts < config.experts_per_token:
        raise NapkinError(
            f"experts_per_token {config.experts_per_token} exceeds n_experts {config.n_experts}: use at most "
            f"{config.n_experts}"
        )
    if config.biases == "all":
        raise NapkinError("biases 'all' and n_experts: experts have no biases, use 'none' or 'qkv'")
    if config.mup_base_d_model is not None:
        raise NapkinError("mup_base_d_model and n_experts: experts have no multipliers, use one or the other")
    if config.n_dense_layers >= config.n_layers:
        raise NapkinError(
            f"n_dense_layers {config.n_dense_layers} leaves none of n_layers {config.n_layers} to the experts: use at "
            f"most {config.n_layers - 1}"
        )
