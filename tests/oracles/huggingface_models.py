"""Hugging Face folders of Llama and its relatives: random ones, and their logits in NumPy float64.

Shares no code with the package: sizes are read from config.json and weights by their names there, each family by the
equations of its report. Loops run over positions, heads and tokens.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

Array = NDArray[np.float64]
Settings = dict[str, Any]

SIZES: Settings = {
    "vocab_size": 53,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
# As the library writes them: newer folders have rope_parameters, older ones rope_theta and rope_scaling.
LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "rope_theta": 500.0,
}  # fmt: skip
FOLDERS: dict[str, Settings] = {
    "llama": {"model_type": "llama", "rope_parameters": LLAMA3},
    "llama tied": {"model_type": "llama", "tie_word_embeddings": True, "rope_theta": 500.0, "rope_scaling": None},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 12.0, "attention_multiplier": 0.3,
        "residual_multiplier": 0.22, "logits_scaling": 8.0,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 5, "head_dim": None},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "rope_theta": 1e6},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1},
    "qwen2 windows": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 10, "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2", "rms_norm_eps": 1e-5},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma2 layer types": {
        "model_type": "gemma2", "head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "query_pre_attn_scalar": 8, "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
}  # fmt: skip


def write_random(folder: Path, settings: Settings, seed: int = 0) -> None:
    """A folder with these settings and random weights, large enough for every factor to show."""
    c = {**SIZES, **settings}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(c))
    generator = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes(c).items():
        centre = 1.0 if len(shape) == 1 and "bias" not in name and c["model_type"] != "gemma2" else 0.0
        numbers = centre + generator.standard_normal(shape) * (0.3 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)
        weights[name] = numbers.astype(np.float32)
    save_file(weights, folder / "model.safetensors")


def shapes(c: Settings) -> dict[str, tuple[int, ...]]:
    """By name."""
    d, d_ff, heads, kv, width = _widths(c)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], d), "model.norm.weight": (d,)}
    if not _tied(c):
        found["lm_head.weight"] = (c["vocab_size"], d)
    for layer in range(c["num_hidden_layers"]):
        own: dict[str, tuple[int, ...]] = dict.fromkeys(_NORMS.get(c["model_type"], _LLAMA_NORMS), (d,))
        own |= {f"self_attn.{name}_proj": (n * width, d) for name, n in (("q", heads), ("k", kv), ("v", kv))}
        own["self_attn.o_proj"] = (d, heads * width)
        if c["model_type"] == "qwen3":
            own |= {"self_attn.q_norm": (width,), "self_attn.k_norm": (width,)}
        if c["model_type"] == "olmo2":
            own |= {"self_attn.q_norm": (heads * width,), "self_attn.k_norm": (kv * width,)}
        experts = c["num_local_experts"] if c["model_type"] == "mixtral" else 0
        for expert in range(experts):
            prefix = f"block_sparse_moe.experts.{expert}"
            own |= {f"{prefix}.w1": (d_ff, d), f"{prefix}.w3": (d_ff, d), f"{prefix}.w2": (d, d_ff)}
        if experts:
            own["block_sparse_moe.gate"] = (experts, d)
        else:
            own |= {"mlp.gate_proj": (d_ff, d), "mlp.up_proj": (d_ff, d), "mlp.down_proj": (d, d_ff)}
        found |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
        if c["model_type"] == "qwen2":
            biases = {f"model.layers.{layer}.self_attn.{name}_proj" for name in "qkv"}
            found |= {f"{name}.bias": found[f"{name}.weight"][:1] for name in sorted(biases)}
    return found


_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_NORMS = {
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma2": (*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


def _widths(c: Settings) -> tuple[int, int, int, int, int]:
    d, heads = c["hidden_size"], c["num_attention_heads"]
    return d, c["intermediate_size"], heads, c["num_key_value_heads"], c.get("head_dim") or d // heads


def _tied(c: Settings) -> bool:
    return c.get("tie_word_embeddings", c["model_type"] == "gemma2")


def logits(folder: Path, tokens: NDArray[np.int64]) -> Array:
    """[position, vocab_size] of one sequence."""
    c: Settings = json.loads((folder / "config.json").read_text())
    w = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / "model.safetensors").items()}
    kind = c["model_type"]
    x = w["model.embed_tokens.weight"][tokens]
    x = x * {"granite": c.get("embedding_multiplier", 1.0), "gemma2": math.sqrt(c["hidden_size"])}.get(kind, 1.0)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}

        def norm(name: str, x: Array, own: dict[str, Array] = own) -> Array:
            return _norm(x, own[f"{name}.weight"], c)

        def attend(x: Array, own: dict[str, Array] = own, layer: int = layer) -> Array:
            return _attention(own, x, c, layer)

        def think(x: Array, own: dict[str, Array] = own) -> Array:
            return _mixture(own, x, c) if kind == "mixtral" else _feed_forward(own, x, c)

        if kind == "olmo2":
            x = x + norm("post_attention_layernorm", attend(x))
            x = x + norm("post_feedforward_layernorm", think(x))
        elif kind == "gemma2":
            x = x + norm("post_attention_layernorm", attend(norm("input_layernorm", x)))
            x = x + norm("post_feedforward_layernorm", think(norm("pre_feedforward_layernorm", x)))
        else:
            scale = c.get("residual_multiplier", 1.0)
            x = x + scale * attend(norm("input_layernorm", x))
            x = x + scale * think(norm("post_attention_layernorm", x))
    x = _norm(x, w["model.norm.weight"], c)
    scores = x @ (w["model.embed_tokens.weight"] if _tied(c) else w["lm_head.weight"]).T
    scores = scores / c.get("logits_scaling", 1.0)
    cap = c.get("final_logit_softcapping")
    return scores if cap is None else cap * np.tanh(scores / cap)


def _norm(x: Array, gain: Array, c: Settings) -> Array:
    gain = 1 + gain if c["model_type"] == "gemma2" else gain
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + c["rms_norm_eps"]) * gain


def _attention(own: dict[str, Array], x: Array, c: Settings, layer: int) -> Array:
    _, _, n_heads, n_kv, width = _widths(c)
    q, k, v = (x @ own[f"self_attn.{n}_proj.weight"].T + own.get(f"self_attn.{n}_proj.bias", 0.0) for n in "qkv")
    if c["model_type"] == "olmo2":
        q, k = _norm(q, own["self_attn.q_norm.weight"], c), _norm(k, own["self_attn.k_norm.weight"], c)
    q, k, v = (part.reshape(len(x), -1, width) for part in (q, k, v))
    if c["model_type"] == "qwen3":
        q, k = _norm(q, own["self_attn.q_norm.weight"], c), _norm(k, own["self_attn.k_norm.weight"], c)
    q, k = _turned(q, c), _turned(k, c)
    scale = c.get("query_pre_attn_scalar", width) ** -0.5
    scale = c.get("attention_multiplier", 1.0) if c["model_type"] == "granite" else scale
    cap, window = c.get("attn_logit_softcapping"), _window(c, layer)
    mixed = np.zeros((len(x), n_heads, width))
    for head in range(n_heads):
        shared = head // (n_heads // n_kv)
        for i in range(len(x)):
            first = max(0, i + 1 - window)
            scores = scale * (k[first : i + 1, shared] @ q[i, head])
            scores = cap * np.tanh(scores / cap) if cap else scores
            weights = np.exp(scores - scores.max())
            mixed[i, head] = weights / weights.sum() @ v[first : i + 1, shared]
    return mixed.reshape(len(x), -1) @ own["self_attn.o_proj.weight"].T


def _window(c: Settings, layer: int) -> int:
    everything, window = 10**9, c.get("sliding_window") or 10**9
    if c.get("layer_types"):
        return window if c["layer_types"][layer] == "sliding_attention" else everything
    match c["model_type"]:
        case "mistral" | "mixtral":
            return window
        case "qwen2" | "qwen3":
            return window if c.get("use_sliding_window") and layer >= c["max_window_layers"] else everything
        case "gemma2":
            return window if layer % 2 == 0 else everything
    return everything


def _turned(x: Array, c: Settings) -> Array:
    """Number i and number i + width/2 of a head, turned by position · theta^(-2i/width)."""
    half = x.shape[-1] // 2
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    theta = rope.get("rope_theta", c.get("rope_theta", 10000.0))
    frequencies = [math.pow(theta, -i / half) for i in range(half)]
    if rope.get("rope_type") == "llama3":
        frequencies = [_llama3(frequency, rope) for frequency in frequencies]
    angles = np.outer(np.arange(len(x)), frequencies)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate((turned.real, turned.imag), axis=-1)


def _llama3(frequency: float, rope: Settings) -> float:
    wavelength, original = 2 * math.pi / frequency, rope["original_max_position_embeddings"]
    if wavelength < original / rope["high_freq_factor"]:
        return frequency
    if wavelength > original / rope["low_freq_factor"]:
        return frequency / rope["factor"]
    smooth = (original / wavelength - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    return (1 - smooth) * frequency / rope["factor"] + smooth * frequency


def _feed_forward(own: dict[str, Array], x: Array, c: Settings) -> Array:
    gate, up = x @ own["mlp.gate_proj.weight"].T, x @ own["mlp.up_proj.weight"].T
    if c["model_type"] == "gemma2":
        gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + np.exp(-gate))
    return (gate * up) @ own["mlp.down_proj.weight"].T


def _mixture(own: dict[str, Array], x: Array, c: Settings) -> Array:
    """Softmax over the logits of the chosen experts alone (Jiang et al. 2024, equation 1)."""
    made = np.zeros_like(x)
    for t, token in enumerate(x):
        scores = own["block_sparse_moe.gate.weight"] @ token
        chosen = np.argsort(-scores)[: c["num_experts_per_tok"]]
        weights = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
        for weight, expert in zip(weights, chosen, strict=True):
            w1, w2, w3 = (own[f"block_sparse_moe.experts.{expert}.w{n}.weight"] for n in (1, 2, 3))
            gate = w1 @ token
            made[t] += weight * (w2 @ (gate / (1 + np.exp(-gate)) * (w3 @ token)))
    return made
