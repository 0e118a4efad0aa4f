"""Layouts that a search found, held to the bytes of a counted step."""

import dataclasses
from collections.abc import Callable

from napkin.errors import NapkinError
from napkin.planning.layout_plan import LayoutPlan
from napkin.planning.layout_search import SearchResult
from napkin.recipe.parallelism_config import ParallelismConfig
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step_ledger import count_step
from napkin.units import format_bytes


def with_best_counted(found: SearchResult, progress: Callable[[str], None] = lambda doing: None) -> SearchResult:
    """The result with the step of its best layout counted; those that do not fit by count come to the ones too large.

    Raises NapkinError where none of them fits.
    """
    plans, too_large = list(found.plans), list(found.too_large)
    while plans:
        counted = with_counted_bytes(plans[0], progress)
        if counted.fits:
            return dataclasses.replace(found, plans=[counted, *plans[1:]], too_large=too_large)
        too_large.append(counted)
        del plans[0]
    least = min(too_large, key=lambda plan: plan.peak_bytes)
    raise NapkinError(
        f"no layout of {least.site.name} fits: the least by count is {format_bytes(least.peak_bytes)} per device with "
        f"{least.layout}, of {format_bytes(least.site.memory_bytes)}: use more devices or a smaller model"
    )


def with_counted_bytes(plan: LayoutPlan, progress: Callable[[str], None] = lambda doing: None) -> LayoutPlan:
    """The plan with the peak bytes of the rank that is expected to need most: its real step on fake tensors."""
    resolved = resolved_choice(plan)
    rank = plan.largest_rank * (resolved.world_size // plan.layout.pipeline)
    named = f"counting the step of rank {rank}"
    ledger = count_step(resolved, rank, progress=lambda calls: progress(f"{named}: {calls:,} operator calls"))
    return dataclasses.replace(plan, counted_bytes=ledger.peak_bytes)


def resolved_choice(plan: LayoutPlan) -> ResolvedRecipe:
    """The recipe that trains as planned."""
    choice, layout = plan.choice, plan.layout
    parallelism = ParallelismConfig(
        data=layout.data,
        shard=layout.shard,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        expert=layout.expert,
        schedule=layout.schedule,
        stages_per_rank=layout.stages_per_rank if layout.stages_per_rank > 1 else None,
        blocks_per_stage=layout.blocks_per_stage,
        shard_optimizer=layout.shard_optimizer,
    )
    resolved = plan.resolved.with_training(
        micro_batch_size=choice.micro_batch_size,
        recompute=choice.recompute,
        loss_chunk_size=choice.loss_chunk_size,
        parallelism="fsdp" if layout.shard > 1 else "ddp",
    )
    return dataclasses.replace(resolved, recipe=dataclasses.replace(resolved.recipe, parallelism=parallelism))
