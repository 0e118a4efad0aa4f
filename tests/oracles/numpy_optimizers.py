"""Optimizers in float64 NumPy, an array at a time, as their papers state them: for those that torch has no rival of."""

from dataclasses import dataclass, field

import numpy as np

Array = np.ndarray


@dataclass
class Lion:
    """Chen et al. 2023, algorithm 2."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float
    m: float | Array = 0.0

    def updated(self, w: Array, g: Array) -> Array:
        slow, fast = self.betas
        direction = np.sign(slow * self.m + (1 - slow) * g)
        self.m = fast * self.m + (1 - fast) * g
        return w - self.lr * (direction + self.weight_decay * w)


@dataclass
class AdamW:
    """Loshchilov & Hutter 2019, algorithm 2."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    t: int = 0
    m: float | Array = 0.0
    v: float | Array = 0.0

    def updated(self, w: Array, g: Array) -> Array:
        self.t += 1
        self.m = self.betas[0] * self.m + (1 - self.betas[0]) * g
        self.v = self.betas[1] * self.v + (1 - self.betas[1]) * g**2
        mean, square = self.m / (1 - self.betas[0] ** self.t), self.v / (1 - self.betas[1] ** self.t)
        return w - self.lr * (mean / (np.sqrt(square) + self.eps) + self.weight_decay * w)


def newton_schulz_by_singular_values(matrix: Array) -> Array:
    """Newton-Schulz's polynomial, five times, on the singular values alone: none of its products is done."""
    u, s, vt = np.linalg.svd(matrix / np.linalg.norm(matrix), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


@dataclass
class Muon:
    """Jordan et al. 2024, with the step length of Liu et al. 2025; AdamW for what is no matrix."""

    lr: float
    momentum: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    b: float | Array = 0.0
    others: AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.others = AdamW(self.lr, self.betas, self.eps, self.weight_decay)

    def updated(self, w: Array, g: Array) -> Array:
        self.others.lr = self.lr
        if w.ndim < 2:
            return self.others.updated(w, g)
        self.b = self.momentum * self.b + (1 - self.momentum) * g
        ahead = (1 - self.momentum) * g + self.momentum * self.b
        matrices = ahead.reshape(-1, *w.shape[-2:])
        direction = np.stack([newton_schulz_by_singular_values(matrix) for matrix in matrices]).reshape(w.shape)
        return w - self.lr * (0.2 * np.sqrt(max(w.shape[-2:])) * direction + self.weight_decay * w)
