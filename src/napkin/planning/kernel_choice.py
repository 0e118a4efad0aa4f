"""Which implementation of attention and of the optimizer's update a run takes where its recipe leaves that open."""

import dataclasses

from napkin.optim.names import choice_of
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe

PLAIN_UP_TO = 512
"""Longest context at which a CPU is faster with plain attention than with torch's fused form, in bf16: forward and
backward pass take 0.6 of its time at 256 tokens and 2.4 times its time at 1024. In fp32 the fused form always wins."""


def choose_kernels(recipe: Recipe, precision: Precision) -> Recipe:
    """The recipe with both written out: a function of device, format and shape alone, the same each time."""
    model, optimizer = recipe.model, recipe.optimizer
    if model.attention == "auto":
        on_cpu = precision.device_type == "cpu" and precision.products == "bf16"
        plain = on_cpu and model.context_length <= PLAIN_UP_TO
        model = dataclasses.replace(model, attention="plain" if plain else model.resolved_attention)
    if optimizer.fused is None:
        optimizer = dataclasses.replace(optimizer, fused=choice_of(optimizer.name).fused)
    return dataclasses.replace(recipe, model=model, optimizer=optimizer)
