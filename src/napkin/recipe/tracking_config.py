"""What [tracking] says in a recipe: where figures go besides metrics.jsonl.

No torch in here: the command line reads these classes for its help.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from napkin.errors import NapkinError

TrackerName = Literal["tensorboard", "wandb", "trackio"]


@dataclass(frozen=True)
class TrackingConfig:
    """Where the figures of a run go besides metrics.jsonl, which is always written."""

    trackers: tuple[TrackerName, ...] = ()
    """Trackers that are told each line of metrics.jsonl: tensorboard, wandb (Weights & Biases), trackio. What is named
    must be installed; one that fails later is let go and never stops the training."""

    project: str = "napkin"
    """Project that the run belongs to at wandb and trackio."""

    def refuse_missing(self) -> None:
        """Raise NapkinError where a tracker that is asked for is not installed."""
        missing = [name for name in self.trackers if find_spec(name) is None]
        if missing:
            names = " and ".join(missing)
            raise NapkinError(
                f"tracking.trackers asks for {names}, not installed here: "
                f"`pip install {' '.join(missing)}`, or leave {'it' if len(missing) == 1 else 'them'} out"
            )
