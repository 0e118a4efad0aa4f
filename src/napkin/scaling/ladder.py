"""A ladder: runs whose FLOPs grow by one factor from level to level, with several model sizes at each level (IsoFLOP
curves), as large as a budget of seconds or dollars allows by the plan of each run.

Shapes follow one rule, d_model / n_layers, and tokens are what the level's FLOPs leave, by the counted FLOPs of a step
instead of 6·N·D. The learning rate follows a rule too, since a loss that another rate would lower does not show the
effect of size. ladder.json, beside its runs, keeps their recipes, so that the same ladder continues whatever a new plan
says. A finished ladder has a law, which predicts the run after it.
"""

import dataclasses
import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from napkin.errors import NapkinError
from napkin.json_files import read_json, write_json
from napkin.planning.planner import SharedPlans, resolve
from napkin.planning.step.machine import Machine, ThisMachine, machine_of
from napkin.planning.step.run_plan import Plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from napkin.scaling.budget_answer import USUAL_ASPECT, Shapes, flops_per_step
from napkin.scaling.fitted_law import FittedLaw, Interval
from napkin.scaling.law_fit import fit_law
from napkin.scaling.observations import read_run_observations
from napkin.scaling.sweep import Sweep, run_seconds
from napkin.scaling.trials import Trial, Value
from napkin.toml_files import parse_toml
from napkin.train_step.step_ledger import count_step
from napkin.units import format_count, format_flops, format_seconds

LearningRateRule = Literal["power-law", "mup", "recipe"]

FEWEST_STEPS = 20
_PASSES = 6
_CLOSE = 0.9
"""A ladder that takes this share of its budget is not made larger."""
_EVALUATION_FACTOR = 8
"""Times the recipe's evaluation tokens, 131,072 by default, for the one evaluation at the end of each run: its error is
that of a point of the law."""


