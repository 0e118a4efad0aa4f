"""Every switch of the model in NumPy float64, from the papers' formulas, sharing no code with the package.

Loops run over sequences, heads, positions, keys and tokens; each function is the definition. Slow on purpose.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def logits(weights: Weights, tokens: NDArray[np.int64], config: Any, documents: Any = None) -> Array:
    """Logits [batch, position, vocab_size] of a model with these named parameters and this config."""
    read = hidden(weights, tokens, config, documents)
    return _bounded(read @ weights.get("head.weight", weights["embedding.weight"]).T, config)


def loss(weights: Weights, tokens: NDArray[np.int64], targets: NDArray[np.int64], config: Any) -> float:
    """Mean cross-entropy of targets, and what the config adds to it."""
    routings: list[tuple[float, float]] = []
    scores = hidden(weights, tokens, config, None, routings)
    scores = _bounded(scores @ weights.get("head.weight", weights["embedding.weight"]).T, config)
    total = 0.0
    for row, target in zip(scores.reshape(-1, scores.shape[-1]), targets.ravel(), strict=True):
        logsumexp = row.max() + math.log(np.exp(row - row.max()).sum())
        total += logsumexp - row[target] + config.z_weight * logsumexp**2
    extra = [config.balance_weight * balance + config.router_z_weight * z for balance, z in routings]
    return total / targets.size + (sum(extra) / len(extra) if extra else 0.0)


def _bounded(scores: Array, config: Any) -> Array:
    return config.logit_softcap * np.tanh(scores / config.logit_softcap) if config.logit_softcap else scores


def hidden(
    weights: Weights, tokens: NDArray[np.int64], config: Any, documents: Any, routings: list | None = None
) -> Array:
    """What the head reads."""
    x = np.stack(
        [_embedded(weights, sequence, config, _places(documents, i, sequence)) for i, sequence in enumerate(tokens)]
    )
    kept: dict[int, tuple[Array, Array]] = {}  # keys and values of each sequence, for layers that share them
    for layer in range(config.n_layers):
        own = {
            name.removeprefix(f"blocks.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"blocks.{layer}.")
        }

        full = config.full_attention_every and (layer + 1) % config.full_attention_every == 0
        window = math.inf if full or config.attention_window is None else config.attention_window

        def attend(x: Array, own: Weights = own, window: float = window) -> Array:
            same = [None if documents is None else documents[i] for i in range(len(x))]
            if config.kv_lora_rank:
                return np.stack([_latent_attention(own, row, config, window, same[i]) for i, row in enumerate(x)])
            return np.stack([_attention(own, row, config, window, same[i], kept, i) for i, row in enumerate(x)])

        def think(x: Array, own: Weights = own) -> Array:
            flat = x.reshape(-1, x.shape[-1])
            if "feed_forward.router.weight" in own:
                return _mixture(own, flat, config, routings).reshape(x.shape)
            return feed_forward(own, "feed_forward", flat, config).reshape(x.shape)

        x = _block(own, x, attend, think, config)
    if "norm.gain" in weights:
        x = _norm(weights, "norm", x, config)
    return x * ((config.mup_base_d_model or config.d_model) / config.d_model)


def _places(documents: Any, i: int, sequence: Any) -> list[int]:
    places: list[int] = []
    for t in range(len(sequence)):
        new = t == 0 or (documents is not None and documents[i][t] != documents[i][t - 1])
        places.append(0 if new else places[-1] + 1)
    return places


def _embedded(weights: Weights, sequence: Any, config: Any, places: list[int]) -> Array:
    width = config.mup_base_d_model or config.d_model
    scale = config.embedding_scale or (math.sqrt(width) if config.tie_embeddings else 1.0)
    x = weights["embedding.weight"][sequence] * scale
    if config.positions == "learned":
        x = x + weights["positions.weight"][places]
    if config.positions == "sinusoidal":
        for t, place in enumerate(places):
            for i in range(config.d_model):
                angle = place / 10000 ** (2 * (i // 2) / config.d_model)
                x[t, i] += math.sin(angle) if i % 2 == 0 else math.cos(angle)
    return x


def _block(own: Weights, x: Array, attend: Callable, think: Callable, config: Any) -> Array:
    def norm(name: str, x: Array) -> Array:
        return _norm(own, name, x, config)

    if config.block == "parallel":
        read = norm("norm", x)
        return x + attend(read) + think(read)
    for name, layer in (("attention", attend), ("feed_forward", think)):
        if config.block == "pre":
            x = x + layer(norm(f"{name}_norm", x))
        elif config.block == "post":
            x = norm(f"{name}_norm", x + layer(x))
        elif config.block == "reordered":
            x = x + norm(f"{name}_norm", layer(x))
        else:
            x = x + norm(f"{name}_output_norm", layer(norm(f"{name}_norm", x)))
    return x


def _norm(own: Weights, name: str, x: Array, config: Any) -> Array:
    if config.norm == "none":
        return x
    flat = []
    for v in x.reshape(-1, x.shape[-1]):
        v = v - v.mean() if config.norm == "layer" else v
        v = v / np.sqrt(np.mean(v * v) + config.norm_eps) * own[f"{name}.gain"]
        flat.append(v + own.get(f"{name}.bias", 0.0))
    return np.stack(flat).reshape(x.shape)


def _linear(own: Weights, name: str, x: Array, config: Any) -> Array:
    multiplier = (config.mup_base_d_model or config.d_model) / config.d_model
    return multiplier * (x @ own[f"{name}.weight"].T) + own.get(f"{name}.bias", 0.0)


def _attention(
    own: Weights,
    x: Array,
    config: Any,
    window: float,
    documents: Any,
    kept: dict[int, tuple[Array, Array]],
    sequence: int,
) -> Array:
    if "attention.query.weight" in own:
        q = _linear(own, "attention.query", x, config)
        if config.qk_norm == "all_heads":
            q = _norm(own, "attention.qk_norm.query_norm", q, config)
        q = q.reshape(len(x), config.n_heads, -1)
        if config.qk_norm == "head":
            q = _norm(own, "attention.qk_norm.query_norm", q, config)
        q = turned(q, config) if config.positions == "rope" else q
        mixed = _mixed(q, *kept[sequence], config, window, documents)
        return _linear(own, "attention.output", mixed.reshape(len(x), -1), config)
    n_heads, n_kv = config.n_heads, config.n_kv_heads or config.n_heads
    width = config.head_dim or config.d_model // n_heads
    projected = _linear(own, "attention.query_key_value", x, config)
    q, k, v = np.split(projected, [n_heads * width, (n_heads + n_kv) * width], axis=1)
    if config.qk_norm == "all_heads":
        q = _norm(own, "attention.qk_norm.query_norm", q, config)
        k = _norm(own, "attention.qk_norm.key_norm", k, config)
    q, k, v = (part.reshape(len(x), -1, width) for part in (q, k, v))
    if config.qk_norm == "head":
        q = _norm(own, "attention.qk_norm.query_norm", q, config)
        k = _norm(own, "attention.qk_norm.key_norm", k, config)
    if config.positions == "rope":
        q, k = turned(q, config), turned(k, config)
    kept[sequence] = k, v
    mixed = _mixed(q, k, v, config, window, documents)
    return _linear(own, "attention.output", mixed.reshape(len(x), -1), config)


def _latent_attention(own: Weights, x: Array, config: Any, window: float, documents: Any) -> Array:
    """DeepSeek-V2's equations 9 to 19, one head after another; no form that saves products."""
    n_heads, plain, wide = config.n_heads, config.qk_nope_head_dim, config.v_head_dim
    rank, low = config.kv_lora_rank, config.q_lora_rank or 0
    made = x @ own["attention.latents.weight"].T
    latent = _norm(own, "attention.key_value_norm", made[:, low : low + rank], config)
    shared = made[:, low + rank :]
    read = _norm(own, "attention.query_norm", made[:, :low], config) if low else x
    queries = (read @ own["attention.query.weight"].T).reshape(len(x), n_heads, -1)
    both = (latent @ own["attention.key_value.weight"].T).reshape(len(x), n_heads, -1)
    turn = turned if config.positions == "rope" else lambda part, _: part
    q, k, v = [], [], []
    for head in range(n_heads):
        q.append(np.hstack((queries[:, head, :plain], turn(queries[:, head : head + 1, plain:], config)[:, 0])))
        k.append(np.hstack((both[:, head, :plain], turn(shared[:, None], config)[:, 0])))
        v.append(both[:, head, plain:])
    assert v[0].shape[1] == wide
    queries, keys, values = (np.stack(part, axis=1) for part in (q, k, v))
    mixed = _mixed(queries, keys, values, config, window, documents)
    return mixed.reshape(len(x), -1) @ own["attention.output.weight"].T


