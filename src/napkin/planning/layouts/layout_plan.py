"""The plan of a layout: bytes of each rank, and the seconds of a step, its pipeline simulated action by action.

A step is as long as its schedule, then the all-reduce of gradients that no backward pass hides, then the update.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from napkin.accounting.pipeline_simulation import PipelineTimeline, simulate_pipeline
from napkin.accounting.pricing import dollars
from napkin.errors import NapkinError
from napkin.planning.layouts.costs import Choice, LayoutCosts, choice_of
from napkin.planning.layouts.rank_bytes import RankBytes, ranks_bytes
from napkin.planning.layouts.stages import (
    Sender,
    StageContent,
    StageTime,
    blocks_by_recompute,
    is_sharded,
    once_per_step,
    own_parameters,
    schedule_of,
    send_seconds,
    stage_times,
    stages_of_ranks,
)
from napkin.planning.step.machine import CatalogueMachine
from napkin.planning.step.site import Site, fits
from napkin.recipe.layout import Layout
from napkin.recipe.resolved import ResolvedRecipe

PHASES = ("forward", "backward_input", "backward_weight", "recompute")
SENDERS = ("tensor", "context", "expert", "shard", "data")


@dataclass(frozen=True)
class SumAndCount:
    """One quantity of a layout's step, reached in two ways that differ by some percent.

    The sum is of a model's parts (embedding, a block, head, update), each counted once and scaled to the shapes of any
    rank, with what the ranks wait for: it is fast enough to compare thousands of layouts, and knows how long a pipeline
    takes. The count is of the real step of one rank, every operator on fake tensors: exact for that rank, but not for
    the others. So bytes are stated by the count, as soon as there is one, and seconds by the sum.
    """

    parts: Mapping[str, float]
    """The parts of the sum, by name."""
    counted: float | None
    """The count; None where the real step was not counted."""

    @property
    def sum(self) -> float:
        return math.fsum(self.parts.values())

    @property
    def count_over_sum(self) -> float | None:
        """The distance of the count from the sum, as a part of it; None where there is no count."""
        return None if self.counted is None else self.counted / self.sum - 1


@dataclass(frozen=True)
class LayoutPlan:
    """The step of one layout: seconds of the whole, bytes of each rank of its pipeline."""

    resolved: ResolvedRecipe
    choice: Choice
    site: Site
    micro_batches: int
    """Micro-batches per pipeline and step."""
    stages: tuple[StageTime, ...]
    """Stages in the order of the forward pass; seconds of one micro-batch."""
    ranks: tuple[RankBytes, ...]
    """Bytes of each rank of a pipeline; ranks beside it in the other dimensions hold as much."""
    pipeline_seconds: float
    """Seconds from the first forward to the end of the last backward pass."""
    sending_seconds: float
    """Seconds of sending one micro-batch from a stage to the next."""
    once_per_step: dict[Sender, tuple[float, float]]
    """Exposed and hidden seconds of what is sent once per step, by dimension."""
    update_seconds: float
    """Seconds of clipping and the optimizer, and of sending updated parameters where ranks share its state."""
    model_flops: float
    """FLOPs of the step of all devices, recomputation left out, attention over all pairs."""
    expert_seconds: float
    """Seconds of a step that grow with the tokens that the busiest rank of expert gets: its experts compute, and the
    others wait for it. 0 where ranks do not divide experts, or where experts have a capacity."""
    factor: float
    """The step is expected to take between seconds / factor and seconds · factor in nine cases of ten."""
    stack: str = "napkin"
    """The program that trains."""
    counted_bytes: int | None = None
    """The peak of the rank that needs most, its real step counted; None where it was not."""

    @property
    def layout(self) -> Layout:
        return self.choice.layout

    @property
    def seconds(self) -> float:
        return self.pipeline_seconds + self.update_seconds + sum(exposed for exposed, _ in self.once_per_step.values())

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds that hold a step in nine cases of ten."""
        return self.seconds / self.factor, self.seconds * self.factor

    @property
    def tokens_per_second(self) -> float:
        return self.resolved.recipe.tokens_per_step / self.seconds

    @property
    def mfu(self) -> float:
        """Model-FLOPs utilisation: attention over all pairs, recomputation left out."""
        return self.model_flops / self.seconds / (self.site.n_devices * self.site.matmul_peak)

    @property
    def dollars(self) -> float | None:
        """Price of all steps; None if unknown."""
        per_hour = self.site.usd_per_hour
        return None if per_hour is None else dollars(self.resolved.recipe.training.steps * self.seconds, per_hour)

    @property
    def bytes_of_largest(self) -> SumAndCount:
        """The peak of the rank that needs most."""
        return SumAndCount(self.ranks[self.largest_rank].by_use, self.counted_bytes)

    @property
    def peak_bytes(self) -> float:
        """Peak bytes, by count if there is one, otherwise by the sum."""
        return self.ranks[self.largest_rank].total if self.counted_bytes is None else self.counted_bytes

    @property
    def largest_rank(self) -> int:
        """The rank of the pipeline that needs most."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def fits(self) -> bool:
        """True if that fits into the device's memory, as `site.fits` says."""
        return fits(self.peak_bytes, self.site.memory_bytes)

    def as_values(self) -> dict[str, Any]:
        """The plan for programs: bytes, seconds and dollars."""
        choice, layout = self.choice, self.layout
        return {
            "device": self.site.device_name,
            "n_devices": self.site.n_devices,
            "stack": self.stack,
            "layout": {**layout.sizes, "expert": layout.expert, "whole_experts": layout.whole_experts},
            "schedule": layout.schedule if layout.pipeline > 1 else None,
            "stages_per_rank": layout.stages_per_rank,
            "shard_optimizer": layout.shard_optimizer,
            "batch_size": self.resolved.recipe.training.batch_size,
            "micro_batch_size": choice.micro_batch_size,
            "micro_batches": self.micro_batches,
            "recompute": choice.recompute,
            "loss_chunk_size": choice.loss_chunk_size,
            "fits": self.fits,
            "peak_bytes": round(self.peak_bytes),
            "counted_bytes": self.counted_bytes,
            "memory_bytes": self.site.memory_bytes,
            "ranks": [
                {name: round(size) for name, size in {**dataclasses.asdict(rank), "total": rank.total}.items()}
                for rank in self.ranks
            ],
            "seconds_per_step": self.seconds,
            "interval": self.interval,
            "seconds_by_kind": self.by_kind,
            "seconds_hidden": self.hidden,
            "expert_seconds": self.expert_seconds,
            "mfu": self.mfu,
            "mfu_format": self.resolved.precision.products,
            "tokens_per_second": self.tokens_per_second,
            "dollars": self.dollars,
        }

    @functools.cached_property
    def busiest(self) -> tuple[int, ...]:
        """The stages of the rank of the pipeline that computes and waits for collectives longest."""
        return max(stages_of_ranks(self.layout), key=lambda held: sum(self._busy(stage) for stage in held))

    def _busy(self, stage: int) -> float:
        return one_stage_seconds(self.stages[stage], 1)

    @functools.cached_property
    def by_kind(self) -> dict[str, float]:
        """Seconds of the step on its busiest rank: computation by phase, exposed collectives by dimension, the
        bubble (waiting for other stages, sends included), the update. They add up to `seconds`."""
        seconds_of = dict.fromkeys(PHASES, 0.0)
        exposed = dict.fromkeys(SENDERS, 0.0)
        for stage in self.busiest:
            for phase in PHASES:
                seconds_of[phase] += self.micro_batches * getattr(self.stages[stage].compute, phase)
            for sender, passes in self.stages[stage].sends.exposed.items():
                exposed[sender] += self.micro_batches * sum(passes)
        for sender, (seconds, _) in self.once_per_step.items():
            exposed[sender] += seconds
        seconds_of |= {f"{sender} exposed": seconds for sender, seconds in exposed.items() if seconds}
        busy = sum(self.micro_batches * self._busy(stage) for stage in self.busiest)
        seconds_of["bubble"] = max(0.0, self.pipeline_seconds - busy)
        seconds_of["update"] = self.update_seconds
        return {kind: seconds for kind, seconds in seconds_of.items() if seconds}

    @functools.cached_property
    def hidden(self) -> dict[str, float]:
        """Seconds of collectives by dimension that the busiest rank computes through."""
        hidden: dict[str, float] = {}
        for stage in self.busiest:
            for sender, seconds in self.stages[stage].sends.hidden.items():
                hidden[sender] = hidden.get(sender, 0.0) + self.micro_batches * seconds
        for sender, (_, seconds) in self.once_per_step.items():
            hidden[sender] = hidden.get(sender, 0.0) + seconds
        return {sender: seconds for sender, seconds in hidden.items() if seconds}

    @functools.cached_property
    def timeline(self) -> PipelineTimeline:
        """Each action of the step; of a layout without a pipeline, that of its one stage."""
        return simulated(self.choice, self.stages, self.sending_seconds, self.micro_batches)


