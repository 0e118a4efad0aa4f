"""The learning rate as a function of the step, and of nothing else: resuming needs no state.

Every shape climbs to its peak over the warm-up first, at (step + 1) / (warmup_steps + 1) of it: step `warmup_steps`,
counted from 0, is the first at the peak. A new shape is a class and a line of `SCHEDULES`.
"""

import math
from dataclasses import dataclass

from napkin.errors import NapkinError


@dataclass(frozen=True)
class Schedule:
    """What the shapes share: the warm-up, and what is refused.

    `schedule(step)` is the share of the peak, `schedule(step, peak)` the learning rate. Steps beyond the last one stay
    where that ended, but for the inverse square root, which has no end. Raises NapkinError where the numbers describe
    no such shape, and for a step below 0.
    """

    warmup_steps: int
    total_steps: int

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.total_steps:
            raise NapkinError(
                f"warmup_steps {self.warmup_steps} of total_steps {self.total_steps}: "
                f"use 0 to {self.total_steps - 1}, or train for longer"
            )

    def __call__(self, step: int, peak: float = 1.0) -> float:
        """Learning rate of a step counted from 0."""
        if step < 0:
            raise NapkinError(f"step is {step}: steps count from 0")
        if step < self.warmup_steps:
            return peak * (step + 1) / (self.warmup_steps + 1)
        return peak * self.after_warmup(step)

    def after_warmup(self, step: int) -> float:
        """Share of the peak, from step `warmup_steps` on."""
        raise NotImplementedError

    def progress(self, step: int) -> float:
        """How much of the way from the first step at the peak to the last step is gone; 0 where there is none."""
        way = self.total_steps - 1 - self.warmup_steps
        return min(1.0, (step - self.warmup_steps) / way) if way else 0.0


@dataclass(frozen=True)
class Constant(Schedule):
    """The peak, to the end."""

    def after_warmup(self, step: int) -> float:
        """1."""
        return 1.0


@dataclass(frozen=True)
class _Falling(Schedule):
    final_fraction: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.final_fraction <= 1:
            raise NapkinError(f"final_fraction is {self.final_fraction}: use a fraction of the peak, 0 to 1")

    def between(self, height: float) -> float:
        """From final_fraction, at height 0, to 1."""
        return self.final_fraction + (1 - self.final_fraction) * height


@dataclass(frozen=True)
class Linear(_Falling):
    """A straight line from the peak down to `final_fraction` of it on the last step."""

    def after_warmup(self, step: int) -> float:
        """1 - progress, between 1 and the final fraction."""
        return self.between(1 - self.progress(step))


@dataclass(frozen=True)
class Cosine(_Falling):
    """Half a cosine (Loshchilov & Hutter 2017) from the peak down to `final_fraction` of it on the last step.

    Where no step is left for it the last one is at the peak.
    """

    def after_warmup(self, step: int) -> float:
        """(1 + cos(π · progress)) / 2, between 1 and the final fraction."""
        # In this order: the learning rates of earlier runs, to the last bit.
        final = self.final_fraction
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * self.progress(step)))


@dataclass(frozen=True)
class WarmupStableDecay(_Falling):
    """The peak, then a straight line down over the last `decay_steps` (Hu et al. 2024, "MiniCPM").

    A run's length need not be known before its decay begins: any checkpoint of the stable part can be decayed from.
    None is a fifth of all steps (Hägele et al. 2024), or what the warm-up leaves of it.
    """

    decay_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.total_steps - 1 - self.warmup_steps
        if self.decay_steps is not None and not 0 <= self.decay_steps <= most:
            raise NapkinError(f"decay_steps is {self.decay_steps}: the warm-up leaves 0 to {most}")

    def after_warmup(self, step: int) -> float:
        """1, then less by the same share a step, the last step being at the final fraction."""
        chosen = self.decay_steps
        most = self.total_steps - 1 - self.warmup_steps
        decay_steps = min(self.total_steps // 5, most) if chosen is None else chosen
        left = max(0, self.total_steps - 1 - step)
        return self.between(min(1.0, left / decay_steps) if decay_steps else 1.0)


@dataclass(frozen=True)
class InverseSquareRoot(Schedule):
    """1 / sqrt(step), as it continues the warm-up (Vaswani et al. 2017, section 5.3): a run without a planned end."""

    def after_warmup(self, step: int) -> float:
        """sqrt((warmup_steps + 1) / (step + 1))."""
        return math.sqrt((self.warmup_steps + 1) / (step + 1))


SCHEDULES: dict[str, type[Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "warmup-stable-decay": WarmupStableDecay,
    "inverse-square-root": InverseSquareRoot,
}


def warmup_cosine(step: int, *, peak: float, warmup_steps: int, total_steps: int, final_fraction: float) -> float:
    """Learning rate of a step counted from 0 by `Cosine`.

    >>> [round(warmup_cosine(s, peak=1.0, warmup_steps=1, total_steps=4, final_fraction=0.1), 3) for s in range(5)]
    [0.5, 1.0, 0.55, 0.1, 0.1]
    """
    return Cosine(warmup_steps, total_steps, final_fraction)(step, peak)
