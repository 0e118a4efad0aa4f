"""The learning rate as a function of the step, and of nothing else: resuming needs no state."""

import math

from napkin.errors import NapkinError


def warmup_cosine(step: int, *, peak: float, warmup_steps: int, total_steps: int, final_fraction: float) -> float:
    """Learning rate of a step counted from 0: a straight climb to the peak, then half a cosine down.

    The climb has warmup_steps steps below the peak, at peak · (step + 1) / (warmup_steps + 1); step warmup_steps
    is the first at the peak. The cosine (Loshchilov & Hutter 2017) ends at peak · final_fraction on the last
    step, total_steps - 1, and stays there. Where no step is left for the cosine the last one is at the peak.

    >>> [round(warmup_cosine(s, peak=1.0, warmup_steps=1, total_steps=4, final_fraction=0.1), 3) for s in range(5)]
    [0.5, 1.0, 0.55, 0.1, 0.1]

    Raises NapkinError where the numbers describe no such shape.
    """
    if step < 0:
        raise NapkinError(f"step is {step}: steps count from 0")
    if not 0 <= warmup_steps < total_steps:
        raise NapkinError(
            f"warmup_steps {warmup_steps} of total_steps {total_steps}: use 0 to {total_steps - 1}, or train for longer"
        )
    if not 0 <= final_fraction <= 1:
        raise NapkinError(f"final_fraction is {final_fraction}: use a fraction of the peak, 0 to 1")
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    cosine_steps = total_steps - 1 - warmup_steps
    progress = min(1.0, (step - warmup_steps) / cosine_steps) if cosine_steps else 0.0
    return peak * (final_fraction + (1 - final_fraction) * 0.5 * (1 + math.cos(math.pi * progress)))
