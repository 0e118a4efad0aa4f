"""The Transformer's forward pass in NumPy float64, from the formulas, sharing no code with the package.

Loops run over sequences, heads and positions; rotary positions are complex numbers; attention sees only the slice
of the past. Slow and short on purpose.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def transformer_logits(
    parameters: Mapping[str, Array],
    tokens: NDArray[np.int64],
    *,
    n_heads: int,
    n_kv_heads: int,
    rope_theta: float,
    norm_eps: float,
) -> Array:
    """Logits [batch, position, vocab_size] of a model with these named parameters."""
    names = {name.split(".")[1] for name in parameters if name.startswith("blocks.")}
    embedding = parameters["embedding.weight"]

    logits = []
    for sequence in tokens:
        x = embedding[sequence] * (1 if "head.weight" in parameters else np.sqrt(embedding.shape[1]))
        for i in range(len(names)):
            block = {
                name.removeprefix(f"blocks.{i}."): value
                for name, value in parameters.items()
                if name.startswith(f"blocks.{i}.")
            }
            normed = rms_norm(x, block["attention_norm.gain"], norm_eps)
            x = x + self_attention(
                normed,
                block["attention.query_key_value.weight"],
                block["attention.output.weight"],
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                theta=rope_theta,
            )
            normed = rms_norm(x, block["feed_forward_norm.gain"], norm_eps)
            x = x + swiglu(normed, block["feed_forward.gate_up.weight"], block["feed_forward.down.weight"])
        x = rms_norm(x, parameters["norm.gain"], norm_eps)
        logits.append(x @ parameters.get("head.weight", embedding).T)
    return np.stack(logits)


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """Each vector divided by its root mean square, times the gain."""
    return np.stack([v / np.sqrt(np.dot(v, v) / len(v) + eps) * gain for v in x])


def rope(head: Array, theta: float) -> Array:
    """One head [position, head_dim]: (first half) + i (second half), multiplied by e^(i · position · frequency)."""
    half = head.shape[1] // 2
    points = head[:, :half] + 1j * head[:, half:]
    turned = np.empty_like(points)
    for position in range(len(head)):
        for i in range(half):
            turned[position, i] = points[position, i] * np.exp(1j * position / theta ** (2 * i / (2 * half)))
    return np.concatenate((turned.real, turned.imag), axis=1)


def attention(queries: Array, keys: Array, values: Array) -> Array:
    """One head [position, head_dim]: each position's softmax over the slice up to itself."""
    mixed = []
    for position, query in enumerate(queries):
        scores = keys[: position + 1] @ query / np.sqrt(len(query))
        weights = np.exp(scores - scores.max())
        mixed.append(weights @ values[: position + 1] / weights.sum())
    return np.stack(mixed)


def self_attention(
    x: Array, query_key_value: Array, output: Array, *, n_heads: int, n_kv_heads: int, theta: float
) -> Array:
    """Grouped-query attention; the matrix's rows are all queries' heads, then all keys', then all values'."""
    head_dim = len(query_key_value) // (n_heads + 2 * n_kv_heads)
    heads = [x @ rows.T for rows in query_key_value.reshape(-1, head_dim, x.shape[1])]
    queries, keys, values = heads[:n_heads], heads[n_heads : n_heads + n_kv_heads], heads[-n_kv_heads:]
    mixed = []
    for h, query in enumerate(queries):
        shared = h * n_kv_heads // n_heads
        mixed.append(attention(rope(query, theta), rope(keys[shared], theta), values[shared]))
    return np.concatenate(mixed, axis=1) @ output.T


def swiglu(x: Array, gate_up: Array, down: Array) -> Array:
    """The gate's rows come first, the up projection's second."""
    gate, up = np.split(x @ gate_up.T, 2, axis=1)
    return (gate / (1 + np.exp(-gate)) * up) @ down.T
