"""Sends the metrics of a run to the trackers that its recipe names."""

import dataclasses
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from napkin.recipe.recipe import Recipe
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import RunFolder
from napkin.training.trackers import TRACKERS, TrackedRun, Tracker

_FILE = "tracking.json"


@contextmanager
def open_tracking(recipe: Recipe, run: RunFolder, step: int, on_message: Callable[[str], None]) -> Iterator["Tracking"]:
    """Open the recipe's trackers for a run that continues from `step`, and close them when the block ends."""
    tracking = Tracking(recipe, run, step, on_message)
    try:
        yield tracking
    finally:
        tracking.close()


class Tracking:
    """Sends the lines of metrics.jsonl to trackers. A tracker that fails is reported and disabled."""

    def __init__(self, recipe: Recipe, run: RunFolder, step: int, on_message: Callable[[str], None]) -> None:
        self._training = recipe.training
        self._on_message = on_message
        self._open: dict[str, Tracker] = {}
        names = recipe.tracking.trackers
        if not names:
            return
        tracked = TrackedRun(
            folder=run.path,
            identifier=_identifier(run),
            project=recipe.tracking.project,
            step=step,
            recipe=dataclasses.asdict(recipe),
        )
        for name in dict.fromkeys(names):
            opened = self._try(name, lambda name=name: TRACKERS[name](tracked))
            if opened is not None:
                self._open[name] = opened

    def __call__(self, metrics: StepMetrics) -> None:
        """Send the metrics of a step, if it is logged in metrics.jsonl."""
        due = metrics.validation_loss is not None or metrics.step % self._training.log_every == 0
        if not self._open or not (due or metrics.step == self._training.steps):
            return
        figures = figures_of(metrics)
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.log(metrics.step, figures))

    def close(self) -> None:
        """Close the trackers."""
        for name, tracker in list(self._open.items()):
            self._try(name, tracker.close)
        self._open.clear()

    def _try(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # no error of a tracker may stop a run
            self._open.pop(name, None)
            reason = " ".join(str(error).split()) or type(error).__name__
            self._on_message(f"tracker {name} has failed and is disabled ({reason}); metrics.jsonl has everything")
            return None


def figures_of(metrics: StepMetrics) -> dict[str, float]:
    """The figures of a line of metrics.jsonl by name; of experts, the largest load relative to a uniform one."""
    figures = {
        name: float(value) for name, value in vars(metrics).items() if isinstance(value, int | float) and name != "step"
    }
    if metrics.expert_tokens is not None:
        figures["busiest_expert"] = max(max(layer) * len(layer) / max(1, sum(layer)) for layer in metrics.expert_tokens)
    if metrics.dropped_tokens is not None:
        figures["dropped_tokens"] = float(sum(metrics.dropped_tokens))
    return figures


def _identifier(run: RunFolder) -> str:
    """The identifier of the run for trackers, drawn once."""
    known = run.read_json(_FILE)
    if isinstance(known, dict) and isinstance(known.get("id"), str):
        return known["id"]
    identifier = secrets.token_hex(8)
    run.write_json(_FILE, {"id": identifier})
    return identifier
