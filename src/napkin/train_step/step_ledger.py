"""The ledger of a recipe's step: the step itself is traced on fake tensors, without allocation or computation."""

import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.counting import count
from napkin.accounting.ledger import Ledger
from napkin.distributed.ranks import ALONE, Ranks
from napkin.errors import NapkinError
from napkin.kernels.deterministic import deterministic_algorithms
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import TrainState, build_train_state

TRACED_MICRO_BATCHES = 3
"""Micro-batches that are traced: all from the second on have equal counts."""


MOST_LOSS_CHUNKS = 8192
"""Chunks of logits that are traced, each some two dozen operator calls: 4 million tokens of the default size."""
MOST_BLOCKS = 2**17
"""Blocks of all micro-batches, each some hundred rows of the ledger."""


def count_step(
    resolved: ResolvedRecipe,
    rank: int = 0,
    *,
    reserved: bool = True,
    compiled: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Ledger:
    """The ledger of one rank's step: its rows of the batch, its part of the model, and what it sends to others.

    With `compiled`, the blocks are counted as torch.compile makes them, which takes some seconds longer.

    `reserved` is whether the bytes are wanted that a GPU's caching allocator reserves: they depend on all of the first
    step, and take as long again to count. `progress` is called with the number of operator calls traced so far. Raises
    NapkinError for a step of so many that tracing them would take hours.
    """
    recipe = resolved.per_device
    refuse_endless_count(recipe)
    size = recipe.training.resolved_micro_batch_size
    n_micro_batches = recipe.training.batch_size // size
    # In a pipeline, their number determines their order.
    traced = n_micro_batches if resolved.layout.pipeline > 1 else min(n_micro_batches, TRACED_MICRO_BATCHES)
    # Fake tensors are on the CPU for every target: fake CUDA tensors abort a CPU build of torch.
    on_cpu = dataclasses.replace(resolved.with_training(micro_batch_size=size), precision=resolved.precision.on("cpu"))
    fixed_order = deterministic_algorithms(recipe.training.deterministic)
    with fixed_order, FakeTensorMode(), _as_rank(resolved.world_size, rank) as ranks:
        train_state = build_train_state(on_cpu, ranks, compiled=compiled)
        tokens = torch.zeros(recipe.training.batch_size, recipe.model.context_length, dtype=torch.int64)
        others = [tokens.clone() for _ in range(2 if recipe.data.separate_documents else 1)]
        # Views, so that the bytes of the whole batch are counted.
        batch = tuple(tensor[: traced * size] for tensor in (tokens, *others))
        ledger = count(
            train_state.model,
            batch,
            lambda model, batch: train_state.step(0, *batch),
            target=resolved.counted_for,
            warm_up=warm_up_of(resolved, train_state, reserved=reserved),
            progress=progress,
        )
    if not reserved:
        ledger = dataclasses.replace(ledger, reserved_bytes=None)
    more = n_micro_batches - traced
    return ledger.with_more_micro_batches(more) if more else ledger


def warm_up_of(resolved: ResolvedRecipe, train_state: TrainState, *, reserved: bool = True) -> int | Callable[[], None]:
    """The argument `warm_up` of `count` that leads to a step's steady state."""
    if resolved.strategy == "ddp":
        # DDP chooses its buckets before the second step.
        return 2
    # A whole step leaves other ranks' parts, the blocks of CUDA's allocator, and how tokens were routed.
    in_blocks = resolved.counted_for != "cpu" and reserved
    leaves_more = resolved.world_size > 1 or in_blocks or resolved.recipe.model.n_experts
    return 1 if leaves_more else train_state.first_update


def _as_rank(world_size: int, rank: int) -> AbstractContextManager[Ranks]:
    if world_size == 1:
        return nullcontext(ALONE)
    from napkin.distributed.fake_ranks import fake_ranks

    return fake_ranks(world_size, rank)


def refuse_endless_count(recipe: Recipe) -> None:
    """Raise NapkinError, with the settings that help, where a step has too many operator calls to be counted."""
    training, context_length = recipe.training, recipe.model.context_length
    size = training.resolved_micro_batch_size
    chunk = training.resolved_loss_chunk_size
    n_chunks, n_micro_batches = -(-size * context_length // chunk), training.batch_size // size
    if n_chunks > MOST_LOSS_CHUNKS:
        enough = 2 ** math.ceil(math.log2(size * context_length / MOST_LOSS_CHUNKS))
        most = MOST_LOSS_CHUNKS * chunk // context_length
        if most:
            fits = next(n for n in range(most, 0, -1) if training.batch_size % n == 0)
            fewer = f"--training.micro-batch-size {fits}"
        else:
            fewer = f"a --model.context-length of {MOST_LOSS_CHUNKS * chunk} at most"
        raise NapkinError(
            f"a micro-batch of {size:,} × {context_length:,} tokens computes its loss in {n_chunks:,} chunks of "
            f"{chunk:,}, too many to count, the limit is {MOST_LOSS_CHUNKS:,}: use {fewer}, or "
            f"--training.loss-chunk-size {enough}"
        )
    if n_micro_batches * recipe.model.n_layers > MOST_BLOCKS and n_micro_batches > TRACED_MICRO_BATCHES:
        raise NapkinError(
            f"a step of {n_micro_batches:,} micro-batches through {recipe.model.n_layers:,} layers is too long to "
            f"count, the limit is {MOST_BLOCKS:,} layers in all: use a larger --training.micro-batch-size, or a "
            "smaller --training.batch-size"
        )
