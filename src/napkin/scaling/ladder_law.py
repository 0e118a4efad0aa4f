"""The law of a finished ladder, and what it predicts of the run after it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from napkin.planning.machine import ThisMachine
from napkin.planning.resolve import resolve
from napkin.recipe.recipe import Recipe
from napkin.scaling.fitted_law import FittedLaw, Interval
from napkin.scaling.law_fit import fit_law
from napkin.scaling.observations import read_run_observations
from napkin.scaling.sweep import Sweep
from napkin.train_step.step_ledger import count_step
from napkin.units import format_count, format_flops


@dataclass(frozen=True)
class Predicted:
    """A run and the loss that a law predicts for it."""

    parameters: int
    tokens: int
    flops: float
    loss: Interval
    extrapolation: float
    """Its FLOPs over those of the largest run that the law was fitted to."""

    def lines(self) -> Iterator[str]:
        """For a terminal."""
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
