"""How evenly the experts of a mixture were used, over the last logged steps."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from napkin.runs.metrics import StepMetrics

STEPS = 25
"""Logged steps that the balance is averaged over: a single batch is too noisy."""


class Balance(NamedTuple):
    """One layer with experts; loads are relative to a uniform load, which is 1."""

    layer: int
    """Counted from 1 among the layers that have experts."""
    n_experts: int
    busiest: float
    least_busy: float
    dropped: float
    """Fraction of the routed tokens that were dropped because their expert was full."""


def expert_balance(metrics: Sequence[StepMetrics]) -> list[Balance]:
    """The balance of each layer over the last `STEPS` logged steps; empty if the model has no experts."""
    logged = [step for step in metrics if step.expert_tokens is not None][-STEPS:]
    if not logged:
        return []
    layers = len(logged[-1].expert_tokens or [])
    found = []
    for layer in range(layers):
        tokens = np.array([(step.expert_tokens or [])[layer] for step in logged], dtype=np.float64).sum(axis=0)
        dropped = sum((step.dropped_tokens or [0] * layers)[layer] for step in logged)
        uniform = tokens.mean() or 1.0
        found.append(
            Balance(
                layer=layer + 1,
                n_experts=tokens.size,
                busiest=float(tokens.max() / uniform),
                least_busy=float(tokens.min() / uniform),
                dropped=float(dropped / (tokens.sum() or 1.0)),
            )
        )
    return found