def _mixed(q: Array, k: Array, v: Array, config: Any, window: float, documents: Any) -> Array:
    n_heads, n_kv = q.shape[1], k.shape[1]
    scale = config.attention_scale or 1 / math.sqrt(q.shape[2])
    mixed = np.zeros((len(q), n_heads, v.shape[2]))
    for head in range(n_heads):
        shared = head * n_kv // n_heads
        for i in range(len(q)):
            seen = [j for j in range(i + 1) if i - j < window and (documents is None or documents[i] == documents[j])]
            scores = np.array([scale * q[i, head] @ k[j, shared] for j in seen])
            if config.attention_softcap:
                scores = config.attention_softcap * np.tanh(scores / config.attention_softcap)
            if config.positions == "alibi":
                scores = scores - _slope(head, n_heads) * np.array([i - j for j in seen])
            weights = np.exp(scores - scores.max())
            mixed[i, head] = sum(w * v[j, shared] for w, j in zip(weights / weights.sum(), seen, strict=True))
    return mixed


def _slope(head: int, n_heads: int) -> float:
    power = 1
    while 2 * power <= n_heads:
        power *= 2
    if head < power:
        return (2 ** (-8 / power)) ** (head + 1)
    return (2 ** (-8 / (2 * power))) ** (2 * (head - power) + 1)


