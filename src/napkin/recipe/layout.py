"""The layout of a run: its ranks on a mesh of five dimensions, and the purpose of each dimension.

The dimensions, from the outermost to the innermost: pipeline, data, shard, context, tensor. Neighbours in the innermost
dimension have consecutive ranks, on the same node: ranks of tensor send the most. Expert parallelism has no dimension
of its own: it splits the experts among ranks of data and shard.

Impossible layouts are refused before anything starts: sizes that do not divide, and options of a model or a run
that no rank could compute its part of.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from napkin.accounting.pipeline_schedules import micro_batches_per_round
from napkin.errors import NapkinError
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import ZERO_BUBBLE, ParallelismConfig, PipelineScheduleName

Strategy = Literal["none", "ddp", "fsdp"]
Dimension = Literal["pipeline", "data", "shard", "context", "tensor"]
DIMENSIONS: tuple[Dimension, ...] = ("pipeline", "data", "shard", "context", "tensor")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The number of ranks of each dimension; see `ParallelismConfig` for what they are."""

    pipeline: int = 1
    data: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Ranks, of the data · shard ranks, that split the experts."""
    whole_experts: bool = False
    """True if ranks of expert are taken from those of tensor and context first, each with whole experts."""
    schedule: PipelineScheduleName = "1f1b"
    stages_per_rank: int = 1
    blocks_per_stage: tuple[int, ...] | None = None
    """Blocks of each stage of the pipeline; None divides them evenly."""
    shard_optimizer: bool = False

    @property
    def sizes(self) -> dict[Dimension, int]:
        return {dimension: getattr(self, dimension) for dimension in DIMENSIONS}

    @property
    def world_size(self) -> int:
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
    def expert_parts(self) -> int:
        """The number of ranks of a stage among which `expert` of them split the experts."""
        return self.token_parts * self.tensor if self.whole_experts else self.batch_parts

    @property
    def stages(self) -> int:
        return self.pipeline * self.stages_per_rank if self.pipeline > 1 else 1

    @property
    def splits_backward(self) -> bool:
        """True if the pipeline computes the gradients of weights apart from, and later than, those of inputs."""
        return self.schedule in ZERO_BUBBLE

    @property
    def strategy(self) -> Strategy:
        """The way gradients are averaged: not at all, all-reduced, or reduce-scattered."""
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
        """True if no rank holds all parameters and their whole optimizer state."""
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
        places = self.coordinates(rank)
        return places["data"] * self.shard + places["shard"]

    def rows(self, rank: int, batch_size: int) -> slice:
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
    """The spans of a sequence of `length` tokens that the rank at one place of `parts` computes.

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
        whole_experts=config.whole_experts,
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
    if layout.expert_parts % layout.expert:
        among = "data · shard · context · tensor" if layout.whole_experts else "data · shard"
        raise NapkinError(
            f"parallelism.expert {layout.expert} does not divide {among}, which is {layout.expert_parts}: use a "
            "divisor of it"
        )
    return layout


def refuse_impossible_layout(recipe: Recipe, layout: Layout) -> None:
    """Raise NapkinError, with the way out, where the ranks of a layout cannot train a recipe."""
    for problem in _problems(recipe, layout):
        raise NapkinError(problem)


def _problems(recipe: Recipe, layout: Layout) -> Iterator[str]:
    for name in ("tensor", "context"):
        if recipe.model.has_states and layout.sizes[name] > 1:
            yield (
                f"parallelism.{name} is {layout.sizes[name]} and model.mixers is '{recipe.model.mixers}': the state of "
                "a layer is not divided, use parallelism.shard, data or pipeline"
            )
    for name in ("tensor", "context", "pipeline"):
        if recipe.model.kv_sharing > 1 and layout.sizes[name] > 1:
            yield (
                f"parallelism.{name} is {layout.sizes[name]} and model.kv_sharing is {recipe.model.kv_sharing}: the "
                "keys and values of layers that share them stay on a rank, use parallelism.shard or data"
            )
    if layout.tensor > 1:
        yield from _problems_of_tensor(recipe, layout)
    if layout.pipeline > 1:
        yield from _problems_of_pipeline(recipe, layout)
    parts = 2 * layout.context * layout.tensor
    if layout.context > 1 and recipe.model.context_length % parts:
        yield (
            f"parallelism.context {layout.context} divides each sequence into {parts} parts, which "
            f"model.context_length {recipe.model.context_length} is not a multiple of: use "
            f"--model.context-length {parts * -(-recipe.model.context_length // parts)}"
        )
    if layout.expert > 1:
        yield from _problems_of_experts(recipe, layout)
    if layout.shard_optimizer:
        yield from _problems_of_sharded_optimizer(recipe, layout)


