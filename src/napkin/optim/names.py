"""Optimizers by name: where each is, what it takes, and where a run with it begins.

No torch in here: the command line reads this table for its help. A new optimizer is a file and a line.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from napkin.errors import NapkinError

if TYPE_CHECKING:
    from torch import dtype, nn

    from napkin.optim.base import Optimizer


@dataclass(frozen=True)
class Choice:
    """An optimizer that a recipe can name."""

    path: str
    """Module and class."""

    state_bytes: int
    """Bytes of state a parameter of a matrix inside a block; Adafactor's rows and columns round to 0."""

    options: Mapping[str, float]
    """The recipe's options that it takes, and its own default for each; all take learning_rate and weight_decay."""

    fused: bool = True
    """Whether torch has a kernel for it."""


_ADAM = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}

OPTIMIZERS: dict[str, Choice] = {
    "sgd": Choice("sgd.SGD", 0, {"learning_rate": 0.3, "weight_decay": 0.0}),
    "momentum": Choice("sgd.Momentum", 4, {"learning_rate": 0.05, "weight_decay": 0.0, "momentum": 0.9}),
    "nesterov": Choice("sgd.Nesterov", 4, {"learning_rate": 0.05, "weight_decay": 0.0, "momentum": 0.9}),
    "adagrad": Choice("adagrad.AdaGrad", 4, {"learning_rate": 1e-2, "weight_decay": 0.0, "eps": 1e-10}),
    "rmsprop": Choice(
        "rmsprop.RMSProp", 4, {"learning_rate": 1e-3, "weight_decay": 0.0, "beta2": 0.99, "eps": 1e-8}, fused=False
    ),
    "adam": Choice("adam.Adam", 8, {"learning_rate": 3e-3, "weight_decay": 0.0, **_ADAM}),
    "adamw": Choice("adamw.AdamW", 8, {"learning_rate": 3e-3, "weight_decay": 0.1, **_ADAM}),
    "lion": Choice(
        "lion.Lion", 4, {"learning_rate": 5e-4, "weight_decay": 0.6, "beta1": 0.9, "beta2": 0.99}, fused=False
    ),
    "adafactor": Choice(
        "adafactor.Adafactor", 0, {"learning_rate": 1e-2, "weight_decay": 0.0, "eps": 1e-3}, fused=False
    ),
    "muon": Choice("muon.Muon", 4, {"learning_rate": 3e-3, "weight_decay": 0.1, "momentum": 0.95, **_ADAM}),
}


def choice_of(name: str) -> Choice:
    """A line of the table. Raises NapkinError for a name that is not in it."""
    if name not in OPTIMIZERS:
        raise NapkinError(f"there is no optimizer '{name}': use one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


def build_optimizer(
    name: str, model: "nn.Module", *, products: "dtype | None" = None, fused: bool = False, **options: float
) -> "Optimizer":
    """The optimizer of that name over a model's parameters, matrices decaying and vectors not.

    `options` are named as in a recipe; those left out are the optimizer's own. `products` is the format of Muon's
    matrix products, fp32 if left out. Raises NapkinError for a name, an option or a value that cannot be.
    """
    import torch

    choice = choice_of(name)
    for option in options.keys() - choice.options.keys():
        raise NapkinError(f"{name} takes no {option}: leave it out, or use one of {', '.join(choice.options)}")
    settings: dict[str, Any] = {**choice.options, **options}
    settings["lr"] = settings.pop("learning_rate")
    if "beta1" in settings:
        settings["betas"] = (settings.pop("beta1"), settings.pop("beta2"))
    module, _, class_name = choice.path.partition(".")
    optimizer = getattr(importlib.import_module(f"napkin.optim.{module}"), class_name)
    return optimizer.for_model(model, products=products or torch.float32, fused=fused, **settings)