def plan_layout(
    resolved: ResolvedRecipe,
    machine: CatalogueMachine,
    choice: Choice | None = None,
    *,
    costs: LayoutCosts | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> LayoutPlan:
    """Plan the step of a recipe on a machine, which has as many devices as the layout has ranks, in one layout.

    `choice` is the recipe's own by default. `costs` are priced parts, to be shared by plans of the same recipe and
    machine. `progress` is called with what is counted.

    Raises NapkinError where the layout does not divide the batch or the blocks, and where it is not known what connects
    the devices.
    """
    choice = choice or choice_of(resolved)
    layout, size = choice.layout, choice.size
    costs = costs or LayoutCosts(resolved, machine, (layout.tensor,), progress=progress)
    batch_size, rows = resolved.recipe.training.batch_size, layout.batch_parts * choice.micro_batch_size
    micro_batches, rest = divmod(batch_size, rows)
    if rest:
        raise NapkinError(
            f"training.batch_size {batch_size} does not divide into {layout.batch_parts} parts of micro-batches "
            f"of {choice.micro_batch_size}: use a multiple of {rows}, or a smaller --training.micro-batch-size"
        )
    stages = stage_times(costs, choice, micro_batches)
    contents = [stage.content for stage in stages]
    if layout.pipeline > 1:
        sending = send_seconds(costs, choice)
        pipeline_seconds = simulated(choice, stages, sending, micro_batches).seconds
    else:
        sending, pipeline_seconds = 0.0, one_stage_seconds(stages[0], micro_batches)
    expert_seconds = 0.0
    if layout.expert > 1 and costs.model.expert_capacity is None:
        longest = max(
            sum(number * costs.expert_seconds(kind, size, choice.recompute) for kind, number in stage.content.blocks)
            + sum(stage.sends.exposed["expert"])
            for stage in stages
        )
        expert_seconds = micro_batches * longest * layout.stages_per_rank
    # The fraction of the blocks' seconds that is the overhead of their kernels makes the interval wider.
    whole = launching = 0.0
    for kind, number in costs.blocks:
        of_block = costs.seconds(kind, size, choice.recompute, False)
        whole += number * (of_block.forward + of_block.of("backward"))
        launching += number * costs.launch_seconds(kind, size, choice.recompute)
    launches = launching / whole if whole else 0.0
    return LayoutPlan(
        resolved=costs.resolved,
        choice=choice,
        site=costs.site,
        micro_batches=micro_batches,
        stages=tuple(stages),
        ranks=tuple(ranks_bytes(costs, choice, contents, micro_batches)),
        pipeline_seconds=pipeline_seconds,
        sending_seconds=sending,
        once_per_step=once_per_step(costs, layout, stages[0]),
        update_seconds=update_seconds(costs, choice, contents),
        model_flops=costs.model_flops(costs.resolved.recipe.training.batch_size),
        expert_seconds=expert_seconds,
        stack=costs.stack.name,
        factor=(costs.stack.factor_of(costs.model.n_experts > 0) or costs.machine.efficiency.factor) * (1 + launches),
    )


def simulated(
    choice: Choice, stages: tuple[StageTime, ...] | list[StageTime], sending: float, micro_batches: int
) -> PipelineTimeline:
    """The step's schedule, action by action."""
    layout = choice.layout
    name, per_rank = (layout.schedule, layout.stages_per_rank) if layout.pipeline > 1 else ("gpipe", 1)
    schedule = schedule_of(name, layout.pipeline, per_rank, micro_batches)
    return simulate_pipeline(schedule, [stage.seconds for stage in stages], send_seconds=sending)


def one_stage_seconds(stage: StageTime, micro_batches: int) -> float:
    """Seconds of a step without a pipeline."""
    seconds = stage.seconds
    return micro_batches * (seconds.forward + seconds.of("backward"))


def update_seconds(costs: LayoutCosts, choice: Choice, contents: Sequence[StageContent]) -> float:
    """Seconds of the update, and of casting weights where that is done once per step, on the rank that has most
    parameters to update."""
    layout = choice.layout
    held = [[contents[stage] for stage in stages] for stages in stages_of_ranks(layout)]
    most, blocks = max((own_parameters(costs, layout, each), sum(stage.n_blocks for stage in each)) for each in held)
    casting = max(sum(_casting_seconds(costs, choice, content) for content in each) for each in held)
    replicas = layout.data * layout.context
    if not layout.shard_optimizer or is_sharded(costs, layout) or replicas == 1:
        return casting + costs.update_seconds(most, blocks)
    gathering = 0.0
    if not costs.stack.gathers_behind_compute:
        group = costs.interconnect.group(replicas, stride=layout.tensor)
        gathering = costs.interconnect.seconds("all_gather", costs.weight_bytes * most, group)
    return casting + costs.update_seconds(most / replicas, blocks) + gathering


def _casting_seconds(costs: LayoutCosts, choice: Choice, content: StageContent) -> float:
    if not costs.stack.casts_once:
        return 0.0
    seconds = content.first * costs.once_seconds("embedding", choice.size, "none")
    seconds += content.last * costs.once_seconds("head", choice.size, "none")
    for part, recompute, times in blocks_by_recompute(costs, choice, content):
        seconds += times * costs.once_seconds(part, choice.size, recompute)
    return seconds
