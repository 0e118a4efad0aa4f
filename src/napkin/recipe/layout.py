"""The layout of a run: its ranks on a mesh of five dimensions, and what each of them is for.

The dimensions, from the outermost to the innermost: pipeline, data, shard, context, tensor. Neighbours in the innermost
are neighbours in rank, on the same node: those of tensor send the most. Expert parallelism has no dimension of its own:
it splits the experts among ranks of data and shard.
"""

import itertools
import math
from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError
from napkin.recipe.parallelism_config import ZERO_BUBBLE, ParallelismConfig, PipelineScheduleName
from napkin.recipe.recipe import Recipe

Strategy = Literal["none", "ddp", "fsdp"]
Dimension = Literal["pipeline", "data", "shard", "context", "tensor"]
DIMENSIONS: tuple[Dimension, ...] = ("pipeline", "data", "shard", "context", "tensor")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many ranks each dimension has; see `ParallelismConfig` for what they are."""

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Of the data · shard ranks, how many split the experts."""
    schedule: PipelineScheduleName = "1f1b"
    stages_per_rank: int = 1
    blocks_per_stage: tuple[int, ...] | None = None
    """Of each stage of the pipeline; None divides the blocks evenly."""
    shard_optimizer: bool = False

    @property
    def sizes(self) -> dict[Dimension, int]:
        """The number of ranks in each dimension, outermost first."""
        return {dimension: getattr(self, dimension) for dimension in DIMENSIONS}

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def batch_parts(self) -> int:
        """The number of groups of ranks that have rows of a batch of their own."""
        return self.data * self.shard

    @property
    def token_parts(self) -> int:
        """The number of groups of ranks that compute tokens of their own: gradients are averaged over them."""
        return self.batch_parts * self.context

    @property
    def stages(self) -> int:
        """The number of stages of the pipeline."""
        return self.pipeline * self.stages_per_rank if self.pipeline > 1 else 1

    @property
    def splits_backward(self) -> bool:
        """True if the pipeline computes the gradients of weights apart from, and later than, those of inputs."""
        return self.schedule in ZERO_BUBBLE

    @property
    def strategy(self) -> Strategy:
        """How gradients are averaged: nothing to average, all-reduced, or reduce-scattered."""
        return "fsdp" if self.shard > 1 else "ddp" if self.token_parts > 1 else "none"

    @property
    def splits_only_batches(self) -> bool:
        """True if each rank computes the whole model on whole sequences, with DDP or FSDP and nothing else."""
        return self.pipeline == self.context == self.tensor == self.expert == 1 and (self.data == 1 or self.shard == 1)

    @property
    def divides_names(self) -> bool:
        """True if a rank has only some of the parameters, or the optimizer state of only some of them."""
        return self.pipeline > 1 or self.shard_optimizer

    @property
    def divides_state(self) -> bool:
        """True if no rank has all parameters and their optimizer state, whole."""
        return self.divides_names or self.shard > 1 or self.tensor > 1 or self.expert > 1

    def coordinates(self, rank: int) -> dict[Dimension, int]:
        """The place of a rank in each dimension.

        >>> Layout(pipeline=2, tensor=2).coordinates(1)
        {'pipeline': 0, 'data': 0, 'shard': 0, 'context': 0, 'tensor': 1}
        """
        places: dict[Dimension, int] = {}
        for dimension, size in reversed(self.sizes.items()):
            rank, places[dimension] = divmod(rank, size)
        return {dimension: places[dimension] for dimension in DIMENSIONS}

    def batch_part(self, rank: int) -> int:
        """Which part of the batch a rank computes, counted from 0."""
        places = self.coordinates(rank)
        return places["data"] * self.shard + places["shard"]

    def rows(self, rank: int, batch_size: int) -> slice:
        """The rows of a batch that a rank computes."""
        each, part = batch_size // self.batch_parts, self.batch_part(rank)
        return slice(part * each, (part + 1) * each)

    def columns(self, rank: int, length: int) -> tuple[slice, ...]:
        """The parts of each sequence of `length` tokens that a rank computes, from left to right.

        >>> Layout(context=2).columns(1, 16)
        (slice(4, 8, None), slice(8, 12, None))
        """
        return chunks(self.coordinates(rank)["context"], self.context, length)

    def blocks_of_stages(self, n_layers: int) -> tuple[range, ...]:
        """The blocks of each stage of the pipeline. Divided evenly, the first stages have one more.

        Raises NapkinError for blocks_per_stage with another sum than `n_layers`, and for more stages than blocks.

        >>> Layout(pipeline=2, data=2).blocks_of_stages(5)
        (range(0, 3), range(3, 5))
        """
        stages = self.stages
        if self.blocks_per_stage is not None and self.pipeline > 1:
            counts = self.blocks_per_stage
            if sum(counts) != n_layers:
                raise NapkinError(
                    f"parallelism.blocks_per_stage adds up to {sum(counts)} blocks, the model has {n_layers}: "
                    "give numbers that add up to that"
                )
        else:
            if stages > n_layers:
                raise NapkinError(
                    f"a pipeline of {stages} stages needs at least as many blocks, the model has {n_layers}: "
                    f"use fewer ranks in --parallelism.pipeline, or a --model.n-layers of {stages} or more"
                )
            each, more = divmod(n_layers, stages)
            counts = tuple(each + (stage < more) for stage in range(stages))
        starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        return tuple(range(*ends) for ends in itertools.pairwise(starts))

    def __str__(self) -> str:
        sizes = {**self.sizes, "expert": self.expert}
        named = " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "1 rank"
        return f"{named}, {self.schedule}" if self.pipeline > 1 else named


