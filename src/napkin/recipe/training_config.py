"""[training] of a recipe: steps, batches, memory, devices, and how often to log, evaluate and save.

Beside it stand [optimizer], how a step changes the weights; [tracking], where metrics are sent besides metrics.jsonl;
and [parallelism], how many ranks split the batch, the layers, the matrices, the sequences and the experts. This file
does not import torch: the command line reads its types for its help.
"""

import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Literal

from napkin.bounds import LARGEST_SEED, MOST_STEPS, Bounds, refuse_outside
from napkin.errors import NapkinError, suggestion
from napkin.optim.registry import OPTIMIZERS, SCHEDULES, optimizer_entry

MOST_RANKS = 2**20
MOST_TOKENS_PER_STEP = 2**34

if TYPE_CHECKING:
    OptimizerName = str
    ScheduleName = str
else:
    OptimizerName, ScheduleName = Literal[tuple(OPTIMIZERS)], Literal[tuple(SCHEDULES)]


@dataclass(frozen=True)
class TrainingConfig:
    """Steps, batches, memory, devices, and how often to log, evaluate and save."""

    steps: Annotated[int, Bounds(1, MOST_STEPS)] = 1000
    """Number of updates."""

    batch_size: Annotated[int, Bounds(1, MOST_TOKENS_PER_STEP)] = 16
    """Sequences per update."""

    micro_batch_size: Annotated[int | Literal["auto"] | None, Bounds(1, MOST_TOKENS_PER_STEP)] = None
    """Sequences per forward and backward pass; gradients are accumulated. None is batch_size. Smaller values need less
    memory, for the same update. auto is the largest that fits into the free memory, by count."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: which activations of a block are recomputed in the backward pass instead of kept;
    selective is all but products with weights and fused attention."""

    recompute_every: Annotated[int, Bounds(1, 4096)] = 1
    """Activation checkpointing is applied to every n-th block only."""

    loss_chunk_size: Annotated[int | Literal["auto"], Bounds(1, MOST_TOKENS_PER_STEP)] = "auto"
    """Tokens whose logits are in memory at a time, at most a whole micro-batch. auto is 512 on a CPU and, on a GPU, a
    power of two up to 8192 whose logits take a small part of its memory: each chunk reads the head's weight and adds to
    its gradient, which takes a GPU longer than the products of a small chunk."""

    kernels: Literal["auto", "plain", "compiled", "triton"] = "auto"
    """The form of the operators between matrix products: plain is torch's operators; compiled is napkin's own loops for
    a CPU, compiled by numba once for each machine: RMSNorm, GELU and SwiGLU, rotary positions, and the loss; triton is
    napkin's Triton kernels for a GPU: the same, LayerNorm, residual sums, products of experts and AdamW's update. auto
    is plain, or what is faster: compiled by timing on a CPU in bf16, for runs of more than some seconds, and triton by
    plan on a GPU of this machine; neither where torch.compile fuses the blocks."""

    offload_optimizer: bool = False
    """Whether the optimizer state of a GPU is kept in page-locked host memory and copied to the GPU bucket by
    bucket."""

    precision: Literal["auto", "fp32", "bf16", "fp16", "bf16-pure", "fp8", "int8"] = "auto"
    """Number formats: bf16 and fp16 are autocast over fp32 weights, fp16 on a GPU only; bf16-pure keeps weights in bf16
    and rounds updates stochastically; fp8 and int8 are bf16 with products of the blocks' linear layers in 8 bits,
    emulated where the hardware has none. auto is bf16 where the hardware multiplies it natively, otherwise fp32."""

    deterministic: bool = False
    """Whether a run on a GPU is reproducible bit for bit, with the same device, versions and ranks: operators take
    forms that add in a fixed order, and those without one raise an error. The plan states the cost. On a CPU every run
    is reproducible."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device to train on; auto is the GPU if there is one."""

    threads: Annotated[int | None, Bounds(1, 1024)] = None
    """CPU threads; None is one per core that this process may use. The ranks of a machine divide its cores."""

    init_seed: Annotated[int, Bounds(0, LARGEST_SEED)] = 0
    """Seed of the initial weights."""

    data_seed: Annotated[int, Bounds(0, LARGEST_SEED)] = 0
    """Seed of the order of the training sequences."""

    dropout_seed: Annotated[int, Bounds(0, LARGEST_SEED)] = 0
    """Seed of dropout, if the model has any."""

    rounding_seed: Annotated[int, Bounds(0, LARGEST_SEED)] = 0
    """Seed of stochastic rounding, if the precision has any."""

    log_every: Annotated[int, Bounds(1, MOST_STEPS)] = 1
    """Steps between two lines of metrics.jsonl."""

    checkpoint_every: Annotated[int, Bounds(1, MOST_STEPS)] = 200
    """Steps between two checkpoints."""

    keep_checkpoints: Annotated[int, Bounds(1, MOST_STEPS)] = 2
    """Checkpoints kept; the oldest is removed after a newer one is on the disk."""

    evaluate_every: Annotated[int, Bounds(1, MOST_STEPS)] = 200
    """Steps between two evaluations on a sample of the validation tokens."""

    evaluation_tokens: Annotated[int, Bounds(1, MOST_STEPS)] = 16384
    """Tokens in that sample. `napkin evaluate` uses all validation tokens."""

    parallelism: Literal["ddp", "fsdp"] = "ddp"
    """How the ranks that `torchrun` starts split the batch, as far as [parallelism] leaves it open. With ddp each rank
    has the whole model; with fsdp (FSDP2, ZeRO stage 3) a shard of parameters, gradients and optimizer state. A single
    process uses neither."""

    gather_format: Literal["auto", "fp32", "bf16"] = "auto"
    """Format in which fsdp gathers the parameters of a block; auto is that of matrix products. bf16 halves the bytes
    sent, and rounds the gains of norms too."""

    reduce_format: Literal["fp32", "bf16"] = "fp32"
    """Format in which fsdp reduces the gradients of a block over ranks."""

    rank_timeout: Annotated[float, Bounds(1, 10**6)] = 600.0
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

    most_skipped: Annotated[int, Bounds(0, MOST_STEPS)] = 10
    """Consecutive updates that may be skipped; one more stops the run."""

    compile: Literal["auto", "on", "off"] = "auto"
    """Whether torch.compile fuses the operators between a block's matrix products, with different rounding. auto is on
    where the run is long enough to save more than the compilation takes, by the plan."""

    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """Whether the forward and backward pass of a micro-batch is recorded as a CUDA graph and replayed, with the same
    numbers. auto is on for pre-training on a GPU of this machine where launching the step's operators would take longer
    than computing them, by the plan, and the graph's memory fits."""

    def __post_init__(self) -> None:
        refuse_outside("training", self)
        if self.batch_size % self.resolved_micro_batch_size:
            raise NapkinError(
                f"training.batch_size {self.batch_size} does not divide into micro-batches of {self.micro_batch_size}: "
                "choose a micro_batch_size that divides it"
            )

    @property
    def resolved_micro_batch_size(self) -> int:
        """micro_batch_size with its default filled in; "auto" counts as batch_size until it is resolved."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else self.batch_size

    @property
    def resolved_loss_chunk_size(self) -> int:
        """loss_chunk_size with its default filled in; "auto" counts as a CPU's until it is resolved."""
        return self.loss_chunk_size if isinstance(self.loss_chunk_size, int) else 512


