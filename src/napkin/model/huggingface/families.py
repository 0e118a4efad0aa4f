"""Families of Hugging Face models, by the `model_type` of config.json: one row of `FAMILIES` for each.

GPT-2 (Radford et al. 2019) and Llama (Touvron et al. 2023) have names and settings of their own; the others are Llama
with changes. A family is read by its settings, a struct with the library's defaults, and written as config.json; the
names of its weights follow from the config: norms by where the block has them, norms of queries and keys, biases and
experts where there are any.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig


@dataclass(frozen=True)
class WeightMapping:
    """One parameter here, stored as one or more tensors there; matrices of experts are stacked here."""

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    """Rows of each tensor there; empty if there is one."""
    transposed: bool = False
    less: float = 0.0
    """The number that is missing there: 1 for the gains of norms that multiply by 1 + gain."""


def _gpt2_mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    yield WeightMapping("embedding.weight", ("wte.weight",))
    yield WeightMapping("positions.weight", ("wpe.weight",))
    layers = {
        "attention_norm": "ln_1",
        "attention.query_key_value": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward.up": "mlp.c_fc",
        "feed_forward.down": "mlp.c_proj",
    }
    for layer in range(config.n_layers):
        for ours, theirs in layers.items():
            is_norm = ours.endswith("norm")
            ours, theirs = f"blocks.{layer}.{ours}", f"h.{layer}.{theirs}"
            # GPT-2's matrices are stored as [inputs, outputs].
            yield WeightMapping(
                f"{ours}.{'gain' if is_norm else 'weight'}", (f"{theirs}.weight",), transposed=not is_norm
            )
            yield WeightMapping(f"{ours}.bias", (f"{theirs}.bias",))
    yield WeightMapping("norm.gain", ("ln_f.weight",))
    yield WeightMapping("norm.bias", ("ln_f.bias",))


def _llama_mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    yield WeightMapping("embedding.weight", ("embed_tokens.weight",))
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}", f"layers.{layer}"
        for norm, name in _NORMS[config.block].items():
            yield WeightMapping(f"{ours}.{norm}.gain", (f"{theirs}.{name}.weight",))
        yield from attention_mappings(config, ours, theirs)
        if config.n_experts:
            yield from _expert_mappings(config, f"{ours}.feed_forward", f"{theirs}.block_sparse_moe")
        else:
            gate_up = tuple(f"{theirs}.mlp.{name}_proj.weight" for name in ("gate", "up"))
            yield WeightMapping(f"{ours}.feed_forward.gate_up.weight", gate_up, (config.resolved_d_ff,) * 2)
            yield WeightMapping(f"{ours}.feed_forward.down.weight", (f"{theirs}.mlp.down_proj.weight",))
    yield WeightMapping("norm.gain", ("norm.weight",))
    if not config.tie_embeddings:
        yield WeightMapping("head.weight", ("lm_head.weight",))


def attention_mappings(config: ModelConfig, ours: str, theirs: str) -> Iterator[WeightMapping]:
    """The matrices of a layer's attention, with biases and norms where there are any."""
    kv_rows = config.resolved_n_kv_heads * config.resolved_head_dim
    rows = (config.n_heads * config.resolved_head_dim, kv_rows, kv_rows)
    for kind in ("weight", "bias") if config.biases == "qkv" else ("weight",):
        names = tuple(f"{theirs}.self_attn.{name}_proj.{kind}" for name in "qkv")
        yield WeightMapping(f"{ours}.attention.query_key_value.{kind}", names, rows)
    if config.qk_norm != "none":
        yield WeightMapping(f"{ours}.attention.qk_norm.query_norm.gain", (f"{theirs}.self_attn.q_norm.weight",))
        yield WeightMapping(f"{ours}.attention.qk_norm.key_norm.gain", (f"{theirs}.self_attn.k_norm.weight",))
    yield WeightMapping(f"{ours}.attention.output.weight", (f"{theirs}.self_attn.o_proj.weight",))


