"""Optimizers by name, with their options and default settings, and learning-rate schedules by name.

Schedules are functions of the step alone, so that resuming needs no state. A new optimizer or schedule is a class and a
line of its table. This module does not import torch: the command line reads the tables for its help.
"""

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from napkin.errors import NapkinError, near_names

if TYPE_CHECKING:
    from torch import dtype, nn

    from napkin.optim.base import Optimizer


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer that a recipe can name."""

    path: str
    """Module in napkin.optim, and class."""

    state_bytes: int
    """Bytes of state per parameter of a matrix in a block; Adafactor's rows and columns round to 0."""

    options: Mapping[str, float]
    """The recipe's options that it takes, with its defaults; all take learning_rate and weight_decay."""

    fused: bool = True
    """True if torch has a fused kernel for it."""


_ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}

OPTIMIZERS: dict[str, OptimizerEntry] = {
    "sgd": OptimizerEntry("sgd.SGD", 0, {"learning_rate": 0.3, "weight_decay": 0.0}),
    "momentum": OptimizerEntry("sgd.Momentum", 4, {"learning_rate": 0.05, "weight_decay": 0.0, "momentum": 0.9}),
    "nesterov": OptimizerEntry("sgd.Nesterov", 4, {"learning_rate": 0.05, "weight_decay": 0.0, "momentum": 0.9}),
    "adagrad": OptimizerEntry("adam.AdaGrad", 4, {"learning_rate": 1e-2, "weight_decay": 0.0, "eps": 1e-10}),
    "rmsprop": OptimizerEntry(
        "adam.RMSProp", 4, {"learning_rate": 1e-3, "weight_decay": 0.0, "beta2": 0.99, "eps": 1e-8}, fused=False
    ),
    "adam": OptimizerEntry("adam.Adam", 8, {"learning_rate": 3e-3, "weight_decay": 0.0, **_ADAM}),
    "adamw": OptimizerEntry("adam.AdamW", 8, {"learning_rate": 3e-3, "weight_decay": 0.1, **_ADAM}),
    "lion": OptimizerEntry(
        "sgd.Lion", 4, {"learning_rate": 5e-4, "weight_decay": 0.6, "beta1": 0.9, "beta2": 0.99}, fused=False
    ),
    "adafactor": OptimizerEntry(
        "adafactor.Adafactor", 0, {"learning_rate": 1e-2, "weight_decay": 0.0, "eps": 1e-3}, fused=False
    ),
    "muon": OptimizerEntry("muon.Muon", 4, {"learning_rate": 3e-3, "weight_decay": 0.1, "momentum": 0.95, **_ADAM}),
}


def optimizer_entry(name: str) -> OptimizerEntry:
    """The entry of that name. Raises NapkinError for a name that is not in the table."""
    if name not in OPTIMIZERS:
        near = near_names(name, OPTIMIZERS)
        hint = f" (did you mean '{near[0]}'?)" if near else ""
        raise NapkinError(f"there is no optimizer '{name}': use one of {', '.join(OPTIMIZERS)}{hint}")
    return OPTIMIZERS[name]


def build_optimizer(
    name: str, model: "nn.Module", *, products: "dtype | None" = None, fused: bool = False, **options: float
) -> "Optimizer":
    """The optimizer of that name over a model's parameters, with weight decay for matrices and none for vectors.

    `options` are named as in a recipe; those left out take the optimizer's defaults. `products` is the dtype of Muon's
    matrix products, fp32 if left out. Raises NapkinError for an unknown name or option, or an impossible value.
    """
    import torch

    entry = optimizer_entry(name)
    for option in options.keys() - entry.options.keys():
        raise NapkinError(f"{name} takes no {option}: leave it out, or use one of {', '.join(entry.options)}")
    settings: dict[str, Any] = {**entry.options, **options}
    settings["lr"] = settings.pop("learning_rate")
    if "beta1" in settings:
        settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
    module, _, class_name = entry.path.partition(".")
    optimizer = getattr(importlib.import_module(f"napkin.optim.{module}"), class_name)
    return optimizer.for_model(model, products=products or torch.float32, fused=fused, **settings)


@dataclass(frozen=True)
class Schedule:
    """Common part of all schedules: the checks, and the warm-up, over which the rate rises to its peak.

    It rises as (step + 1) / (warmup_steps + 1): step `warmup_steps`, counted from 0, is the first at the peak.
    `schedule(step)` is the fraction of the peak, `schedule(step, peak)` the learning rate. Beyond the last step the
    learning rate stays at its last value, except for the inverse square root, which has no end. Raises NapkinError for
    impossible numbers of steps, and for a step below 0.
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
        """Fraction of the peak, from step `warmup_steps` on."""
        raise NotImplementedError

    def progress(self, step: int) -> float:
        """The way from the first step at the peak (0) to the last step (1); 0 if they are the same."""
        steps = self.total_steps - 1 - self.warmup_steps
        return min(1.0, (step - self.warmup_steps) / steps) if steps else 0.0


@dataclass(frozen=True)
class Constant(Schedule):
    """The peak until the end."""

    def after_warmup(self, step: int) -> float:
        return 1.0


@dataclass(frozen=True)
class _Decaying(Schedule):
    final_fraction: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.final_fraction <= 1:
            raise NapkinError(f"final_fraction is {self.final_fraction}: use a fraction of the peak, 0 to 1")

    def interpolated(self, height: float) -> float:
        """A fraction between final_fraction, at height 0, and 1, at height 1."""
        return self.final_fraction + (1 - self.final_fraction) * height


@dataclass(frozen=True)
class Linear(_Decaying):
    """A straight line from the peak down to `final_fraction` of it on the last step."""

    def after_warmup(self, step: int) -> float:
        """1 - progress, between 1 and the final fraction."""
        return self.interpolated(1 - self.progress(step))


@dataclass(frozen=True)
class Cosine(_Decaying):
    """Half a cosine (Loshchilov & Hutter 2017) from the peak down to `final_fraction` of it on the last step.

    If the warm-up leaves one step, it is at the peak.
    """

    def after_warmup(self, step: int) -> float:
        """(1 + cos(π · progress)) / 2, between 1 and the final fraction."""
        # Computed in this order, the learning rates equal those of earlier runs to the last bit.
        final = self.final_fraction
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * self.progress(step)))


@dataclass(frozen=True)
class WarmupStableDecay(_Decaying):
    """The peak, then a straight line down over the last `decay_steps` (Hu et al. 2024, "MiniCPM").

    A run's length need not be known before its decay begins: the decay can start from any checkpoint of the stable
    part. By default it takes a fifth of all steps (Hägele et al. 2024), or what the warm-up leaves of it.
    """

    decay_steps: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        most = self.total_steps - 1 - self.warmup_steps
        if self.decay_steps is not None and not 0 <= self.decay_steps <= most:
            raise NapkinError(f"decay_steps is {self.decay_steps}: the warm-up leaves 0 to {most}")

    def after_warmup(self, step: int) -> float:
        """1, then a straight line down to the final fraction on the last step."""
        chosen = self.decay_steps
        most = self.total_steps - 1 - self.warmup_steps
        decay_steps = min(self.total_steps // 5, most) if chosen is None else chosen
        left = max(0, self.total_steps - 1 - step)
        return self.interpolated(min(1.0, left / decay_steps) if decay_steps else 1.0)


@dataclass(frozen=True)
class InverseSquareRoot(Schedule):
    """1 / sqrt(step), continuing the warm-up (Vaswani et al. 2017, section 5.3), for a run without a planned end."""

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
