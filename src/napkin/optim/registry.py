"""Optimizers by name, with their options and default settings.

This module does not import torch: the command line reads the table for its help. A new optimizer is a file and a line
here.
"""

import importlib
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
    "adagrad": OptimizerEntry("adagrad.AdaGrad", 4, {"learning_rate": 1e-2, "weight_decay": 0.0, "eps": 1e-10}),
    "rmsprop": OptimizerEntry(
        "adagrad.RMSProp", 4, {"learning_rate": 1e-3, "weight_decay": 0.0, "beta2": 0.99, "eps": 1e-8}, fused=False
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
