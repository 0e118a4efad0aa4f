"""TensorBoard, Weights & Biases and trackio behind one small interface; each is imported when it is used.

`Tracking` sends the metrics of a run to the trackers that its recipe names.
"""

import dataclasses
import io
import re
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from napkin.recipe.recipe import Recipe
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import RunFolder


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for trackers."""

    folder: Path
    identifier: str
    """The same for every process that trains the run."""
    project: str
    step: int
    """Updates done before: the step that a resumed run continues from."""
    recipe: dict[str, dict[str, Any]]


class Tracker(Protocol):
    """Receives metrics of steps."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def close(self) -> None:
        """Write everything that is buffered."""
        ...


class TensorBoard:
    """Event files in the run's folder, tensorboard/."""

    def __init__(self, run: TrackedRun) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

            # Events of an earlier process for steps that are repeated are hidden.
            purge = run.step + 1 if run.step else None
            self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge, flush_secs=30)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run at wandb.ai, or wherever WANDB_MODE and WANDB_BASE_URL say; its files are in the run's folder, wandb/."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=run.project,
            name=run.folder.name,
            id=run.identifier,
            resume="allow",
            dir=str(run.folder),
            config=run.recipe,
            # wandb must not capture the terminal.
            settings=wandb.Settings(console="off"),
        )
        # A step that is repeated after a kill has a smaller number than the last one; wandb's own step must increase.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Send everything that is buffered, if there is a network."""
        self._run.finish()


class Trackio:
    """A run in trackio's own database, which `trackio show` displays."""

    def __init__(self, run: TrackedRun) -> None:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            import trackio  # pyright: ignore[reportMissingImports]

            # trackio identifies a run by its name.
            name = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', run.folder.name)}-{run.identifier[:6]}"
            own = {"auto_log_cpu": False, "auto_log_gpu": False, "embed": False}
            self._finish = trackio.finish
            self._run = trackio.init(run.project, name=name, config=run.recipe, resume="allow", **own)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        # trackio prints to standard output, which holds the command's results.
        with redirect_stdout(io.StringIO()):
            self._finish()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}


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
        found = metrics_of(metrics)
        for name, tracker in list(self._open.items()):
            self._try(name, lambda tracker=tracker: tracker.log(metrics.step, found))

    def close(self) -> None:
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


def metrics_of(metrics: StepMetrics) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl by name; of experts, the largest load relative to a uniform one."""
    found = {
        name: float(value) for name, value in vars(metrics).items() if isinstance(value, int | float) and name != "step"
    }
    if metrics.expert_tokens is not None:
        found["busiest_expert"] = max(max(layer) * len(layer) / max(1, sum(layer)) for layer in metrics.expert_tokens)
    if metrics.dropped_tokens is not None:
        found["dropped_tokens"] = float(sum(metrics.dropped_tokens))
    return found


def _identifier(run: RunFolder) -> str:
    """The identifier of the run for trackers, drawn once."""
    known = run.read_json(_FILE)
    if isinstance(known, dict) and isinstance(known.get("id"), str):
        return known["id"]
    identifier = secrets.token_hex(8)
    run.write_json(_FILE, {"id": identifier})
    return identifier
