"""The recipe: everything that is chosen for a run, in one TOML file; enough to run it again.

No torch in here: the command line reads these classes for its help.
"""

import dataclasses
import difflib
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import tomli_w

from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.model.config import ModelConfig
from napkin.optim.registry import OPTIMIZERS, optimizer_entry
from napkin.optim.schedule import SCHEDULES, Schedule
from napkin.recipe.ranges import (
    MODEL_RANGES,
    MOST_TOKENS_PER_STEP,
    OPTIMIZER_RANGES,
    TRAINING_RANGES,
    refuse_outside,
)
from napkin.recipe.tracking_config import TrackingConfig
from napkin.recipe.train_files import TrainFiles, refuse_impossible_files

if TYPE_CHECKING:
    OptimizerName = ScheduleName = str
else:
    OptimizerName, ScheduleName = Literal[tuple(OPTIMIZERS)], Literal[tuple(SCHEDULES)]


@dataclass(frozen=True)
class DataConfig:
    """Files the run reads; paths are relative to the folder that `napkin` is started in."""

    train: TrainFiles = "data/train.tokens"
    """Token file to train on, as `napkin tokenizer encode` makes it; or several, each as often as it is long; or
    several with weights, shares of the training windows: as a table in TOML, as FILE=WEIGHT on the command line."""

    validation: str | None = "data/validation.tokens"
    """Token file that is only evaluated on; None, or "" in a TOML file, is no evaluation."""

    tokenizer: str = "data/tokenizer.json"
    """The tokenizer that made both."""

    verify: bool = True
    """Whether the checksums of the token files are checked before training; about a second a gigabyte."""

    separate_documents: bool = False
    """Whether each document in a window sees itself alone, as if it stood at the beginning; also in evaluations."""

    prefetch: Literal["auto", "on", "off"] = "auto"
    """Whether a thread prepares the next batch while this one trains: the same batches. auto is on with a GPU, to which
    they are copied meanwhile, and off on a CPU, whose cores all train."""

    def __post_init__(self) -> None:
        # TOML has no None, and leaving the field out means its default.
        if self.validation == "":
            object.__setattr__(self, "validation", None)
        refuse_impossible_files(self.train)


@dataclass(frozen=True)
class OptimizerConfig:
    """How a step changes the weights: the rule, the learning rate over the run, decay, clipping.

    None is the optimizer's own default, where it has the option at all: `resolved` fills it in.
    """

    name: OptimizerName = "adamw"
    """The rule. adamw is the usual one; muon learns more a step; lion and adafactor need less memory; the others are
    those they grew out of."""

    learning_rate: float | None = None
    """Largest learning rate, at the end of the warm-up. None is the optimizer's own, adamw's 3e-3: it suits models of
    a few million parameters; larger ones want less (Kaplan et al. 2020, appendix D.6)."""

    schedule: ScheduleName = "cosine"
    """Course of the learning rate after the warm-up."""

    warmup_steps: int | None = None
    """Steps over which the learning rate climbs to its largest value: Adam's moments need some to settle. None is 50,
    or a tenth of the steps of a run that is shorter than 500."""

    decay_steps: int | None = None
    """Steps over which warmup-stable-decay comes down at the end; None is a fifth of the run."""

    final_fraction: float | None = None
    """Learning rate of the last step, as a fraction of the largest; 1 is no decay. None is 0.05, for the schedules that
    come down to it: linear, cosine, warmup-stable-decay."""

    momentum: float | None = None
    """Decay a step of the sum of gradients, for momentum, nesterov (0.9) and muon (0.95)."""

    beta1: float | None = None
    """Decay a step of the first moment; 0.9."""

    beta2: float | None = None
    """Decay a step of the second moment; 0.95, which forgets a loss spike sooner than the classical 0.999, and 0.99 for
    rmsprop and lion."""

    eps: float | None = None
    """Added to the root of the second moment, so that a gradient of zero divides by something; 1e-8, adagrad's 1e-10.
    For adafactor the least size of a parameter that a step is relative to, 1e-3."""

    weight_decay: float | None = None
    """Decay of matrices, a step and a unit of learning rate; gains and other vectors do not decay. adamw's and muon's
    0.1, lion's 0.6, otherwise 0. Decoupled but for sgd, momentum, nesterov, adagrad, rmsprop and adam, which take it
    as a part of the gradient."""

    clip_norm: float = 1.0
    """Largest global norm of a step's gradient; a larger gradient is scaled down to it."""

    fused: bool | None = None
    """Whether torch's one-pass kernel does the update, for sgd, momentum, nesterov, adagrad, adam, adamw, and muon's
    part of adamw: three to five times as fast, with other last bits. None is wherever there is one."""

    average_decay: float | None = None
    """Decay a step of an exponential moving average of the weights, 0.999 say, which is then what evaluations use and
    what is evaluated and sampled from later; 4 bytes per parameter. None, or 0, keeps none."""

    def __post_init__(self) -> None:
        choice = optimizer_entry(self.name)
        refuse_outside("optimizer", self, OPTIMIZER_RANGES)
        for option in _OPTIMIZER_OPTIONS - choice.options.keys():
            takers = ", ".join(name for name, other in OPTIMIZERS.items() if option in other.options)
            self._refuse(option, self.name, takers)
        if self.fused and not choice.fused:
            raise NapkinError(f"optimizer.fused is True, but there is no such kernel for {self.name}: leave it out")
        if self.schedule not in SCHEDULES:
            raise NapkinError(f"there is no schedule '{self.schedule}': use one of {', '.join(SCHEDULES)}")
        for option in _SCHEDULE_OPTIONS - _fields_of(SCHEDULES[self.schedule]):
            takers = ", ".join(name for name, other in SCHEDULES.items() if option in _fields_of(other))
            self._refuse(option, f"the schedule {self.schedule}", takers)

    def _refuse(self, option: str, whose: str, takers: str) -> None:
        value = getattr(self, option)
        if value is not None:
            raise NapkinError(
                f"optimizer.{option} is {value}, but {whose} has none: leave it out, or use it with {takers}"
            )

    @property
    def options(self) -> dict[str, float]:
        """What `build_optimizer` takes: the rule's options, its own defaults filled in."""
        own = optimizer_entry(self.name).options
        return {name: value if (chosen := getattr(self, name)) is None else chosen for name, value in own.items()}

    @property
    def resolved(self) -> "OptimizerConfig":
        """The same with the rule's own defaults written out."""
        return dataclasses.replace(self, **self.options)


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