# Options that only some optimizers, or only some schedules, accept.
OPTIMIZER_OPTIONS = {"momentum", "beta1", "beta2", "eps"}
SCHEDULE_OPTIONS = {"decay_steps", "final_fraction"}


@dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer: the rule, the learning rate over the run, decay, clipping.

    None is the optimizer's own default, if it has that option: `resolved` fills it in.
    """

    name: OptimizerName = "adamw"
    """The update rule. adamw is the usual choice; muon needs fewer steps; lion and adafactor need less memory; the
    others are their predecessors."""

    learning_rate: Annotated[float | None, Bounds(0, 10)] = None
    """Largest learning rate, at the end of the warm-up. None is the optimizer's default, 3e-3 for adamw: it suits
    models of a few million parameters; larger models need a smaller one (Kaplan et al. 2020, appendix D.6)."""

    schedule: ScheduleName = "cosine"
    """Learning-rate schedule after the warm-up."""

    warmup_steps: Annotated[int | None, Bounds(0, MOST_STEPS)] = None
    """Steps over which the learning rate rises to its largest value, while Adam's moments settle. None is 50, or a
    tenth of the steps of a run shorter than 500."""

    decay_steps: Annotated[int | None, Bounds(0, MOST_STEPS)] = None
    """Steps of the decay at the end of warmup-stable-decay; None is a fifth of the run."""

    final_fraction: Annotated[float | None, Bounds(0, 1)] = None
    """Learning rate of the last step, as a fraction of the largest; 1 is no decay. None is 0.05, for the schedules that
    decay to it: linear, cosine, warmup-stable-decay."""

    momentum: Annotated[float | None, Bounds(0, 0.999999)] = None
    """Decay per step of the sum of gradients, for momentum, nesterov (0.9) and muon (0.95)."""

    beta1: Annotated[float | None, Bounds(0, 0.999999)] = None
    """Decay per step of the first moment; 0.9."""

    beta2: Annotated[float | None, Bounds(0, 0.999999)] = None
    """Decay per step of the second moment; 0.95, which recovers from a loss spike sooner than the classical 0.999, and
    0.99 for rmsprop and lion."""

    eps: Annotated[float | None, Bounds(1e-30, 1)] = None
    """Added to the square root of the second moment to avoid division by zero; 1e-8, for adagrad 1e-10. For adafactor,
    the smallest RMS of a parameter that its step is scaled by, 1e-3."""

    weight_decay: Annotated[float | None, Bounds(0, 100)] = None
    """Decay of matrices per step and unit of learning rate; gains and other vectors do not decay. 0.1 for adamw and
    muon, 0.6 for lion, otherwise 0. Decoupled, except for sgd, momentum, nesterov, adagrad, rmsprop and adam, which add
    it to the gradient."""

    clip_norm: Annotated[float, Bounds(1e-12, 10**12)] = 1.0
    """Largest global norm of a step's gradient; a larger gradient is scaled down to it."""

    fused: bool | None = None
    """Whether torch's fused kernel does the update, for sgd, momentum, nesterov, adagrad, adam, adamw, and the
    parameters that muon leaves to adamw: three to five times as fast, with different rounding. None uses it wherever
    there is one."""

    average_decay: Annotated[float | None, Bounds(0, 0.999999)] = None
    """Decay per step of an exponential moving average of the weights, for example 0.999. Evaluations and sampling then
    use the average; it takes 4 bytes per parameter. None, or 0, keeps no average."""

    def __post_init__(self) -> None:
        choice = optimizer_entry(self.name)
        refuse_outside("optimizer", self)
        for option in OPTIMIZER_OPTIONS - choice.options.keys():
            accepted_by = ", ".join(name for name, other in OPTIMIZERS.items() if option in other.options)
            self._refuse(option, self.name, accepted_by)
        if self.fused and not choice.fused:
            raise NapkinError(f"optimizer.fused is True, but there is no fused kernel for {self.name}: leave it out")
        if self.schedule not in SCHEDULES:
            raise NapkinError(f"'{self.schedule}' is not a schedule: {suggestion(self.schedule, SCHEDULES)}")
        for option in SCHEDULE_OPTIONS - fields_of(SCHEDULES[self.schedule]):
            accepted_by = ", ".join(name for name, other in SCHEDULES.items() if option in fields_of(other))
            self._refuse(option, f"the schedule {self.schedule}", accepted_by)

    def _refuse(self, option: str, owner: str, accepted_by: str) -> None:
        value = getattr(self, option)
        if value is not None:
            raise NapkinError(
                f"optimizer.{option} is {value}, but {owner} has no such option: "
                f"leave it out, or use it with {accepted_by}"
            )

    @property
    def options(self) -> dict[str, float]:
        """The options that `build_optimizer` takes, with the rule's defaults filled in."""
        own = optimizer_entry(self.name).options
        return {name: value if (chosen := getattr(self, name)) is None else chosen for name, value in own.items()}

    @property
    def resolved(self) -> "OptimizerConfig":
        """These settings with the rule's defaults written out."""
        return dataclasses.replace(self, **self.options)


