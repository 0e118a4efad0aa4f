"""The ledger of a recipe's step: the step itself is traced on fake tensors, without allocation or computation."""

import dataclasses
import functools

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.counting import count
from napkin.accounting.ledger import Ledger
from napkin.accounting.sharding import Sharding, ShardingUnits
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import build_train_state

TRACED_MICRO_BATCHES = 3
"""All micro-batches from the second on are counted alike."""


def count_step(resolved: ResolvedRecipe) -> Ledger:
    """The ledger of one device's step: its rows of the batch, and the bytes of its part of the model."""
    recipe = resolved.per_device
    alone = dataclasses.replace(resolved, recipe=recipe, precision=resolved.precision.on("cpu"), world_size=1)
    size = recipe.training.resolved_micro_batch_size
    traced = min(recipe.training.batch_size // size, TRACED_MICRO_BATCHES)
    with FakeTensorMode():
        # Fake tensors are on the CPU for every target: fake CUDA tensors abort a CPU build of torch.
        train_state = build_train_state(alone)
        tokens = torch.zeros(recipe.training.batch_size, recipe.model.context_length, dtype=torch.int64)
        others = [tokens.clone() for _ in range(2 if recipe.data.separate_documents else 1)]
        # Views, so that the bytes of the whole batch are counted.
        batch = tuple(tensor[: traced * size] for tensor in (tokens, *others))
        ledger = count(
            train_state.model, batch, lambda model, batch: train_state.step(0, *batch), target=resolved.counted_for
        )
    more = recipe.training.batch_size // size - traced
    ledger = ledger.with_more_micro_batches(more) if more else ledger
    return sharding_of(resolved).device_ledger(ledger) if resolved.world_size > 1 else ledger


def sharding_of(resolved: ResolvedRecipe) -> Sharding:
    """How the model of a resolved recipe is sharded over its devices."""
    bytes_per_number = {"fp32": 4, "bf16": 2}
    return Sharding(
        resolved.strategy,
        resolved.world_size,
        _units(resolved.recipe.model),
        bytes_per_weight=resolved.precision.bytes_per_weight,
        gather_bytes=bytes_per_number[resolved.gather_format],
        reduce_bytes=bytes_per_number[resolved.recipe.training.reduce_format],
    )


@functools.lru_cache(maxsize=256)
def _units(config: ModelConfig) -> ShardingUnits:
    with FakeTensorMode():
        return ShardingUnits.of(Transformer(config))
