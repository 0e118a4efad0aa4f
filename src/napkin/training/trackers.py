"""TensorBoard, Weights & Biases and trackio behind one small interface; each is imported when it is used."""

import io
import re
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker needs to know about a run."""

    folder: Path
    identifier: str
    """The same for every process that trains the run."""
    project: str
    step: int
    """Updates done before: the step that a resumed run continues from."""
    recipe: dict[str, dict[str, Any]]


class Tracker(Protocol):
    """Receives figures of steps."""

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Log the figures of a step."""
        ...

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

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Log the figures of a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write everything that is buffered."""
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

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log({"step": step, **figures})

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

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Log the figures of a step."""
        self._run.log(figures, step=step)

    def close(self) -> None:
        """Write everything that is buffered."""
        # trackio prints to standard output, which holds the command's results.
        with redirect_stdout(io.StringIO()):
            self._finish()


TRACKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
}
