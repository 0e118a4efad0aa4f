"""[optimizer] of a recipe: how a step changes the weights."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from napkin.errors import NapkinError
from napkin.near_names import suggestion
from napkin.optim.registry import OPTIMIZERS, optimizer_entry
from napkin.optim.schedule import SCHEDULES
from napkin.recipe.ranges import OPTIMIZER_RANGES, refuse_outside

if TYPE_CHECKING:
    OptimizerName = str
    ScheduleName = str
else:
    OptimizerName, ScheduleName = Literal[tuple(OPTIMIZERS)], Literal[tuple(SCHEDULES)]

# Options that only some optimizers, or only some schedules, accept.
OPTIMIZER_OPTIONS = {"momentum", "beta1", "beta2", "eps"}
SCHEDULE_OPTIONS = {"decay_steps", "final_fraction"}


@dataclass(frozen=True)
class OptimizerConfig:
    """How a step changes the weights: the rule, the learning rate over the run, decay, clipping.

    None is the optimizer's own default, if it has that option: `resolved` fills it in.
    """

    name: OptimizerName = "adamw"
    """The update rule. adamw is the usual choice; muon needs fewer steps; lion and adafactor need less memory; the
    others are their predecessors."""

    learning_rate: float | None = None
    """Largest learning rate, at the end of the warm-up. None is the optimizer's default, 3e-3 for adamw: it suits
    models of a few million parameters; larger models need a smaller one (Kaplan et al. 2020, appendix D.6)."""

    schedule: ScheduleName = "cosine"
    """Learning-rate schedule after the warm-up."""

    warmup_steps: int | None = None
    """Steps over which the learning rate rises to its largest value, while Adam's moments settle. None is 50, or a
    tenth of the steps of a run shorter than 500."""

    decay_steps: int | None = None
    """Steps of the decay at the end of warmup-stable-decay; None is a fifth of the run."""

    final_fraction: float | None = None
    """Learning rate of the last step, as a fraction of the largest; 1 is no decay. None is 0.05, for the schedules that
    decay to it: linear, cosine, warmup-stable-decay."""

    momentum: float | None = None
    """Decay per step of the sum of gradients, for momentum, nesterov (0.9) and muon (0.95)."""

    beta1: float | None = None
    """Decay per step of the first moment; 0.9."""

    beta2: float | None = None
    """Decay per step of the second moment; 0.95, which recovers from a loss spike sooner than the classical 0.999, and
    0.99 for rmsprop and lion."""

    eps: float | None = None
    """Added to the square root of the second moment to avoid division by zero; 1e-8, for adagrad 1e-10. For adafactor,
    the smallest RMS of a parameter that its step is scaled by, 1e-3."""

    weight_decay: float | None = None
    """Decay of matrices per step and unit of learning rate; gains and other vectors do not decay. 0.1 for adamw and
    muon, 0.6 for lion, otherwise 0. Decoupled, except for sgd, momentum, nesterov, adagrad, rmsprop and adam, which add
    it to the gradient."""

    clip_norm: float = 1.0
    """Largest global norm of a step's gradient; a larger gradient is scaled down to it."""

    fused: bool | None = None
    """Whether torch's fused kernel does the update, for sgd, momentum, nesterov, adagrad, adam, adamw, and the
    parameters that muon leaves to adamw: three to five times as fast, with different rounding. None is wherever there
    is one."""

    average_decay: float | None = None
    """Decay per step of an exponential moving average of the weights, for example 0.999. Evaluations and sampling then
    use the average; it takes 4 bytes per parameter. None, or 0, keeps no average."""

    def __post_init__(self) -> None:
        choice = optimizer_entry(self.name)
        refuse_outside("optimizer", self, OPTIMIZER_RANGES)
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
        """The same with the rule's defaults written out."""
        return dataclasses.replace(self, **self.options)


def fields_of(cls: type) -> set[str]:
    """The names of a dataclass's fields."""
    return {field.name for field in dataclasses.fields(cls)}
