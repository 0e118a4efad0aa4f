"""[training] of a recipe: steps, batches, memory, devices, and how often to log, evaluate and save."""

from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError
from napkin.recipe.ranges import TRAINING_RANGES, refuse_outside


@dataclass(frozen=True)
class TrainingConfig:
    """Steps, batches, memory, devices, and how often to log, evaluate and save."""

    steps: int = 1000
    """Number of updates."""

    batch_size: int = 16
    """Sequences per update."""

    micro_batch_size: int | Literal["auto"] | None = None
    """Sequences per forward and backward pass; gradients are accumulated. None is batch_size. Smaller values need less
    memory, for the same update. auto is the largest that fits into the free memory, by count."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: which activations of a block are recomputed in the backward pass instead of kept;
    selective is all but products with weights and fused attention."""

    recompute_every: int = 1
    """Activation checkpointing is applied to every n-th block only."""

    loss_chunk_size: int = 512
    """Tokens whose logits are in memory at a time, at most a whole micro-batch."""

    kernels: Literal["auto", "plain", "compiled", "triton"] = "auto"
    """The form of the operators between matrix products: plain is torch's operators; compiled is napkin's own loops for
    a CPU, compiled by numba once for each machine: RMSNorm, GELU and SwiGLU, rotary positions, and the loss; triton is
    napkin's Triton kernels for a GPU: the same, LayerNorm, residual sums, products of experts and AdamW's update. auto
    is compiled on a CPU in bf16, for runs of more than some seconds, and triton on a GPU of this machine where the step
    is planned to be faster with it; neither where torch.compile fuses the blocks."""

    offload_optimizer: bool = False
    """Whether the optimizer state of a GPU is kept in page-locked host memory and copied to the GPU bucket by
    bucket."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "bf16-pure", "fp8", "int8"] = "auto"
    """Number formats: bf16 and fp16 are autocast over fp32 weights, fp16 on a GPU only; bf16-pure keeps weights in bf16
    and rounds updates stochastically; fp8 and int8 are bf16 with products of the blocks' linear layers in 8 bits,
    emulated where the hardware has none. auto is bf16 where the hardware multiplies it natively, otherwise fp32."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device to train on; auto is the GPU if there is one."""

    threads: int | None = None
    """CPU threads; None is one per core that this process may use. The ranks of a machine divide its cores."""

    init_seed: int = 0
    """Seed of the initial weights."""

    data_seed: int = 0
    """Seed of the order of the training sequences."""

    dropout_seed: int = 0
    """Seed of dropout, if the model has any."""

    rounding_seed: int = 0
    """Seed of stochastic rounding, if the precision has any."""

    log_every: int = 1
    """Steps between two lines of metrics.jsonl."""

    checkpoint_every: int = 200
    """Steps between two checkpoints."""

    keep_checkpoints: int = 2
    """Checkpoints kept; the oldest is removed after a newer one is on the disk."""

    evaluate_every: int = 200
    """Steps between two evaluations on a sample of the validation tokens."""

    evaluation_tokens: int = 16384
    """Tokens in that sample. `napkin evaluate` uses all validation tokens."""

    parallelism: Literal["ddp", "fsdp"] = "ddp"
    """How the ranks that `torchrun` starts split the batch, those that [parallelism] leaves open. With ddp each has the
    whole model; with fsdp (FSDP2, ZeRO stage 3) a shard of parameters, gradients and optimizer state. A single process
    uses neither."""

    gather_format: Literal["auto", "fp32", "bf16"] = "auto"
    """Format in which fsdp gathers the parameters of a block; auto is that of matrix products. bf16 halves the bytes
    sent, and rounds the gains of norms too."""

    reduce_format: Literal["fp32", "bf16"] = "fp32"
    """Format in which fsdp reduces the gradients of a block over ranks."""

    rank_timeout: float = 600.0
    """Seconds that ranks wait for each other before the run fails."""

    keep_best: bool = True
    """Whether the checkpoint with the lowest validation loss is kept as well: it is written after each evaluation that
    is the best so far, regardless of checkpoint_every."""

    checkpoint_writing: Literal["auto", "background", "wait"] = "auto"
    """How a checkpoint is written: by a background thread, from a copy of the tensors in host memory, or by the
    training loop, which then waits for the disk. auto is background where the copy fits into memory, by count."""

    on_non_finite: Literal["stop", "skip"] = "stop"
    """What happens at a step whose loss or gradient is infinite or NaN: stop ends the run, skip leaves out the update
    and continues. Either way its batch is saved for inspection."""

    most_skipped: int = 10
    """Consecutive updates that may be skipped; one more stops the run."""

    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile fuses the operators between a block's matrix products, with different rounding. auto is on
    where the run is long enough to save more than the compilation takes, by the plan."""

    def __post_init__(self) -> None:
        refuse_outside("training", self, TRAINING_RANGES)
        if self.batch_size % self.resolved_micro_batch_size:
            raise NapkinError(
                f"training.batch_size {self.batch_size} does not divide into micro-batches of {self.micro_batch_size}: "
                "choose a micro_batch_size that divides it"
            )

    @property
    def resolved_micro_batch_size(self) -> int:
        """micro_batch_size with its default filled in; "auto" counts as batch_size until it is resolved."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else self.batch_size