@dataclass(frozen=True)
class Recipe:
    """Everything that is chosen for a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        refuse_outside("model", self.model, MODEL_RANGES)
        steps = self.training.steps
        if self.warmup_steps >= steps:
            raise NapkinError(
                f"optimizer.warmup_steps {self.warmup_steps} does not fit into training.steps {steps}: "
                f"use 0 to {steps - 1}, or leave it out"
            )
        try:
            _ = self.schedule
        except NapkinError as error:
            raise NapkinError(f"optimizer.{error}") from None
        if self.tokens_per_step > MOST_TOKENS_PER_STEP:
            raise NapkinError(
                f"training.batch_size {self.training.batch_size} times model.context_length "
                f"{self.model.context_length} is {self.tokens_per_step} tokens per step: "
                f"use numbers whose product is at most {MOST_TOKENS_PER_STEP}"
            )

    @property
    def warmup_steps(self) -> int:
        """optimizer.warmup_steps, its default filled in."""
        chosen = self.optimizer.warmup_steps
        return min(50, self.training.steps // 10) if chosen is None else chosen

    @property
    def schedule(self) -> Schedule:
        """The course of the learning rate."""
        kind = SCHEDULES[self.optimizer.schedule]
        chosen = {name: getattr(self.optimizer, name) for name in _SCHEDULE_OPTIONS & _fields_of(kind)}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        return kind(self.warmup_steps, self.training.steps, **chosen)

    @property
    def tokens_per_step(self) -> int:
        """Tokens an update learns from."""
        return self.training.batch_size * self.model.context_length


def read_recipe(path: StrPath) -> Recipe:
    """Read a recipe from a TOML file; fields that it does not name keep their defaults.

    Raises NapkinError for a missing file, TOML that cannot be read, an unknown field, a value of the wrong type or out
    of its range.
    """
    path = Path(path)
    try:
        # Some editors begin a file with a byte order mark.
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise NapkinError(f"'{path}' does not exist: name a recipe, a TOML file as `napkin recipe` prints it") from None
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a recipe, a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NapkinError(f"'{path}' is not TOML ({error}): correct it there") from None
    except (RecursionError, ValueError) as error:
        # Nested without end, or a number of thousands of digits: well-formed and absurd.
        raise NapkinError(f"'{path}' holds a value that cannot be read ({error}): correct it") from None
    _refuse_unknown(values, Recipe, str(path))
    try:
        return msgspec.convert(values, Recipe)
    except msgspec.ValidationError as error:
        raise NapkinError(
            f"'{path}': {str(error).replace('`$.', '`')}: `napkin train --help` lists the types"
        ) from None
    except NapkinError as error:
        raise NapkinError(f"'{path}': {error}") from None


def format_recipe(recipe: Recipe) -> str:
    """A recipe as TOML, every field in it; None, which TOML cannot say, is left out where it is the default."""
    return tomli_w.dumps({field.name: _toml_table(getattr(recipe, field.name)) for field in dataclasses.fields(recipe)})


def _toml_table(table: Any) -> dict[str, Any]:
    values = {field: getattr(table, field.name) for field in dataclasses.fields(table)}
    return {
        field.name: "" if value is None else value
        for field, value in values.items()
        if value is not None or field.default is not None
    }


def _refuse_unknown(values: dict[str, Any], cls: type, where: str, prefix: str = "") -> None:
    types = typing.get_type_hints(cls)
    for name, value in values.items():
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            hint = f"did you mean '{prefix}{near[0]}'?" if near else f"use one of {', '.join(types)}"
            raise NapkinError(f"'{where}': unknown field '{prefix}{name}': {hint}")
        if dataclasses.is_dataclass(types[name]) and isinstance(value, dict):
            _refuse_unknown(value, types[name], where, f"{prefix}{name}.")


# Options that some optimizers and some schedules have; the others refuse them.
_OPTIMIZER_OPTIONS = {"momentum", "beta1", "beta2", "eps"}
_SCHEDULE_OPTIONS = {"decay_steps", "final_fraction"}


def _fields_of(cls: type) -> set[str]:
    return {field.name for field in dataclasses.fields(cls)}
