"""The forms of operators, of attention and of the optimizer update, where the recipe leaves them open."""

import dataclasses

from napkin.optim.registry import optimizer_entry
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe

PLAIN_UP_TO = 512
"""The longest context at which plain attention is faster than torch's fused attention on a CPU in bf16: forward and
backward pass take 0.6 times as long at 256 tokens and 2.4 times as long at 1024. In fp32 fused attention is always
faster."""

COMPILED_FROM = 2**38
"""The products of weights and tokens in a run from which compiled kernels are worth being loaded or, once for each
machine, built: some 1.6 TFLOP, seconds of training."""


def choose_kernels(recipe: Recipe, precision: Precision) -> Recipe:
    """The recipe with all written out; the choice depends only on device, format, shape and length of the run."""
    model, optimizer, training = recipe.model, recipe.optimizer, recipe.training
    if training.kernels == "auto":
        suits = precision.device_type == "cpu" and precision.products in ("fp32", "bf16") and training.compile != "on"
        compiled = suits and _products(recipe) >= COMPILED_FROM
        training = dataclasses.replace(training, kernels="compiled" if compiled else "plain")
    if model.attention == "auto":
        on_cpu = precision.device_type == "cpu" and precision.products == "bf16"
        plain = on_cpu and model.context_length <= PLAIN_UP_TO and recipe.parallelism.context == 1
        model = dataclasses.replace(model, attention="plain" if plain else model.resolved_attention)
    if optimizer.fused is None:
        optimizer = dataclasses.replace(optimizer, fused=optimizer_entry(optimizer.name).fused)
    return dataclasses.replace(recipe, model=model, optimizer=optimizer, training=training)


def _products(recipe: Recipe) -> int:
    model, training = recipe.model, recipe.training
    weights = model.d_model * (12 * model.n_layers * model.d_model + model.vocab_size)
    return weights * training.steps * training.batch_size * model.context_length