_NORMS = {
    "pre": {"attention_norm": "input_layernorm", "feed_forward_norm": "post_attention_layernorm"},
    "reordered": {"attention_norm": "post_attention_layernorm", "feed_forward_norm": "post_feedforward_layernorm"},
    "sandwich": {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    },
}


def _expert_mappings(config: ModelConfig, ours: str, theirs: str) -> Iterator[WeightMapping]:
    """Mixtral's names: w1 is the gate, w3 the up projection."""
    n, d_expert = config.n_experts, config.resolved_d_expert
    assert d_expert is not None
    yield WeightMapping(f"{ours}.router.weight", (f"{theirs}.gate.weight",))
    gate_up = tuple(f"{theirs}.experts.{expert}.{name}.weight" for expert in range(n) for name in ("w1", "w3"))
    yield WeightMapping(f"{ours}.experts.up", gate_up, (d_expert,) * 2 * n)
    down = tuple(f"{theirs}.experts.{expert}.w2.weight" for expert in range(n))
    yield WeightMapping(f"{ours}.experts.down", down, (config.d_model,) * n)


def _gemma2_mappings(config: ModelConfig) -> Iterator[WeightMapping]:
    """Llama's names; norms multiply by 1 more than what is stored."""
    for mapping in _llama_mappings(config):
        yield replace(mapping, less=1.0) if mapping.ours.endswith(".gain") else mapping


class Gpt2Settings(msgspec.Struct):
    """The settings that are read of GPT-2's config.json."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True


class RopeSettings(msgspec.Struct):
    """`rope_parameters`, in older folders `rope_scaling`."""

    rope_type: str | None = None
    type: str = "default"
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    # Supported with these values alone.
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    partial_rotary_factor: float = 1.0
    full_attention: Any = None
    sliding_attention: Any = None


class LlamaSettings(msgspec.Struct):
    """The settings that are read of Llama's config.json."""

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_parameters: RopeSettings | None = None
    rope_scaling: RopeSettings | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False


class GraniteSettings(LlamaSettings):
    """Granite 3: four scales."""

    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


class MistralSettings(LlamaSettings):
    """A window (Jiang et al. 2023)."""

    num_key_value_heads: int | None = 8
    sliding_window: int | None = 4096


class MixtralSettings(MistralSettings):
    """Mistral's, and experts (Jiang et al. 2024)."""

    rms_norm_eps: float = 1e-5
    rope_theta: float = 1e6
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    router_aux_loss_coef: float = 0.001


class Qwen2Settings(LlamaSettings):
    """Qwen 2 and 2.5: biases of queries, keys and values, and windows in some layers or none."""

    num_key_value_heads: int | None = 32
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28


class Qwen3Settings(Qwen2Settings):
    """Norms of queries and keys in place of the biases."""

    head_dim: int | None = 128


class Olmo2Settings(LlamaSettings):
    """OLMo 2 (2024): norms after layers, and of all queries and keys."""

    rms_norm_eps: float = 1e-5


class Gemma2Settings(LlamaSettings):
    """Gemma 2 (Gemma Team 2024): norms before and after layers, softcaps, and a window in every second layer."""

    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    tie_word_embeddings: bool = True
    hidden_activation: str = "gelu_pytorch_tanh"
    query_pre_attn_scalar: float = 256.0
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: bool | None = None
    sliding_window: int | None = 4096
    layer_types: list[str] | None = None


# Fields of a config by the settings that hold them, in the order of config.json.
_GPT2_FIELDS = {
    "vocab_size": "vocab_size",
    "n_positions": "context_length",
    "n_embd": "d_model",
    "n_layer": "n_layers",
    "n_head": "n_heads",
    "n_inner": "d_ff",
    "activation_function": "feed_forward",
    "layer_norm_epsilon": "norm_eps",
}
_LLAMA_FIELDS = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "d_ff",
    "hidden_act": "feed_forward",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
}
# Activations by the setting that names them, there and here. Of two names for one the first is written, and the first
# of all where there is none.
_LLAMA_ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}
_ACTIVATIONS = {
    "activation_function": {
        "gelu_new": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu": "gelu",
        "relu": "relu",
        "silu": "silu",
    },
    "hidden_act": _LLAMA_ACTIVATIONS,
    "hidden_activation": _LLAMA_ACTIVATIONS,
}
_SCALINGS = {"default": "none", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}


