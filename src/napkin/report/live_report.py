"""The report while a run trains: rewritten about every half a minute, in at most half a percent of the time."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from napkin.errors import NapkinError
from napkin.report.liveness import REFRESH_SECONDS
from napkin.report.page import write_report

MAX_TIME_FRACTION = 0.005
FIRST_GUESS_SECONDS = MAX_TIME_FRACTION * REFRESH_SECONDS
"""Assumed cost of the first page, so that it is written after half a minute."""
_MARGIN = 1.25


class LiveReport:
    """Call it after each step."""

    def __init__(
        self, run: Path, on_message: Callable[[str], None], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._run = run
        self._on_message = on_message
        self._clock = clock
        self._begin = clock()
        self._due = self._promised = self._begin + REFRESH_SECONDS
        self._spent, self._expected, self._writing = 0.0, FIRST_GUESS_SECONDS, 0.0
        self._failed = False
        self.pages = 0
        """Pages written so far."""

    def __call__(self) -> None:
        """Write the page if it is due; a failure is reported once, and training continues without further pages."""
        now = self._clock()
        affordable = self._spent + self._expected <= MAX_TIME_FRACTION * (now - self._begin)
        if self._failed or not affordable or now < self._due:
            return
        try:
            write_report(self._run, training=True, every=lambda: self._next_page(now))
        except (NapkinError, OSError) as error:
            self._failed = True
            self._on_message(f"the report is not updated while the run trains: {error}")
            return
        self.pages += 1
        written = self._clock()
        self._writing = written - self._promised
        self._expected = written - now
        self._spent += self._expected

    def _next_page(self, begun: float) -> float:
        """Seconds until the next page, as the page that was begun at `begun` promises them; it is not written sooner.

        The cost of this page is not known before it is on the disk, and the promise has to be made in it: the seconds
        so far are taken with a margin, and writing is assumed to take as long as it did the last time.
        """
        self._promised = self._clock()
        cost = _MARGIN * (self._promised - begun) + self._writing
        affordable = (self._spent + 2 * cost) / MAX_TIME_FRACTION - (self._promised - self._begin)
        seconds = max(REFRESH_SECONDS, affordable)
        self._due = self._promised + seconds
        return seconds


@contextmanager
def live_report(run: Path, on_message: Callable[[str], None]) -> Iterator[LiveReport]:
    """Report a run while the block trains it; if that raises, a last page says that the run has stopped."""
    live = LiveReport(run, on_message)
    try:
        yield live
    except BaseException:
        if live.pages:
            with contextlib.suppress(NapkinError, OSError):
                write_report(run, training=False)
        raise
