"""The forms of operators, of attention and of the optimizer update, where the recipe leaves them open."""

import dataclasses

from napkin.model.compiled_kernels import is_worth_compiling
from napkin.model.config import AttentionImplementation
from napkin.optim.registry import optimizer_entry
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe

PLAIN_UP_TO = 512
"""The longest context at which plain attention is faster than torch's fused attention on a CPU in bf16: forward and
backward pass take 0.6 times as long at 256 tokens and 2.4 times as long at 1024. In fp32 fused attention is always
faster."""

COMPILED_FROM_NUMBERS = 2**16
"""Numbers of a micro-batch's residual stream from which compiled kernels are faster on two cores: with 2^16.6 a step
takes 0.92 times as long as with plain ones, with 2^18.6 (the demo) 0.85 times."""

COMPILED_ATTENTION_FROM = 1024
"""The shortest context at which compiled attention is taken on a CPU in bf16. By itself it takes 0.6 times as long as
the better of both at 256, 512, 1024, 2048 and 4096 tokens, forward and backward (benchmarks/attention.py); but between
the products of a step with 256 tokens 1.4 times as long as plain attention, as its many short calls begin with cold
caches. In fp32 it takes 0.9 to 1.3 times as long as torch's fused attention, and 0.7 to 0.4 times as long as plain
attention."""


def choose_kernels(recipe: Recipe, precision: Precision) -> Recipe:
    """The recipe with all written out; the choice depends only on device, format, shape and length of the run."""
    model, optimizer, training = recipe.model, recipe.optimizer, recipe.training
    if training.kernels == "auto":
        suits = precision.device_type == "cpu" and precision.products == "bf16" and training.compile != "on"
        tokens = training.steps * training.batch_size * model.context_length
        large = training.resolved_micro_batch_size * model.context_length * model.d_model >= COMPILED_FROM_NUMBERS
        compiled = suits and large and is_worth_compiling(model, tokens, trained=True)
        training = dataclasses.replace(training, kernels="compiled" if compiled else "plain")
    if model.attention == "auto":
        attention = _attention(recipe, precision, compiled=training.kernels == "compiled")
        model = dataclasses.replace(model, attention=attention)
    if optimizer.fused is None:
        optimizer = dataclasses.replace(optimizer, fused=optimizer_entry(optimizer.name).fused)
    return dataclasses.replace(recipe, model=model, optimizer=optimizer, training=training)


def _attention(recipe: Recipe, precision: Precision, *, compiled: bool) -> AttentionImplementation:
    model = recipe.model
    usual = model.resolved_attention
    if precision.device_type != "cpu" or recipe.parallelism.context > 1:
        return usual
    in_bf16 = precision.products == "bf16"
    # In fp32 it is faster than plain attention alone, which is what there is for scores with a cap.
    faster = (in_bf16 or usual == "plain") and model.context_length >= COMPILED_ATTENTION_FROM
    if compiled and faster and model.positions != "alibi":
        return "compiled"
    return "plain" if in_bf16 and model.context_length <= PLAIN_UP_TO else usual