def turned(x: Array, config: Any) -> Array:
    """Heads [position, head, head_dim] turned by their positions."""
    frequencies, length = rope_frequencies(config, x.shape[-1])
    length = config.rope_length or length
    turned = np.empty_like(x)
    half = x.shape[-1] // 2
    for t in range(len(x)):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if config.rope_pairing == "interleaved" else (i, i + half)
            point = (x[t, :, a] + 1j * x[t, :, b]) * length * np.exp(1j * t * frequencies[i])
            turned[t, :, a], turned[t, :, b] = point.real, point.imag
    return turned


def rope_frequencies(config: Any, width: int) -> tuple[list[float], float]:
    """Radians a token for each plane, and the factor of lengths."""
    theta, factor = config.rope_theta, config.rope_factor
    original = config.rope_original_context or config.context_length / factor
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if config.rope_scaling == "linear":
        return [f / factor for f in plain], 1.0
    if config.rope_scaling == "ntk":
        theta = theta * factor ** (width / (width - 2))
        return [theta ** (-2 * i / width) for i in range(width // 2)], 1.0
    if config.rope_scaling == "llama3":
        chosen = []
        for f in plain:
            wavelength = 2 * math.pi / f
            if wavelength < original / 4:
                chosen.append(f)
            elif wavelength > original:
                chosen.append(f / factor)
            else:
                smooth = (original / wavelength - 1) / (4 - 1)
                chosen.append((1 - smooth) * f / factor + smooth * f)
        return chosen, 1.0
    if config.rope_scaling == "yarn":

        def index(turns: float) -> float:
            return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(index(32)), 0), min(math.ceil(index(1)), width - 1)
        high = high + 0.001 if low == high else high
        chosen = []
        for i, f in enumerate(plain):
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            chosen.append(f / factor * ramp + f * (1 - ramp))
        return chosen, 0.1 * math.log(factor) + 1
    return plain, 1.0


def feed_forward(own: Weights, name: str, x: Array, config: Any) -> Array:
    """One feed-forward layer, on rows."""
    if f"{name}.gate_up.weight" in own:
        z = _between(_linear(own, f"{name}.gate_up", x, config), config.feed_forward)
    else:
        z = _between(_linear(own, f"{name}.up", x, config), config.feed_forward)
    return _linear(own, f"{name}.down", z, config)


def _between(z: Array, kind: str) -> Array:
    if kind in GATES:
        gate, up = np.split(z, 2, axis=-1)
        return GATES[kind](gate) * up
    return PLAIN[kind](z)


def _sigmoid(z: Array) -> Array:
    return 1 / (1 + np.exp(-z))


def _gelu(z: Array) -> Array:
    return z * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(z)


def _gelu_tanh(z: Array) -> Array:
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def _relu(z: Array) -> Array:
    return np.where(z > 0, z, 0.0)


PLAIN = {
    "relu": _relu,
    "relu_squared": lambda z: _relu(z) ** 2,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": lambda z: z * _sigmoid(z),
}
GATES = {
    "glu": _sigmoid,
    "reglu": _relu,
    "geglu": _gelu,
    "geglu_tanh": _gelu_tanh,
    "swiglu": lambda z: z * _sigmoid(z),
}


def _chosen_experts(ranked: Array, config: Any) -> NDArray[np.int64]:
    """Of each token, the experts of the best groups with the largest numbers."""
    chosen = []
    each = config.n_experts // config.n_expert_groups
    for row in ranked:
        groups = [sorted(row[start : start + each])[::-1] for start in range(0, config.n_experts, each)]
        worth = [sum(group[: 2 if config.router == "sigmoid" else 1]) for group in groups]
        best = np.argsort(-np.array(worth), kind="stable")[: config.expert_groups_per_token]
        left = [expert for expert in range(config.n_experts) if expert // each in best]
        chosen.append(sorted(left, key=lambda expert: -row[expert])[: config.experts_per_token])
    return np.array(chosen)


def _mixture(own: Weights, x: Array, config: Any, routings: list | None) -> Array:
    """One token after another; with a capacity, all first choices are seated before the second ones."""
    n, k = config.n_experts, config.experts_per_token
    scores = x @ own["feed_forward.router.weight"].T
    probabilities = np.exp(scores - scores.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    weighed = _sigmoid(scores) if config.router == "sigmoid" else probabilities
    if config.router == "sigmoid":
        probabilities = weighed / weighed.sum(axis=1, keepdims=True)
    choices = _chosen_experts(weighed + own.get("feed_forward.choice_bias", 0.0), config)
    seated = np.zeros(n, dtype=int)
    room = len(x) * k if config.expert_capacity is None else math.ceil(config.expert_capacity * len(x) * k / n)
    result = np.zeros_like(x)
    for choice in range(k):
        for token in range(len(x)):
            expert = choices[token, choice]
            seated[expert] += 1
            if seated[expert] > room:
                continue
            z = _between(own["feed_forward.experts.up"][expert] @ x[token], config.feed_forward)
            weight = config.expert_scale * weighed[token, expert]
            if config.normalize_expert_weights:
                weight /= weighed[token, choices[token]].sum()
            result[token] += weight * (own["feed_forward.experts.down"][expert] @ z)
    if routings is not None:
        share = np.array([(choices == expert).sum() / choices.size for expert in range(n)])
        logsumexps = [math.log(np.exp(row).sum()) for row in scores]
        routings.append((n * float(share @ probabilities.mean(axis=0)), float(np.mean(np.square(logsumexps)))))
    if config.n_shared_experts:
        result = result + feed_forward(own, "feed_forward.shared", x, config)
    return result
