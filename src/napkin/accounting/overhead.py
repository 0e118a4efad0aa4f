"""The time that a training loop takes besides the work of its steps, as one figure."""

from collections.abc import Mapping


def loop_overhead(seconds_by_part: Mapping[str, float]) -> tuple[float, float] | None:
    """Seconds that the loop adds to its steps, and their fraction of all step time; None if no step was timed.

    They are all but forward, backward and optimizer: waiting for data, checks, metrics, progress, trackers and
    everything else that is not timed separately. Evaluations, checkpoints and the metered step are not in them.
    """
    computed = sum(seconds_by_part.get(part, 0.0) for part in ("forward", "backward", "optimizer"))
    added = sum(seconds_by_part.get(part, 0.0) for part in ("data", "other"))
    return (added, added / (computed + added)) if computed > 0 else None