def fields_of(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}


TrackerName = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True)
class TrackingConfig:
    """Settings of trackers: the metrics of a run are sent there too; metrics.jsonl is always written."""

    trackers: tuple[TrackerName, ...] = ()
    """Trackers that receive each line of metrics.jsonl: tensorboard, wandb (Weights & Biases), trackio. They must be
    installed; a tracker that fails later is disabled and does not stop the training."""

    project: str = "napkin"
    """Project of the run in wandb and trackio."""

    def refuse_missing(self) -> None:
        missing = [name for name in self.trackers if find_spec(name) is None]
        if missing:
            names = " and ".join(missing)
            raise NapkinError(
                f"tracking.trackers has {names}, which {'is' if len(missing) == 1 else 'are'} not installed: "
                f"`pip install {' '.join(missing)}`, or leave {'it' if len(missing) == 1 else 'them'} out"
            )


PipelineScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"]
ZERO_BUBBLE: tuple[PipelineScheduleName, ...] = ("zb-h1", "zb-v")
"""Schedules whose backward pass is in two parts: gradients of inputs first, of weights later (Qi et al. 2024)."""


@dataclass(frozen=True)
class ParallelismConfig:
    """The division of work among the ranks of `torchrun`: their number is data · shard · pipeline · context · tensor.

    Without any of these, all ranks split the batch, as training.parallelism says.
    """

    data: Annotated[int | None, Bounds(1, MOST_RANKS)] = None
    """Groups of ranks that each have a whole copy of the model and their own rows of every batch (DDP). None is the
    number that the other sizes leave if training.parallelism is ddp, otherwise 1."""

    shard: Annotated[int | None, Bounds(1, MOST_RANKS)] = None
    """Ranks that split the batch, and hold a shard of parameters, gradients and optimizer state each (FSDP2). With data
    above 1 as well, shards are replicated (HSDP). None is what the other sizes leave if training.parallelism is fsdp,
    otherwise 1."""

    tensor: Annotated[int, Bounds(1, MOST_RANKS)] = 1
    """Ranks that split each matrix, the heads of attention, the vocabulary, and outside of matrices the sequence
    (Shoeybi et al. 2019; Korthikanti et al. 2022)."""

    pipeline: Annotated[int, Bounds(1, MOST_RANKS)] = 1
    """Ranks that split the layers; micro-batches pass through them (Huang et al. 2019)."""

    context: Annotated[int, Bounds(1, MOST_RANKS)] = 1
    """Ranks that split each sequence; keys and values go around them in a ring (Liu et al. 2023)."""

    expert: Annotated[int, Bounds(1, MOST_RANKS)] = 1
    """Ranks that split the experts; tokens are sent to the rank of their expert (Lepikhin et al. 2020). These are ranks
    that split the batch: data · shard has to be a multiple."""

    whole_experts: bool = False
    """Whether the ranks of expert are taken from those of tensor and context first, each with whole experts (an expert
    tensor size of 1 in Megatron): data · shard · context · tensor has to be a multiple of expert. This is planned with
    `napkin plan --stack`, and not trained."""

    schedule: PipelineScheduleName = "1f1b"
    """The order in which the ranks of a pipeline work on micro-batches."""

    stages_per_rank: Annotated[int | None, Bounds(1, 1024)] = None
    """Parts of the model that each rank of a pipeline holds; None is 2 for interleaved-1f1b and zb-v, otherwise 1."""

    blocks_per_stage: tuple[int, ...] | None = None
    """Blocks of each stage of the pipeline, from the first to the last; None divides them evenly. The first stage has
    the embedding and the last the head as well: either may have 0 blocks (Grattafiori et al. 2024, section 3.3.2)."""

    shard_optimizer: bool = False
    """Whether ranks with a whole copy of the model (data) hold only a shard of the optimizer state each, and send each
    other the updated parameters (ZeRO stage 1, Rajbhandari et al. 2020)."""

    def __post_init__(self) -> None:
        refuse_outside("parallelism", self)
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
        # The first stage still has the embedding, the last the head.
        if self.blocks_per_stage is not None and min(self.blocks_per_stage) < 0:
            raise NapkinError(f"parallelism.blocks_per_stage has {min(self.blocks_per_stage)} blocks: give 0 or more")
        if self.blocks_per_stage is not None and 0 in self.blocks_per_stage[1:-1]:
            raise NapkinError(
                f"stage {self.blocks_per_stage.index(0, 1)} of parallelism.blocks_per_stage has nothing to compute: "
                "only the first and the last stage can be without blocks, give each other at least 1"
            )

    @property
    def resolved_stages_per_rank(self) -> int:
        """stages_per_rank with its default filled in."""
        if self.stages_per_rank is not None:
            return self.stages_per_rank
        return 2 if self.schedule in ("interleaved-1f1b", "zb-v") else 1