def _read_gpt2(settings: Gpt2Settings) -> dict[str, Any]:
    if settings.scale_attn_by_inverse_layer_idx or not settings.tie_word_embeddings:
        raise NapkinError("scores scaled by layer and untied heads are not supported: use GPT-2 as published")
    return read_fields(settings, _GPT2_FIELDS) | {
        "attention_scale": None if settings.scale_attn_weights else 1.0,
        "dropout": settings.resid_pdrop,
    }


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return write_fields(config, _GPT2_FIELDS) | {
        "scale_attn_weights": config.attention_scale != 1,
        "tie_word_embeddings": True,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": 0.0,
    }


def read_llama(settings: LlamaSettings) -> dict[str, Any]:
    """Fields of a config, of the settings that all relatives of Llama have."""
    refuse_settings(settings, "attention_bias", "mlp_bias")
    fields = read_fields(settings, _LLAMA_FIELDS)
    return fields | {"tie_embeddings": settings.tie_word_embeddings} | _read_rope(settings)


def _read_rope(settings: LlamaSettings) -> dict[str, Any]:
    # Newer folders have rope_parameters, older ones rope_theta and rope_scaling.
    rope = settings.rope_parameters or settings.rope_scaling or RopeSettings()
    scaling = _looked_up(_SCALINGS, rope.rope_type or rope.type, "rope_type")
    supported = RopeSettings()
    for name in RopeSettings.__struct_fields__[5:]:
        if (value := getattr(rope, name)) != getattr(supported, name):
            raise NapkinError(
                f"{name} of the rotary positions is {value!r}, which is not supported: use a model without it"
            )
    theta = settings.rope_theta if rope.rope_theta is None else rope.rope_theta
    if scaling == "none":
        return {"rope_theta": theta}
    if rope.factor is None:
        raise NapkinError(f"rope_type is {rope.rope_type or rope.type!r} and has no factor: download it again")
    # A factor of 1 scales nothing.
    return {
        "rope_theta": theta,
        "rope_scaling": "none" if rope.factor == 1 else scaling,
        "rope_factor": rope.factor,
        "rope_original_context": None if rope.factor == 1 else rope.original_max_position_embeddings,
    }


def write_llama(config: ModelConfig) -> dict[str, Any]:
    """The settings that all relatives of Llama have."""
    scaling = config.rope_scaling if config.rope_scaling in _SCALINGS else "default"
    rope: dict[str, Any] = {"rope_type": scaling, "rope_theta": config.rope_theta}
    if scaling != "default":
        context = round(config.resolved_original_context)
        rope |= {"factor": config.rope_factor, "original_max_position_embeddings": context}
    if scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return write_fields(config, _LLAMA_FIELDS) | {
        "rope_parameters": rope,
        "rope_scaling": rope,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
    }


def write_granite(config: ModelConfig) -> dict[str, Any]:
    """Granite's scales, those of weights being in the weights."""
    return {"attention_multiplier": score_scale(config), "residual_multiplier": 1.0, "logits_scaling": 1.0}


def granite_factors(settings: GraniteSettings) -> dict[str, float]:
    """The scales of what layers write, and of logits: the head may be the embedding, its input is scaled instead."""
    residual, logits = settings.residual_multiplier, settings.logits_scaling
    if not logits > 0:
        raise NapkinError(f"logits_scaling is {logits}: logits are divided by it, use more than 0")
    return {r"blocks\.\d+\.(attention\.output|feed_forward\.down)\.weight": residual, r"norm\.gain": 1 / logits}


