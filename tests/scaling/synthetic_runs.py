"""Runs whose law is known."""

import numpy as np

from napkin.scaling import Observation

TRUTH = {"A": 482.0, "alpha": 0.348, "B": 2085.0, "beta": 0.366, "E": 1.82}


def true_loss(parameters: float, tokens: float) -> float:
    return TRUTH["E"] + TRUTH["A"] / parameters ** TRUTH["alpha"] + TRUTH["B"] / tokens ** TRUTH["beta"]


def synthetic_runs(count: int, noise: float = 0.0, seed: int = 0) -> list[Observation]:
    """Runs of 10^7 to 3·10^9 parameters, with 3 to 300 tokens per parameter."""
    random = np.random.default_rng(seed)
    sizes = 10 ** random.uniform(7, 9.5, count)
    tokens = sizes * 10 ** random.uniform(0.5, 2.5, count)
    factors = np.exp(random.normal(0, noise, count)) if noise else np.ones(count)
    return [
        Observation(float(n), float(d), true_loss(float(n), float(d)) * float(factor))
        for n, d, factor in zip(sizes, tokens, factors, strict=True)
    ]