def _problems_of_tensor(recipe: Recipe, layout: Layout) -> Iterator[str]:
    model, tensor = recipe.model, layout.tensor
    sizes = {"n_heads": model.n_heads, "n_kv_heads": model.resolved_n_kv_heads}
    if not model.n_experts or model.n_dense_layers:
        sizes["d_ff"] = model.resolved_d_ff
    if model.resolved_d_expert is not None:
        sizes["d_expert"] = model.resolved_d_expert
    for what, number in sizes.items():
        if number % tensor:
            yield (
                f"parallelism.tensor {tensor} does not divide model.{what} {number}: use a divisor of it, or another "
                f"--model.{what.replace('_', '-')}"
            )
    if model.context_length % tensor:
        yield (
            f"parallelism.tensor {tensor} does not divide model.context_length {model.context_length}: outside of "
            "matrices its ranks split the sequence, use a divisor of it"
        )
    if model.vocab_size and -(-model.vocab_size // tensor) * (tensor - 1) >= model.vocab_size:
        yield (
            f"parallelism.tensor {tensor} leaves a rank without any of model.vocab_size {model.vocab_size}: use fewer "
            "ranks in --parallelism.tensor"
        )
    if recipe.training.precision == "bf16-pure" and model.vocab_size % tensor:
        yield (
            f"parallelism.tensor {tensor} and precision 'bf16-pure' with vocab_size {model.vocab_size}, of which ranks "
            "have different numbers of rows: they would round their copies of other parameters differently: use a "
            f"--model.vocab-size of {tensor * -(-model.vocab_size // tensor)}, --training.precision bf16, or "
            "--parallelism.tensor 1"
        )
    if layout.expert > 1 and not layout.whole_experts:
        yield (
            f"parallelism.tensor {tensor} and expert, with which it is not combined: use --parallelism.shard, or "
            "--parallelism.tensor 1"
        )


def _problems_of_pipeline(recipe: Recipe, layout: Layout) -> Iterator[str]:
    layout.blocks_of_stages(recipe.model.n_layers)
    training = recipe.training
    rows = training.batch_size // layout.batch_parts
    micro_batches = rows // min(training.resolved_micro_batch_size, rows or 1)
    if layout.schedule != "gpipe" and micro_batches < layout.pipeline:
        yield (
            f"a pipeline of {layout.pipeline} ranks needs at least as many micro-batches for {layout.schedule}, there "
            f"are {micro_batches}: use a smaller --training.micro-batch-size, a larger --training.batch-size, or "
            "--parallelism.schedule gpipe"
        )
    if layout.schedule in ("interleaved-1f1b", "zb-h1"):
        micro_batches_per_round(layout.schedule, layout.pipeline, micro_batches)
    model, is_v, together = recipe.model, layout.schedule == "zb-v", f"parallelism.schedule {layout.schedule} and"
    if layout.splits_backward and training.recompute != "none":
        yield (
            f"{together} training.recompute '{training.recompute}', which would be done twice: the schedule's backward "
            "pass is in two parts: use --training.recompute none, or --parallelism.schedule 1f1b"
        )
    if training.precision == "bf16-pure" and model.tie_embeddings and not is_v:
        yield (
            f"{together} precision 'bf16-pure' with tied embeddings, whose two copies would be rounded differently: "
            "use --model.no-tie-embeddings, or --training.precision bf16"
        )
    if is_v and layout.shard > 1 and model.tie_embeddings:
        yield (
            f"{together} parallelism.shard with tied embeddings, which are of two stages of one rank, each gathered by "
            "itself: use --model.no-tie-embeddings, or --parallelism.schedule zb-h1"
        )


def _problems_of_experts(recipe: Recipe, layout: Layout) -> Iterator[str]:
    n_experts, expert = recipe.model.n_experts, layout.expert
    if layout.whole_experts:
        yield (
            "parallelism.whole_experts is True, which napkin plans for other stacks and does not train: leave it out, "
            "or plan with --stack megatron"
        )
    if not n_experts or n_experts % expert:
        yield (
            f"parallelism.expert {expert} does not divide model.n_experts {n_experts}: use a divisor of it, or leave "
            "it out"
        )
    if layout.shard > 1 and layout.shard % expert and recipe.training.precision == "bf16-pure":
        yield (
            f"parallelism.expert {expert} does not divide parallelism.shard {layout.shard}: with precision 'bf16-pure' "
            "copies of an expert would be rounded differently, use a divisor of it, or --training.precision bf16"
        )


def _problems_of_sharded_optimizer(recipe: Recipe, layout: Layout) -> Iterator[str]:
    if layout.shard > 1:
        yield (
            f"parallelism.shard_optimizer is True, but parallelism.shard {layout.shard} divides the optimizer state "
            "already: leave it out, or use --parallelism.data in place of --parallelism.shard"
        )
    if layout.token_parts == 1:
        yield (
            "parallelism.shard_optimizer is True, but no two ranks have the same parameters: leave it out, or use a "
            "--parallelism.data of 2 or more"
        )
    if layout.expert > 1:
        yield (
            "parallelism.shard_optimizer is True, but the experts that parallelism.expert divides are other ones on "
            "each rank: leave one of them out"
        )
    if layout.pipeline > 1 and recipe.training.precision == "bf16-pure":
        yield (
            "parallelism.shard_optimizer is True, but in a pipeline with precision 'bf16-pure' the copies of the "
            "embedding would be rounded differently: leave it out, or use --training.precision bf16"
        )
