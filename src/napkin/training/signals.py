"""Ctrl-C and SIGTERM as requests to stop: the current step ends, a checkpoint is written, then the process exits.

A process that is asked to stop has only some seconds: longer work checks for the request while it runs.
"""

import signal as signals
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from napkin.distributed.ranks import Ranks

PATIENCE_SECONDS = 2.0
"""A step that is expected to end within this time after a signal is completed."""

Watch = Callable[[str], AbstractContextManager]


class Interruption:
    """Whether the process was asked to stop, and by which signal."""

    signal: signals.Signals | None = None
    _end: Callable[[], None] | None = None

    def note(self, signal: signals.Signals) -> None:
        """Record a signal."""
        self.signal = signal
        if self._end is not None:
            self._end()

    def give_up(self) -> None:
        """Raise Interrupted if a signal has arrived; called by work that can be repeated later."""
        if self.signal is not None:
            raise Interrupted

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """While the block runs, the signal handler calls `end`, which terminates what the block waits for."""
        self._end = end
        try:
            yield
        finally:
            self._end = None

    def giving_up_long_steps(self, watch: Watch, micro_batches: int) -> Watch:
        """`watch` that raises Interrupted between micro-batches if the rest of the step would take long.

        An interrupted step is repeated after a resume; a step that is nearly done is completed.
        """
        begin, done = time.perf_counter(), 0

        @contextmanager
        def watched(part: str) -> Iterator[None]:
            nonlocal done
            if part == "forward":
                elapsed = time.perf_counter() - begin
                if done and elapsed / done * (micro_batches - done) > PATIENCE_SECONDS:
                    self.give_up()
                done += 1
            with watch(part):
                yield

        return watched


class Interrupted(Exception):
    """Work was interrupted by a signal; it can be repeated later."""


def agree_on_signal(ranks: Ranks, interruption: Interruption) -> signals.Signals | None:
    """The signal that any rank has received, recorded on all ranks, so that they stop after the same step."""
    number = ranks.all_reduce_max(interruption.signal or 0)
    # Without a signal nothing is assigned: one that arrives right now must not be overwritten.
    if not number:
        return None
    interruption.signal = signals.Signals(number)
    return interruption.signal


@contextmanager
def catch_interruption() -> Iterator[Interruption]:
    """Record the first SIGINT or SIGTERM; a second one is handled as usual."""
    interruption = Interruption()
    previous: dict[int, Any] = {}

    def note(number: int, _: Any) -> None:
        restore()
        interruption.note(signals.Signals(number))

    def restore() -> None:
        while previous:
            number, handler = previous.popitem()
            signals.signal(number, handler)

    try:
        for number in (signals.SIGINT, signals.SIGTERM):
            # Shells ignore SIGINT for background jobs, so that Ctrl-C does not reach them; that stays.
            if signals.getsignal(number) != signals.SIG_IGN:
                previous[number] = signals.signal(number, note)
    except ValueError:
        # Handlers can only be set in the main thread; in another one the caller stops the run.
        restore()
    try:
        yield interruption
    finally:
        restore()
