"""[optimizer] of a recipe: how a step changes the weights."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from napkin.errors import NapkinError
from napkin.optim.names import OPTIMIZERS, choice_of
from napkin.optim.schedule import SCHEDULES
from napkin.recipe.ranges import OPTIMIZER_RANGES, refuse_outside

if TYPE_CHECKING:
    OptimizerName = ScheduleName = str
else:
    OptimizerName, ScheduleName = Literal[tuple(OPTIMIZERS)], Literal[tuple(SCHEDULES)]

# Options that only some optimizers and only some schedules have; the others refuse them.
OPTIMIZER_OPTIONS = {"momentum", "beta1", "beta2", "eps"}
SCHEDULE_OPTIONS = {"decay_steps", "final_fraction"}


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
        choice = choice_of(self.name)
        refuse_outside("optimizer", self, OPTIMIZER_RANGES)
        for option in OPTIMIZER_OPTIONS - choice.options.keys():
            takers = ", ".join(name for name, other in OPTIMIZERS.items() if option in other.options)
            self._refuse(option, self.name, takers)
        if self.fused and not choice.fused:
            raise NapkinError(f"optimizer.fused is True, but there is no such kernel for {self.name}: leave it out")
        if self.schedule not in SCHEDULES:
            raise NapkinError(f"there is no schedule '{self.schedule}': use one of {', '.join(SCHEDULES)}")
        for option in SCHEDULE_OPTIONS - fields_of(SCHEDULES[self.schedule]):
            takers = ", ".join(name for name, other in SCHEDULES.items() if option in fields_of(other))
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
        own = choice_of(self.name).options
        return {name: value if (chosen := getattr(self, name)) is None else chosen for name, value in own.items()}

    @property
    def resolved(self) -> "OptimizerConfig":
        """The same with the rule's own defaults written out."""
        return dataclasses.replace(self, **self.options)


def fields_of(cls: type) -> set[str]:
    """The names of a dataclass's fields."""
    return {field.name for field in dataclasses.fields(cls)}
