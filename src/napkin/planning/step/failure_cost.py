"""The figures that a plan states about failures, from their model; torch is not imported."""

import math

from napkin.accounting.failures import FailureModel
from napkin.runs.accounting_files import PlannedFailures


def failures_of_run(
    model: FailureModel,
    useful_seconds: float,
    *,
    interval_seconds: float | None = None,
    shortest_interval_seconds: float = 0.0,
    useful_dollars: float | None = None,
) -> PlannedFailures:
    """Failures over so many seconds of work.

    Args:
        model: how often failures come, and what checkpoints and restarts take.
        useful_seconds: of work, without checkpoints and failures.
        interval_seconds: of work between two checkpoints; None is the best.
        shortest_interval_seconds: that of a step.
        useful_dollars: for `useful_seconds`; None where no price is known.
    """
    best = min(max(model.best_interval, shortest_interval_seconds), useful_seconds)
    longest = min(max(model.longest_interval, best), useful_seconds)
    interval = best if interval_seconds is None else interval_seconds
    seconds = model.expected_seconds(useful_seconds, interval)
    ends = math.isfinite(seconds)
    return PlannedFailures(
        mtbf_seconds=model.mtbf_seconds,
        restart_seconds=model.restart_seconds,
        pause_seconds=model.pause_seconds,
        write_seconds=model.write_seconds,
        interval_seconds=interval,
        best_interval_seconds=best,
        longest_interval_seconds=longest,
        goodput=model.goodput(interval),
        best_goodput=model.goodput(best),
        seconds=seconds if ends else None,
        interruptions=seconds / model.mtbf_seconds if ends else None,
        dollars=useful_dollars * seconds / useful_seconds if ends and useful_dollars is not None else None,
    )
