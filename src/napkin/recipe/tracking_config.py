"""[tracking] of a recipe: where metrics are sent besides metrics.jsonl.

Does not import torch: the command line reads these classes for its help.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from napkin.errors import NapkinError

TrackerName = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True)
class TrackingConfig:
    """Where the metrics of a run are sent besides metrics.jsonl, which is always written."""

    trackers: tuple[TrackerName, ...] = ()
    """Trackers that receive each line of metrics.jsonl: tensorboard, wandb (Weights & Biases), trackio. They must be
    installed; a tracker that fails later is disabled and does not stop the training."""

    project: str = "napkin"
    """Project of the run in wandb and trackio."""

    def refuse_missing(self) -> None:
        """Raise NapkinError where a tracker is not installed."""
        missing = [name for name in self.trackers if find_spec(name) is None]
        if missing:
            names = " and ".join(missing)
            raise NapkinError(
                f"tracking.trackers has {names}, which {'is' if len(missing) == 1 else 'are'} not installed: "
                f"`pip install {' '.join(missing)}`, or leave {'it' if len(missing) == 1 else 'them'} out"
            )
