"""The report as a run goes on: written anew every half a minute or so, for at most half a percent of the time."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from napkin.errors import NapkinError
from napkin.report.liveness import REFRESH_SECONDS
from napkin.report.page import write_report

MOST_OF_THE_TIME = 0.005
FIRST_GUESS_SECONDS = MOST_OF_THE_TIME * REFRESH_SECONDS
"""What a page is thought to take before one was timed: the first one comes after half a minute."""


class LiveReport:
    """Call it after each step."""

    def __init__(
        self, run: Path, on_message: Callable[[str], None], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._run = run
        self._on_message = on_message
        self._clock = clock
        self._begin = self._written = clock()
        self._spent, self._expected = 0.0, FIRST_GUESS_SECONDS
        self._failed = False
        self.pages = 0
        """Pages written so far."""

    def __call__(self) -> None:
        """Write the page, if it is time; one that cannot be written is told once, and training goes on."""
        now = self._clock()
        affordable = self._spent + self._expected <= MOST_OF_THE_TIME * (now - self._begin)
        if self._failed or not affordable or now - self._written < REFRESH_SECONDS:
            return
        try:
            write_report(self._run, training=True, every=lambda: self._next_page(now))
        except (NapkinError, OSError) as error:
            self._failed = True
            self._on_message(f"the report is not written while the run trains: {error}")
            return
        self.pages += 1
        self._written = self._clock()
        self._expected = self._written - now
        self._spent += self._expected

    def _next_page(self, begun: float) -> float:
        """Seconds until the page after the one begun then, which has cost what has gone by since."""
        cost = self._clock() - begun
        affordable = (self._spent + 2 * cost) / MOST_OF_THE_TIME - (begun - self._begin)
        return max(REFRESH_SECONDS, affordable)


@contextmanager
def live_report(run: Path, on_message: Callable[[str], None]) -> Iterator[LiveReport]:
    """Report a run while the block trains it; where that ends with an error, a last page says training no more."""
    live = LiveReport(run, on_message)
    try:
        yield live
    except BaseException:
        if live.pages:
            with contextlib.suppress(NapkinError, OSError):
                write_report(run, training=False)
        raise
