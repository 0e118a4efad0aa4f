"""The recipe: everything that is chosen for a run, in one TOML file; enough to run it again.

No torch in here: the command line reads these classes for its help.
"""

import dataclasses
import difflib
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import tomli_w

from napkin.errors import NapkinError
from napkin.files import StrPath
from napkin.model.config import ModelConfig


@dataclass(frozen=True)
class DataConfig:
    """Files the run reads; paths are relative to the folder that `napkin` is started in."""

    train: str = "data/train.tokens"
    """Token file to train on, as `napkin tokenizer encode` makes it."""

    validation: str | None = "data/validation.tokens"
    """Token file that is only evaluated on; None is no evaluation."""

    tokenizer: str = "data/tokenizer.json"
    """The tokenizer that made both."""

    verify: bool = True
    """Whether the checksums of the token files are checked before training; about a second a gigabyte."""


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019), warm-up, cosine decay, clipping."""

    learning_rate: float = 3e-3
    """Largest learning rate, at the end of the warm-up. 3e-3 suits models of a few million parameters; larger ones
    want less (Kaplan et al. 2020, appendix D.6)."""

    warmup_steps: int = 50
    """Steps over which the learning rate climbs to its largest value: Adam's moments need some to settle."""

    final_fraction: float = 0.05
    """Learning rate of the last step, as a fraction of the largest."""

    beta1: float = 0.9
    """Decay a step of the first moment."""

    beta2: float = 0.95
    """Decay a step of the second moment; 0.95 forgets a loss spike sooner than the classical 0.999."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.1
    """Decoupled decay, of matrices alone."""

    clip_norm: float = 1.0
    """Largest global norm of a step's gradient; a larger gradient is scaled down to it."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how much at a time, how often, where."""

    steps: int = 1000
    """Number of updates."""

    batch_size: int = 16
    """Sequences an update learns from."""

    micro_batch_size: int | None = None
    """Sequences computed at a time, gradients added up; None is batch_size. Less memory, the same update."""

    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Format of matrix products: bf16 is autocast over fp32 weights; auto is bf16 where the hardware multiplies it
    natively, fp32 elsewhere."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto is the GPU if there is one."""

    threads: int | None = None
    """CPU threads; None is all cores that this process may use."""

    init_seed: int = 0
    """Seed of the initial weights."""

    data_seed: int = 0
    """Seed of the order of the training sequences."""

    log_every: int = 1
    """Steps between two lines of metrics.jsonl."""

    checkpoint_every: int = 200
    """Steps between two checkpoints."""

    keep_checkpoints: int = 2
    """Checkpoints kept; older ones are removed after a newer one is safely on the disk."""

    evaluate_every: int = 200
    """Steps between two evaluations on a sample of the validation tokens."""

    evaluation_tokens: int = 16384
    """Size of that sample. `napkin evaluate` takes all of them."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "log_every", "checkpoint_every", "keep_checkpoints", "evaluate_every"):
            if getattr(self, name) < 1:
                raise NapkinError(f"training.{name} is {getattr(self, name)}: use 1 or more")
        for name in ("micro_batch_size", "threads"):
            if (getattr(self, name) or 1) < 1:
                raise NapkinError(f"training.{name} is {getattr(self, name)}: use 1 or more, or leave it out")
        if self.batch_size % self.resolved_micro_batch_size:
            raise NapkinError(
                f"training.batch_size {self.batch_size} does not divide into micro-batches of {self.micro_batch_size}: "
                "choose a micro_batch_size that divides it"
            )

    @property
    def resolved_micro_batch_size(self) -> int:
        """micro_batch_size, its default filled in."""
        return self.batch_size if self.micro_batch_size is None else self.micro_batch_size


@dataclass(frozen=True)
class Recipe:
    """Everything that is chosen for a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        steps, warmup_steps = self.training.steps, self.optimizer.warmup_steps
        if not 0 <= warmup_steps < steps:
            raise NapkinError(
                f"optimizer.warmup_steps {warmup_steps} does not fit into training.steps {steps}: use 0 to {steps - 1}"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens an update learns from."""
        return self.training.batch_size * self.model.context_length


def read_recipe(path: StrPath) -> Recipe:
    """Read a recipe from a TOML file; fields that it does not name keep their defaults.

    Raises NapkinError for a missing file, TOML that cannot be read, an unknown field, a value of the wrong type.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NapkinError(f"'{path}' does not exist: name a recipe, a TOML file as `napkin recipe` prints it") from None
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name a recipe, a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise NapkinError(f"'{path}' is not TOML ({error}): correct that line") from None
    _refuse_unknown(values, Recipe, str(path))
    try:
        return msgspec.convert(values, Recipe)
    except msgspec.ValidationError as error:
        raise NapkinError(
            f"'{path}': {str(error).replace('`$.', '`')}: `napkin train --help` lists the types"
        ) from None


def format_recipe(recipe: Recipe) -> str:
    """A recipe as TOML, every field in it; None, which TOML cannot say, is left out."""
    return tomli_w.dumps(
        {
            table: {name: value for name, value in values.items() if value is not None}
            for table, values in dataclasses.asdict(recipe).items()
        }
    )


def _refuse_unknown(values: dict[str, Any], cls: type, where: str, prefix: str = "") -> None:
    types = typing.get_type_hints(cls)
    for name, value in values.items():
        if name not in types:
            near = difflib.get_close_matches(name, types, n=1)
            hint = f"did you mean '{prefix}{near[0]}'?" if near else f"use one of {', '.join(types)}"
            raise NapkinError(f"'{where}': unknown field '{prefix}{name}': {hint}")
        if dataclasses.is_dataclass(types[name]) and isinstance(value, dict):
            _refuse_unknown(value, types[name], where, f"{prefix}{name}.")
