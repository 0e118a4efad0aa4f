"""Bytes of each rank of a layout: state, what is gathered, activations of all micro-batches in flight, buffers."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from napkin.accounting.pipeline_schedules import PipelineSchedule, pipeline_schedule
from napkin.planning.layouts.costs import OUTSIDE_BYTES, Choice, LayoutCosts
from napkin.planning.layouts.stages import (
    StageContent,
    held_parameters,
    outside_parameters,
    own_parameters,
    padded_parameters,
)
from napkin.recipe.layout import Layout

_TOKEN_BYTES = 16
_STEADY = 4
"""Micro-batches, as a multiple of the ranks times their stages, from which on no more of them are in flight."""


@dataclass(frozen=True)
class RankBytes:
    """Bytes of one rank at the moment of most."""

    parameters: float
    gradients: float
    optimizer_state: float
    gathered: float
    """Parameters and gradients of a layer that are whole while it computes."""
    activations: float
    """Bytes that micro-batches in flight keep for their backward passes, copies of weights in a narrower format
    included."""
    working: float
    """Bytes that come and go in a block or in the head: the logits of a chunk, gradients of activations."""
    buffers: float
    """Messages between stages, and the tokens of a step."""

    @property
    def total(self) -> float:
        state = self.parameters + self.gradients + self.optimizer_state
        return state + self.gathered + self.activations + self.working + self.buffers

    @property
    def by_use(self) -> dict[str, float]:
        """Bytes by what they are for, in words."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer_state,
            "gathered parameters": self.gathered,
            "activations": self.activations,
            "working memory": self.working,
            "buffers": self.buffers,
        }


def ranks_bytes(
    costs: LayoutCosts, choice: Choice, contents: Sequence[StageContent], micro_batches: int
) -> list[RankBytes]:
    """Bytes of the first rank of each stage's group, in the order of the pipeline's ranks."""
    layout = choice.layout
    flights = in_flight(layout.schedule, layout.pipeline, layout.stages_per_rank, micro_batches)
    found: dict[tuple, RankBytes] = {}
    ranks: list[RankBytes] = []
    for held, flight in zip(stages_of_ranks(layout), flights, strict=True):
        key = (tuple(contents[stage] for stage in held), flight)
        if key not in found:
            found[key] = _rank_bytes(costs, choice, key[0], flight, micro_batches)
        ranks.append(found[key])
    return ranks


