"""[training] of a recipe: how long, how much at a time, how often, where."""

from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError
from napkin.recipe.ranges import TRAINING_RANGES, refuse_outside


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how much at a time, how often, where."""

    steps: int = 1000
    """Number of updates."""

    batch_size: int = 16
    """Sequences an update learns from."""

    micro_batch_size: int | Literal["auto"] | None = None
    """Sequences computed at a time, gradients added up; None is batch_size. Less memory, the same update. auto is the
    most that fit into the free memory, by count."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: what a block computes again instead of keeping it; selective is all but products with
    weights and fused attention."""

    recompute_every: int = 1
    """Only every so many-th block recomputes."""

    loss_chunk_size: int = 512
    """Tokens whose logits exist at one time; with a whole micro-batch of them, all do."""

    offload_optimizer: bool = False
    """Whether a GPU's optimizer state lives in page-locked memory of the host and visits it bucket by bucket."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "bf16-pure", "fp8"] = "auto"
    """Formats of numbers: bf16 and fp16 are autocast over fp32 weights, fp16 on a GPU alone; bf16-pure keeps weights
    in bf16, updates rounded stochastically; fp8 is bf16 with the blocks' linear layers in fp8, emulated where the
    hardware has none. auto is bf16 where the hardware multiplies it natively, fp32 elsewhere."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto is the GPU if there is one."""

    threads: int | None = None
    """CPU threads; None is one a core that this process may use. Ranks share the cores of their machine."""

    init_seed: int = 0
    """Seed of the initial weights."""

    data_seed: int = 0
    """Seed of the order of the training sequences."""

    dropout_seed: int = 0
    """Seed of what dropout drops, where the model has any."""

    rounding_seed: int = 0
    """Seed of stochastic rounding, where the precision has any."""

    log_every: int = 1
    """Steps between two lines of metrics.jsonl."""

    checkpoint_every: int = 200
    """Steps between two checkpoints."""

    keep_checkpoints: int = 2
    """Checkpoints kept; older ones are removed after a newer one is safely on the disk."""

    evaluate_every: int = 200
    """Steps between two evaluations on a sample of the validation tokens."""

    evaluation_tokens: int = 16384
    """Tokens in that sample. `napkin evaluate` takes all there are."""

    parallelism: Literal["ddp", "fsdp"] = "ddp"
    """What the ranks do that `torchrun` starts: each takes its rows of every batch; with ddp it has the whole model,
    with fsdp (FSDP2, ZeRO's third stage) a part of parameters, gradients and optimizer state. One process alone does
    neither."""

    gather_format: Literal["auto", "fp32", "bf16"] = "auto"
    """Format in which fsdp gathers the parameters of a block; auto is that of matrix products. In bf16 half as many
    bytes travel; gains of norms are rounded too."""

    reduce_format: Literal["fp32", "bf16"] = "fp32"
    """Format in which fsdp adds up the gradients of a block over ranks."""

    rank_timeout: float = 600.0
    """Seconds that ranks wait for one another before they give up."""

    keep_best: bool = True
    """Whether the weights with the lowest validation loss are kept besides: after an evaluation that is the best so far
    a checkpoint is written, whatever checkpoint_every says."""

    checkpoint_writing: Literal["auto", "background", "wait"] = "auto"
    """Who writes a checkpoint: a thread in the background, from a copy of the tensors in the host's memory, or the
    training loop itself, which then waits for the disk. auto is the background where a count finds room for the
    copy."""

    on_non_finite: Literal["stop", "skip"] = "stop"
    """What is done about a step whose loss or gradient is infinite or NaN: the run stops, or the step's update is not
    made and the run goes on. Its batch is kept for a look either way."""

    most_skipped: int = 10
    """Updates in a row that may be skipped; one more stops the run."""

    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile fuses what stands between a block's matrix products: other last bits. auto is on where the
    run is long enough to earn the compiler's seconds back, by the plan."""

    def __post_init__(self) -> None:
        refuse_outside("training", self, TRAINING_RANGES)
        if self.batch_size % self.resolved_micro_batch_size:
            raise NapkinError(
                f"training.batch_size {self.batch_size} does not divide into micro-batches of {self.micro_batch_size}: "
                "choose a micro_batch_size that divides it"
            )

    @property
    def resolved_micro_batch_size(self) -> int:
        """micro_batch_size, its default filled in; "auto" is all of them until it is known what fits."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else self.batch_size