@dataclass(frozen=True)
class Design:
    """The choices that make a ladder."""

    levels: int = 4
    """The number of FLOP budgets."""
    sizes: int = 3
    """Model sizes at each level."""
    level_factor: float = 2.0
    """FLOPs of a level over those of the one below."""
    size_factor: float = 2.0
    """Parameters of a size over those of the one below."""
    tokens_per_parameter: float = 20.0
    """Tokens per parameter of the middle size: 20 is about optimal (Hoffmann et al. 2022)."""
    aspect: float = USUAL_ASPECT
    """d_model / n_layers; Kaplan et al. 2020 find hardly any difference from 30 to 100."""
    learning_rate: LearningRateRule = "power-law"
    """power-law: 0.3118 · C^-0.125 of the run's FLOPs C (DeepSeek-AI 2024, equation 1); mup: the recipe's, with µP's
    multipliers from its width; recipe: the recipe's for every run."""

    def __post_init__(self) -> None:
        limits: dict[str, tuple[float, float]] = {
            "levels": (1, 100),
            "sizes": (1, 100),
            "level_factor": (1.01, 1000),
            "size_factor": (1.01, 1000),
            "tokens_per_parameter": (0.01, 1e6),
            "aspect": (1, 10_000),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise NapkinError(f"--{name.replace('_', '-')} is {value}: use {least:g} to {most:g}")


@dataclass(frozen=True)
class Rung:
    """One run of a ladder."""

    level: float
    """FLOPs that it was made for; the plan's differ by less than a step."""
    plan: Plan
    trial: Trial

    @property
    def flops(self) -> float:
        return self.plan.steps * flops_per_step(self.plan)

    def refuse_too_short(self) -> None:
        """Raise NapkinError for a run with too few steps for its final loss to depend on its size."""
        if self.plan.steps < FEWEST_STEPS:
            raise NapkinError(
                f"{format_flops(self.level)} are {self.plan.steps} steps of the model with d_model "
                f"{self.plan.recipe.model.d_model}, a run of a ladder has {FEWEST_STEPS} or more: give a larger "
                "budget, fewer --levels or --sizes, or a smaller --training.batch-size"
            )


class Ladder:
    """Runs within a budget, planned."""

    def __init__(self, base: Recipe, design: Design, on: str | Machine | None, planner: SharedPlans) -> None:
        self.base, self.design, self.planner = base, design, planner
        self.machine = machine_of(on, device=base.training.device)
        self.shapes = Shapes(base, aspect=design.aspect, mup=design.learning_rate == "mup")
        self.rungs: tuple[Rung, ...] = ()

    @classmethod
    def within(
        cls,
        base: Recipe,
        *,
        seconds: float | None = None,
        dollars: float | None = None,
        design: Design | None = None,
        on: str | Machine | None = None,
        progress: Callable[[str], None] = lambda doing: None,
    ) -> "Ladder":
        """The largest ladder of a design whose runs take, one after the other, at most so many seconds or dollars.

        `on` are devices of the catalogue; None is this machine. Raises NapkinError for a budget that is too small for
        the smallest run, or in dollars where there is no price.
        """
        if (seconds is None) == (dollars is None):
            raise NapkinError("a ladder has one budget: give --seconds, or --budget with --on")
        if not 0 < (seconds or dollars or 0.0) < 1e12:
            raise NapkinError(f"a budget of {seconds if dollars is None else dollars:g} has no ladder: use more than 0")
        design = design or Design()
        ladder = cls(base, design, on, SharedPlans())
        smallest = resolve(dataclasses.replace(base, model=ladder.shapes.model(2)), ladder.machine)
        site = ladder.planner(smallest, ladder.machine).site
        budget = seconds
        if dollars is not None:
            if not site.usd_per_hour:
                raise NapkinError(
                    "this machine has no price: name devices with --on, or give the budget in time with --seconds"
                )
            budget = dollars / site.usd_per_hour * 3600
        assert budget is not None
        # A first guess at the FLOPs of the largest level: a third of the peak, and most of the time at that level.
        shares = sum(design.level_factor**-level for level in range(design.levels))
        level = budget * site.matmul_peak * site.n_devices / 3 / design.sizes / shares
        for _ in range(_PASSES):
            ladder.rungs = ladder._at(level, progress)
            steps = sum(rung.plan.seconds for rung in ladder.rungs)
            # Evaluations, and what a run takes beside its steps, do not grow with its FLOPs.
            fixed = sum(map(run_seconds, (rung.plan for rung in ladder.rungs))) - steps
            if fixed >= budget:
                raise NapkinError(
                    f"{len(ladder.rungs)} runs take {format_seconds(fixed)} beside their steps, the budget is "
                    f"{format_seconds(budget)}: give a larger budget, or fewer --levels or --sizes"
                )
            if _CLOSE * budget <= steps + fixed <= budget:
                break
            level *= 0.97 * (budget - fixed) / steps
        for rung in ladder.rungs:
            rung.refuse_too_short()
        return ladder

    def rung(self, flops: float, size: float = 1.0, *, progress: Callable[[str], None] = lambda doing: None) -> Rung:
        """The run of that many FLOPs whose model is `size` times as large as the rule's, with the ladder's other
        rules."""
        # 6·N·D is close enough to choose a size: the tokens are then what is left by count.
        middle = math.sqrt(flops / 6 / self.design.tokens_per_parameter)
        rung = self._rung(flops, self.shapes.nearest(middle * size), progress)
        rung.refuse_too_short()
        return rung

    def _at(self, largest: float, progress: Callable[[str], None]) -> tuple[Rung, ...]:
        design = self.design
        rungs: list[Rung] = []
        for level in range(design.levels):
            flops = largest * design.level_factor ** (level + 1 - design.levels)
            middle = math.sqrt(flops / 6 / design.tokens_per_parameter)
            sizes = (middle * design.size_factor ** (i - (design.sizes - 1) / 2) for i in range(design.sizes))
            heads = 0
            for size in sizes:
                # Sizes that fall on one shape move up to the next.
                heads = max(self.shapes.nearest(size), heads + 1)
                rungs.append(self._rung(flops, heads, progress))
        return tuple(rungs)

    def _rung(self, flops: float, heads: int, progress: Callable[[str], None]) -> Rung:
        model = self.shapes.model(heads)
        recipe = dataclasses.replace(self.base, model=model)
        progress(f"planning d_model {model.d_model}, {model.n_layers} layers")
        plan = self.planner(resolve(recipe, self.machine), self.machine)
        steps = max(1, round(flops / flops_per_step(plan)))
        recipe = _ending(recipe, steps, flops, self.design.learning_rate)
        name = f"flops={flops:.3g},d_model={model.d_model}".replace("+", "")
        values: dict[str, Value] = {
            "model.d_model": model.d_model,
            "model.n_layers": model.n_layers,
            "training.steps": steps,
        }
        planned = self.planner(resolve(recipe, self.machine), self.machine)
        return Rung(flops, planned, Trial(name, values, recipe))


def learning_rate_of(flops: float) -> float:
    """The power law of DeepSeek-AI 2024 (arXiv 2401.02954, equation 1): 0.3118 · C^-0.125.

    >>> f"{learning_rate_of(1e17):.2e}"
    '2.34e-03'
    """
    return 0.3118 * flops**-0.125


def _ending(recipe: Recipe, steps: int, flops: float, rule: LearningRateRule) -> Recipe:
    """The recipe of that many steps, shortened as a whole, with one evaluation at its end, on many tokens."""
    recipe = recipe.of_steps(steps)
    training = dataclasses.replace(
        recipe.training,
        evaluate_every=steps,
        checkpoint_every=steps,
        keep_best=False,
        evaluation_tokens=_EVALUATION_FACTOR * recipe.training.evaluation_tokens,
    )
    optimizer = recipe.optimizer
    if rule == "power-law":
        optimizer = dataclasses.replace(optimizer, learning_rate=float(f"{learning_rate_of(flops):.4g}"))
    return dataclasses.replace(recipe, training=training, optimizer=optimizer)


LADDER_FILE = "ladder.json"
FORMAT, VERSION = "napkin-ladder", 1


@dataclass(frozen=True)
class LadderRun:
    """One run of a ladder."""

    level: float
    """FLOPs that it was made for."""
    values: dict[str, Value]
    recipe: str
    """The recipe as TOML."""

    @property
    def parsed(self) -> Recipe:
        """The recipe, parsed. Raises NapkinError if the text is not a recipe."""
        try:
            return msgspec.convert(parse_toml(self.recipe), Recipe)
        except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
            raise NapkinError(f"{LADDER_FILE} holds a recipe that cannot be read ({error}): restore the file") from None


@dataclass(frozen=True)
class LadderFile:
    """The content of ladder.json."""

    format: str = FORMAT
    version: int = VERSION
    runs: dict[str, LadderRun] = field(default_factory=dict)
    """Runs by the names of their folders."""
    next: LadderRun | None = None
    """The larger run that the law is to predict."""

    @property
    def trials(self) -> tuple[Trial, ...]:
        """The runs of the ladder, for a sweep."""
        return tuple(Trial(name, run.values, run.parsed) for name, run in self.runs.items())


def ladder_file_of(rungs: tuple[Rung, ...], larger: Rung | None) -> LadderFile:
    """The file of a ladder, and of the run after it."""

    def kept(rung: Rung) -> LadderRun:
        return LadderRun(rung.level, rung.trial.values, format_recipe(rung.trial.recipe))

    runs = {rung.trial.name: kept(rung) for rung in rungs}
    return LadderFile(runs=runs, next=None if larger is None else kept(larger))


def read_ladder(folder: Path) -> LadderFile | None:
    """The ladder in a folder of runs; None where there is none."""
    file = read_json(folder / LADDER_FILE, LadderFile)
    if file is not None and (file.format != FORMAT or file.version != VERSION):
        raise NapkinError(
            f"'{folder / LADDER_FILE}' has format {file.format[:40]!r}, version {file.version}, this napkin reads "
            f"version {VERSION}: use the napkin that made it"
        )
    return file


def write_ladder(folder: Path, file: LadderFile) -> None:
    """Write ladder.json into a folder of runs, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / LADDER_FILE, file)


@dataclass(frozen=True)
class Predicted:
    """A run and the loss that a law predicts for it."""

    parameters: int
    tokens: int
    flops: float
    loss: Interval
    extrapolation: float
    """The run's FLOPs over those of the largest run that the law was fitted to."""

    def lines(self) -> Iterator[str]:
        size, tokens = format_count(self.parameters), format_count(self.tokens)
        yield f"the next run: {size} parameters, {tokens} tokens, {format_flops(self.flops)}"
        yield (
            f"predicted loss: {self.loss.estimate:.4f} nats per token, 90% interval {self.loss.low:.4f} to "
            f"{self.loss.high:.4f} (± {self.loss.relative:.1%}), {self.extrapolation:.1f} times the largest run"
        )


def fit_and_predict(sweep: Sweep, recipe: Recipe, law: str) -> tuple[FittedLaw, Predicted]:
    """Fit a law to the finished runs of a ladder and predict the loss of a recipe.

    Raises NapkinError where too few runs are finished.
    """
    finished = [str(sweep.folder.run(each.trial)) for each in sweep.standings() if each.loss is not None]
    fitted = fit_law(read_run_observations(finished or [str(Path(sweep.folder.path))]).runs, law).law
    return fitted, predict(fitted, recipe)


def predict(law: FittedLaw, recipe: Recipe) -> Predicted:
    """The loss of a recipe, its parameters and FLOPs counted as on this machine."""
    resolved = resolve(recipe, ThisMachine(device=recipe.training.device))
    ledger = count_step(resolved)
    steps = recipe.training.steps
    tokens, flops = steps * recipe.tokens_per_step, float(steps * ledger.flops)
    loss = law.predict(float(ledger.parameters), float(tokens), flops=flops)
    return Predicted(ledger.parameters, tokens, flops, loss, law.extrapolation(flops))