def _read_qwen(settings: Qwen2Settings) -> dict[str, Any]:
    if not settings.use_sliding_window:
        return {}
    full = [layer < settings.max_window_layers for layer in range(min(settings.num_hidden_layers, 2**16))]
    return _read_windows(settings, full)


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": config.attention_window is not None,
        "sliding_window": config.attention_window,
        "max_window_layers": 0,
        "layer_types": _layer_types(config),
    }


def _read_gemma2(settings: Gemma2Settings) -> dict[str, Any]:
    refuse_settings(settings, "use_bidirectional_attention")
    if not settings.query_pre_attn_scalar > 0:
        raise NapkinError(f"query_pre_attn_scalar is {settings.query_pre_attn_scalar}: use a number above 0")
    settings.hidden_act = settings.hidden_activation
    # Every second layer has no window.
    full = [layer % 2 == 1 for layer in range(min(settings.num_hidden_layers, 2**16))]
    return {
        "embedding_scale": max(settings.hidden_size, 0) ** 0.5,
        "attention_softcap": settings.attn_logit_softcapping,
        "logit_softcap": settings.final_logit_softcapping,
        **_read_windows(settings, full),
    }


def _write_gemma2(config: ModelConfig) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": round(score_scale(config) ** -2),
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "sliding_window": config.attention_window or 4096,
        "layer_types": _layer_types(config),
    }


def _read_windows(settings: Qwen2Settings | Gemma2Settings, full: list[bool]) -> dict[str, int | None]:
    """attention_window and full_attention_every; `full` says which layers have no window unless layer_types does."""
    if settings.layer_types is not None:
        full = [kind == "full_attention" for kind in settings.layer_types]
        strange = set(settings.layer_types) - {"full_attention", "sliding_attention"}
        if strange or len(full) != settings.num_hidden_layers:
            raise NapkinError(
                f"layer_types names {len(full)} layers{', one of ' + repr(min(strange))[:50] if strange else ''}: use "
                f"'full_attention' or 'sliding_attention' for each of {settings.num_hidden_layers}"
            )
    if all(full):
        return {}
    if not any(full):
        return {"attention_window": settings.sliding_window}
    every = full.index(True) + 1
    if full != [(layer + 1) % every == 0 for layer in range(len(full))]:
        raise NapkinError(
            "layers have windows in a pattern that is not supported: only a fixed period of layers without one is"
        )
    return {"attention_window": settings.sliding_window, "full_attention_every": every}


def _layer_types(config: ModelConfig) -> list[str]:
    return ["full_attention" if window is None else "sliding_attention" for window in config.attention_windows]


def score_scale(config: ModelConfig) -> float:
    """The factor of attention scores."""
    return config.resolved_head_dim**-0.5 if config.attention_scale is None else config.attention_scale


