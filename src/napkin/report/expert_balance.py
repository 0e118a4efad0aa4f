"""How evenly the experts of a mixture were used, over the last steps that were logged."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from napkin.runs.run_record import LoggedStep

STEPS = 25
"""Logged steps that the balance is taken over: one batch alone is a matter of chance."""


class Balance(NamedTuple):
    """One layer of experts; shares are of an even one, 1 where all are used alike."""

    layer: int
    """Counted from 1 among the layers that have experts."""
    n_experts: int
    busiest: float
    idlest: float
    dropped: float
    """Share of the visits that found their expert full."""


def expert_balance(metrics: Sequence[LoggedStep]) -> list[Balance]:
    """The balance of each layer over the last `STEPS` logged steps; empty where the model has no experts."""
    logged = [step for step in metrics if step.expert_tokens is not None][-STEPS:]
    if not logged:
        return []
    layers = len(logged[-1].expert_tokens or [])
    found = []
    for layer in range(layers):
        visits = np.array([(step.expert_tokens or [])[layer] for step in logged], dtype=np.float64).sum(axis=0)
        dropped = sum((step.dropped_tokens or [0] * layers)[layer] for step in logged)
        even = visits.mean() or 1.0
        found.append(
            Balance(
                layer=layer + 1,
                n_experts=visits.size,
                busiest=float(visits.max() / even),
                idlest=float(visits.min() / even),
                dropped=float(dropped / (visits.sum() or 1.0)),
            )
        )
    return found