@functools.lru_cache(maxsize=4096)
def in_flight(schedule: str, pipeline: int, stages_per_rank: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """For each rank and each of its stages, the micro-batches whose activations it keeps when it keeps most in all."""
    if pipeline == 1:
        return ((1,),)
    # From there on a schedule repeats itself, and keeps no more.
    repeats = schedule != "gpipe" and micro_batches % pipeline == 0
    enough = min(micro_batches, _STEADY * pipeline * stages_per_rank) if repeats else micro_batches
    table = schedule_of(schedule, pipeline, stages_per_rank, enough)
    return tuple(_most_at_once(table, rank) for rank in range(pipeline))


@functools.lru_cache(maxsize=512)
def schedule_of(schedule: str, pipeline: int, stages_per_rank: int, micro_batches: int) -> PipelineSchedule:
    """`pipeline_schedule`, made once for equal arguments."""
    return pipeline_schedule(schedule, pipeline, micro_batches, stages_per_rank=stages_per_rank)


def _most_at_once(table: PipelineSchedule, rank: int) -> tuple[int, ...]:
    held = table.stages_of(rank)
    now = dict.fromkeys(held, 0)
    most, at_most = 0, dict(now)
    ends = "backward_weight" if any(action.kind == "backward_weight" for action in table.actions[rank]) else "backward"
    for stage, kind, _ in table.actions[rank]:
        now[stage] += (kind == "forward") - (kind == ends)
        if sum(now.values()) > most:
            most, at_most = sum(now.values()), dict(now)
    return tuple(at_most.values())


@functools.lru_cache(maxsize=1024)
def stages_of_ranks(layout: Layout) -> tuple[tuple[int, ...], ...]:
    """The stages that each rank of the pipeline holds, in order."""
    if layout.pipeline == 1:
        return ((0,),)
    stages = range(layout.stages)
    ranks: list[list[int]] = [[] for _ in range(layout.pipeline)]
    for stage in stages:
        turn, place = divmod(stage, layout.pipeline)
        back = layout.schedule == "zb-v" and turn % 2
        ranks[layout.pipeline - 1 - place if back else place].append(stage)
    return tuple(map(tuple, ranks))


def _rank_bytes(
    costs: LayoutCosts, choice: Choice, contents: Sequence[StageContent], flight: Sequence[int], micro_batches: int
) -> RankBytes:
    layout, size, recompute = choice.layout, choice.size, choice.recompute
    gathered = layout.shard > 1 and costs.gather_bytes < costs.weight_bytes
    own = own_parameters(costs, layout, contents)
    replicas = layout.data * layout.context if layout.shard_optimizer and layout.shard == 1 else 1
    kept = [_kept_bytes(costs, choice, content, gathered) for content in contents]
    activations = sum(number * each for number, each in zip(flight, kept, strict=True))
    gradients = own * costs.weight_bytes
    if micro_batches == 1 and layout.token_parts == 1:
        # They come as activations go: the larger of the two is there at once.
        gradients = max(0.0, gradients - activations)
    if layout.shard == 1 and layout.pipeline == 1 and layout.token_parts > 1 and micro_batches > 1:
        # Those that are averaged over replicas stay beside those that are added up.
        gradients *= 2
    # Whichever is larger: what a block needs in its backward pass, or the head, or the sum of two gradients of the
    # embedding, which comes when its micro-batch keeps nothing any more.
    whole = _whole_in_block(costs, layout, contents)
    moments = [(whole, costs.working_bytes(size, recompute))]
    for content, freed in zip(contents, kept, strict=True):
        if content.last:
            at_head = _whole_at_head(costs, layout, contents)
            moments.append((at_head, costs.head_working_bytes(size, choice.loss_chunk_size, recompute)))
        if content.first and micro_batches > 1:
            moments.append((whole, 4 * costs.parameters(layout.tensor).embedding - freed))
    whole, working = max(moments, key=sum)
    stream = costs.tokens(size) * costs.model.d_model * costs.weight_bytes / layout.tensor
    return RankBytes(
        parameters=own * costs.weight_bytes,
        gradients=gradients,
        optimizer_state=own * costs.parts("none").state_bytes_per_parameter / replicas,
        gathered=whole,
        activations=activations,
        working=working,
        buffers=(4 * stream if layout.pipeline > 1 else 0.0) + _TOKEN_BYTES * micro_batches * costs.tokens(size),
    )


def _kept_bytes(costs: LayoutCosts, choice: Choice, content: StageContent, gathered: bool) -> float:
    """Bytes that one micro-batch keeps in one stage."""
    size, every = choice.size, costs.resolved.recipe.training.recompute_every
    kept = costs.kept_bytes("embedding", size, "none", gathered) if content.first else 0.0
    for part, number in (("dense", content.dense), ("block", content.blocks)):
        again = -(-number // every) if choice.recompute != "none" else 0
        if again:
            kept += again * costs.kept_bytes(part, size, choice.recompute, gathered)  # pyright: ignore[reportArgumentType]
        if number - again:
            kept += (number - again) * costs.kept_bytes(part, size, "none", gathered)  # pyright: ignore[reportArgumentType]
    return kept


def _whole_in_block(costs: LayoutCosts, layout: Layout, contents: Sequence[StageContent]) -> float:
    """Bytes of what FSDP2 has whole in the backward pass of a block: the block and the one that is gathered ahead, its
    gradients, and all that lies outside of blocks with its gradients, as FSDP2 allocates them."""
    if layout.shard == 1:
        return 0.0
    if layout.pipeline > 1:
        return _whole_in_pipeline(costs, layout, contents)
    block, outside = _units_of(costs, layout, contents)
    blocks = sum(content.blocks + content.dense for content in contents)
    whole = costs.gather_bytes * block * min(2, blocks) + outside
    return whole + costs.weight_bytes * block + outside * contents[-1].last


def _whole_at_head(costs: LayoutCosts, layout: Layout, contents: Sequence[StageContent]) -> float:
    """The same while norm, head and loss run; the last block is still whole."""
    if layout.shard == 1:
        return 0.0
    if layout.pipeline > 1:
        return _whole_in_pipeline(costs, layout, contents)
    block, outside = _units_of(costs, layout, contents)
    return costs.gather_bytes * block + outside


def _whole_in_pipeline(costs: LayoutCosts, layout: Layout, contents: Sequence[StageContent]) -> float:
    """The same in a pipeline, where parameters are gathered once per step and gradients add up whole."""
    held = sum(sum(held_parameters(costs, layout, content)) for content in contents)
    _, outside = _units_of(costs, layout, contents)
    in_blocks = held - outside // OUTSIDE_BYTES
    return (costs.gather_bytes + costs.reduce_bytes) * in_blocks + 2 * outside


def _units_of(costs: LayoutCosts, layout: Layout, contents: Sequence[StageContent]) -> tuple[int, int]:
    """Parameters of a block, and bytes of those outside of blocks."""
    each = padded_parameters(costs, layout)
    outside = sum(outside_parameters(costs, layout, content) for content in contents)
    return each.block + each.experts, OUTSIDE_BYTES * outside
