"""What a training loop costs besides its steps' own work, as one figure."""

from collections.abc import Mapping


def loop_overhead(seconds_by_part: Mapping[str, float]) -> tuple[float, float] | None:
    """Seconds that the loop adds to its steps, and their share of the steps' time; None where no step was timed.

    It is all that is not forward, backward and optimizer: waiting for data, and checks, metrics, progress, trackers and
    whatever else is part of no other. Evaluations, checkpoints and the metered step stand beside the steps.
    """
    computed = sum(seconds_by_part.get(part, 0.0) for part in ("forward", "backward", "optimizer"))
    added = sum(seconds_by_part.get(part, 0.0) for part in ("data", "other"))
    return (added, added / (computed + added)) if computed > 0 else None
