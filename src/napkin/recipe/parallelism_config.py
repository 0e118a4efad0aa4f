"""[parallelism] of a recipe: how many ranks split the batch, the layers, the matrices, the sequences, the experts."""

from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError
from napkin.recipe.ranges import PARALLELISM_RANGES, refuse_outside

PipelineScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]
ZERO_BUBBLE: tuple[PipelineScheduleName, ...] = ("zb-h1", "zb-v")
"""Schedules whose backward pass is in two parts: gradients of inputs first, of weights later (Qi et al. 2024)."""


@dataclass(frozen=True)
class ParallelismConfig:
    """How the ranks that `torchrun` starts divide the work: their number is data · shard · pipeline · context · tensor.

    Without any of these, all ranks split the batch, as training.parallelism says.
    """

    data: int | None = None
    """Groups of ranks that each have a whole copy of the model and their own rows of every batch (DDP). None is what
    the other sizes leave if training.parallelism is ddp, otherwise 1."""

    shard: int | None = None
    """Ranks that split the batch, and hold a shard of parameters, gradients and optimizer state each (FSDP2). With data
    above 1 as well, shards are replicated (HSDP). None is what the other sizes leave if training.parallelism is fsdp,
    otherwise 1."""

    tensor: int = 1
    """Ranks that split each matrix, the heads of attention, the vocabulary, and outside of matrices the sequence
    (Shoeybi et al. 2019; Korthikanti et al. 2022)."""

    pipeline: int = 1
    """Ranks that split the layers; micro-batches pass through them (Huang et al. 2019)."""

    context: int = 1
    """Ranks that split each sequence; keys and values go around them in a ring (Liu et al. 2023)."""

    expert: int = 1
    """Ranks that split the experts; tokens are sent to the rank of their expert (Lepikhin et al. 2020). These are ranks
    that split the batch: data · shard has to be a multiple."""

    schedule: PipelineScheduleName = "1f1b"
    """The order in which the ranks of a pipeline work on micro-batches."""

    stages_per_rank: int | None = None
    """Parts of the model that each rank of a pipeline holds; None is 2 for interleaved-1f1b and zb-v, otherwise 1."""

    blocks_per_stage: tuple[int, ...] | None = None
    """Blocks of each stage of the pipeline, from the first to the last; None divides them evenly."""

    shard_optimizer: bool = False
    """Whether ranks with a whole copy of the model (data) hold only a shard of the optimizer state each, and send each
    other the updated parameters (ZeRO stage 1, Rajbhandari et al. 2020)."""

    def __post_init__(self) -> None:
        refuse_outside("parallelism", self, PARALLELISM_RANGES)
        per_rank = self.resolved_stages_per_rank
        if self.schedule in ("gpipe", "1f1b") and per_rank != 1:
            raise NapkinError(
                f"parallelism.stages_per_rank is {per_rank}, but {self.schedule} has 1 stage per rank: use "
                "--parallelism.schedule interleaved-1f1b, or leave it out"
            )
        if self.schedule == "zb-v" and per_rank != 2:
            raise NapkinError(
                f"parallelism.stages_per_rank is {per_rank}, but zb-v has 2 stages per rank: leave it out"
            )
        stages = self.pipeline * per_rank
        if self.blocks_per_stage is not None and len(self.blocks_per_stage) != stages:
            raise NapkinError(
                f"parallelism.blocks_per_stage has {len(self.blocks_per_stage)} numbers, but there are {stages} stages "
                f"({self.pipeline} ranks, {per_rank} each): give one number for each stage"
            )
        if self.blocks_per_stage is not None and min(self.blocks_per_stage) < 1:
            raise NapkinError("parallelism.blocks_per_stage has a stage without blocks: give each at least 1")

    @property
    def resolved_stages_per_rank(self) -> int:
        """stages_per_rank with its default filled in."""
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        return 2 if self.schedule in ("interleaved-1f1b", "zb-v") else 1