def chunks(place: int, parts: int, length: int) -> tuple[slice, ...]:
    """What the rank at one place of `parts` computes of a sequence of `length` tokens.

    Of 2 · parts chunks it has two, one counted from the beginning and one from the end: a token sees all before it,
    and so every rank has as many pairs of tokens to compute.
    """
    if parts == 1:
        return (slice(0, length),)
    size = length // (2 * parts)
    return tuple(slice(n * size, (n + 1) * size) for n in (place, 2 * parts - 1 - place))


def layout_of_recipe(recipe: Recipe, world_size: int) -> Layout:
    """The layout in which `world_size` ranks train a recipe. Raises NapkinError as `layout_of` does."""
    return layout_of(recipe.parallelism, world_size, otherwise=recipe.training.parallelism)


def layout_of(config: ParallelismConfig, world_size: int, *, otherwise: Literal["ddp", "fsdp"] = "ddp") -> Layout:
    """The layout of `world_size` ranks; `otherwise` is what the ranks do that `config` leaves open.

    Raises NapkinError where the sizes do not multiply to the number of ranks. A single process has a layout of 1.
    """
    if world_size == 1:
        return Layout()
    fixed = config.pipeline * config.context * config.tensor * (config.data or 1) * (config.shard or 1)
    rest = max(1, world_size // fixed)
    data = config.data or (rest if otherwise == "ddp" else 1)
    shard = config.shard or (rest if otherwise == "fsdp" else 1)
    layout = Layout(
        data=data,
        shard=shard,
        pipeline=config.pipeline,
        context=config.context,
        tensor=config.tensor,
        expert=config.expert,
        schedule=config.schedule,
        stages_per_rank=config.resolved_stages_per_rank,
        blocks_per_stage=config.blocks_per_stage,
        shard_optimizer=config.shard_optimizer,
    )
    if layout.world_size != world_size:
        sizes = " · ".join(f"{name} {size}" for name, size in layout.sizes.items())
        raise NapkinError(
            f"parallelism: {sizes} is {layout.world_size} ranks, there are {world_size}: choose sizes whose product is "
            f"{world_size}, or leave {'data' if otherwise == 'ddp' else 'shard'} out"
        )
    if layout.batch_parts % layout.expert:
        raise NapkinError(
            f"parallelism.expert {layout.expert} does not divide data · shard, which is {layout.batch_parts}: use a "
            "divisor of it"
        )
    return layout
