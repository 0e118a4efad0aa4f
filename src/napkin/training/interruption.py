"""Ctrl-C and SIGTERM as a request: the step at hand ends, a checkpoint is written, then the process leaves."""

import signal as signals
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Interruption:
    """Whether somebody has asked to stop, and by which signal."""

    signal: signals.Signals | None = None


@contextmanager
def catch_interruption() -> Iterator[Interruption]:
    """Turn the first SIGINT or SIGTERM into a note; a second one acts as it always did."""
    interruption = Interruption()
    previous: dict[int, Any] = {}

    def note(number: int, _: Any) -> None:
        interruption.signal = signals.Signals(number)
        restore()

    def restore() -> None:
        while previous:
            number, handler = previous.popitem()
            signals.signal(number, handler)

    try:
        for number in (signals.SIGINT, signals.SIGTERM):
            # Ignored is what a shell makes of SIGINT for jobs in the background, so that Ctrl-C does not reach them.
            if signals.getsignal(number) != signals.SIG_IGN:
                previous[number] = signals.signal(number, note)
    except ValueError:
        # Signals belong to the main thread; in another one the caller stops the run its own way.
        restore()
    try:
        yield interruption
    finally:
        restore()
