"""The page of a run in training tells its reader when it is written next, and that it no longer is.

A process that is killed cannot say so. The page knows when it was written and when the next one is due; a short script
compares that with the reader's clock, and the Content-Security-Policy allows it by its hash.
"""

import itertools
from datetime import UTC, datetime
from statistics import median
from typing import NamedTuple

from napkin.runs.run_record import RunRecord
from napkin.units import format_seconds

REFRESH_SECONDS = 30
# A process on a busy machine may be late without having been killed.
_TIMEOUT_FACTOR, _GRACE_SECONDS = 3, 60.0
_PAUSES = 200


class Liveness(NamedTuple):
    """The times that the template shows and compares."""

    written: str
    """Time of writing for people, in UTC."""
    written_iso: str
    every: str
    """The interval at which the page is written while the process trains."""
    due: int
    """Seconds after `written` when the next page is expected: after the interval or, if it ends before, with the
    run."""
    next: str
    """The same for people."""
    is_last: bool
    """True if the run is expected to end before another page of a run in training is due."""
    timeout: int
    """Seconds without a new page after which the process is presumed dead."""


def liveness(run: RunRecord, every: float, *, now: datetime | None = None) -> Liveness:
    """The liveness of a page that is written now, while the next one can be written in `every` seconds.

    The process writes it after the step that is being taken then, and also when the run ends.
    """
    now = (datetime.now(UTC) if now is None else now).replace(microsecond=0)
    every_step, to_the_end = every + _seconds_per_step(run), _seconds_to_the_end(run)
    is_last = to_the_end is not None and to_the_end < every_step
    due = to_the_end if to_the_end is not None and is_last else every_step
    return Liveness(
        written=now.strftime("%Y-%m-%d %H:%M:%S UTC"),
        written_iso=now.isoformat(),
        every=_readable(every),
        due=round(due),
        next=_readable(due),
        is_last=is_last,
        timeout=round(_TIMEOUT_FACTOR * (every + _longest_pause(run)) + _GRACE_SECONDS),
    )


def _readable(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else format_seconds(seconds)


def _seconds_per_step(run: RunRecord) -> float:
    known = [logged.step_seconds for logged in run.metrics[-_PAUSES:] if logged.step_seconds > 0]
    return median(known) if known else 0.0


def _seconds_to_the_end(run: RunRecord) -> float | None:
    if run.plan is None or not run.metrics or not run.metrics[-1].step:
        return None
    last = run.metrics[-1]
    return last.seconds / last.step * max(0, run.plan.steps - last.step)


def _longest_pause(run: RunRecord) -> float:
    """The longest time between two of the last logged steps: a slow step, an evaluation, a checkpoint."""
    seconds = [0.0, *(logged.seconds for logged in run.metrics)][-_PAUSES - 1 :]
    return max((later - earlier for earlier, later in itertools.pairwise(seconds)), default=0.0)