def read_fields(settings: Any, fields: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a config, as settings have them."""
    values = {ours: getattr(settings, theirs) for theirs, ours in fields.items()}
    return values | {
        fields[name]: _looked_up(table, getattr(settings, name), name)
        for name, table in _ACTIVATIONS.items()
        if name in fields
    }


def write_fields(config: ModelConfig, fields: Mapping[str, str]) -> dict[str, Any]:
    """Settings, as fields of a config have them."""
    written = {theirs: config.resolved(ours) for theirs, ours in fields.items()}
    for name in _ACTIVATIONS.keys() & fields:
        known = [theirs for theirs, ours in _ACTIVATIONS[name].items() if ours == config.feed_forward]
        written[name] = (known or list(_ACTIVATIONS[name]))[0]
    return written


def _looked_up(table: Mapping[str, str], name: str, setting: str) -> str:
    if name not in table:
        raise NapkinError(f"{setting} is {name!r}, which is not supported: use one of {', '.join(table)}")
    return table[name]


def refuse_settings(settings: Any, *names: str) -> None:
    """Raise NapkinError for the first of these settings that is on."""
    for name in names:
        if getattr(settings, name):
            raise NapkinError(f"{name} is {getattr(settings, name)!r}, which is not supported: use a model without it")


@dataclass(frozen=True, kw_only=True)
class Family:
    """The architecture of a `model_type` of config.json; the defaults are Llama's."""

    architecture: str
    settings: type[msgspec.Struct]
    """The settings in config.json that are read, with their types and the library's defaults."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config that all models of the family have."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Further fields of the config by the settings that hold them."""
    read_more: Callable[[Any], dict[str, Any]] = lambda settings: {}
    """Further fields of the config, of settings."""
    write_more: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    """Further settings, of a config."""
    attention_scale: Callable[[Any], float] | None = None
    """The scale of attention scores, where it is a setting."""
    factors: Callable[[Any], dict[str, float]] = lambda settings: {}
    """Factors by expressions for parameters' names: their layers have a factor there, which is multiplied into the
    weights here."""
    read_base: Callable[[Any], dict[str, Any]] = read_llama
    write_base: Callable[[ModelConfig], dict[str, Any]] = write_llama
    mappings: Callable[[ModelConfig], Iterator[WeightMapping]] = _llama_mappings
    prefix: str = "model."
    """Prefix of all names except the head's."""

    def full_name(self, name: str) -> str:
        """A tensor's name in the folder of a model with its head."""
        return name if name.startswith("lm_head") else self.prefix + name

    def read(self, settings: Any) -> ModelConfig:
        """The config of a model with those settings. Raises NapkinError for one that is not supported."""
        more, base = self.read_more(settings), self.read_base(settings)
        own = read_fields(settings, self.fields)
        config = ModelConfig(**{"embedding_scale": 1.0, **self.fixed, **base, **own, **more})
        if self.attention_scale is None:
            return config
        scale, usual = self.attention_scale(settings), config.resolved_head_dim**-0.5
        return replace(config, attention_scale=None if math.isclose(scale, usual, rel_tol=1e-6) else scale)

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """config.json without its model_type, as far as it can say what a config says."""
        return {
            "architectures": [self.architecture],
            **self.write_base(config),
            # The tokenizer says which tokens these are.
            "bos_token_id": None,
            "eos_token_id": None,
            **write_fields(config, self.fields),
            **self.write_more(config),
        }


# A model is saved as the first of these that has all its settings.
FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        settings=Gpt2Settings,
        fixed={"positions": "learned", "norm": "layer", "biases": "all", "init": "fixed"},
        read_base=_read_gpt2,
        write_base=_write_gpt2,
        mappings=_gpt2_mappings,
        prefix="transformer.",
    ),
    "llama": Family(architecture="LlamaForCausalLM", settings=LlamaSettings),
    "granite": Family(
        architecture="GraniteForCausalLM",
        settings=GraniteSettings,
        fields={"embedding_multiplier": "embedding_scale"},
        attention_scale=lambda settings: settings.attention_multiplier,
        write_more=write_granite,
        factors=granite_factors,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM", settings=MistralSettings, fields={"sliding_window": "attention_window"}
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        settings=MixtralSettings,
        fields={
            "sliding_window": "attention_window",
            "num_local_experts": "n_experts",
            "num_experts_per_tok": "experts_per_token",
            "router_aux_loss_coef": "balance_weight",
        },
        write_more=lambda config: {"intermediate_size": config.resolved_d_expert or config.resolved_d_ff},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        settings=Qwen2Settings,
        fixed={"biases": "qkv"},
        read_more=_read_qwen,
        write_more=_write_qwen,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        settings=Qwen3Settings,
        fixed={"qk_norm": "head"},
        read_more=_read_qwen,
        write_more=_write_qwen,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        settings=Olmo2Settings,
        fixed={"block": "reordered", "qk_norm": "all_heads"},
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        settings=Gemma2Settings,
        fixed={"block": "sandwich"},
        fields={"hidden_activation": "feed_forward"},
        read_more=_read_gemma2,
        write_more=_write_gemma2,
        attention_scale=lambda settings: settings.query_pre_attn_scalar**-0.5,
        mappings=_gemma2_mappings,
    ),
}
