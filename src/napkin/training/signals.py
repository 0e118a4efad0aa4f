"""Ctrl-C and SIGTERM as a request: the current step ends, a checkpoint is written, then the process ends.

A process that is asked to stop has some seconds: work that may take longer looks for the request on its way.
"""

import signal as signals
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from napkin.distributed.ranks import Ranks

PATIENCE_SECONDS = 2.0
"""A step that ends within this time after a signal is waited for."""

Watch = Callable[[str], AbstractContextManager]


class Interruption:
    """Whether the process was asked to stop, and by which signal."""

    signal: signals.Signals | None = None
    _end: Callable[[], None] | None = None

    def note(self, signal: signals.Signals) -> None:
        """A signal has come."""
        self.signal = signal
        if self._end is not None:
            self._end()

    def give_up(self) -> None:
        """Raise Interrupted where a signal has come: from within work that can be done again later."""
        if self.signal is not None:
            raise Interrupted

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """Have the signal handler call `end` while the block runs: it waits for what `end` terminates."""
        self._end = end
        try:
            yield
        finally:
            self._end = None

    def giving_up_long_steps(self, watch: Watch, micro_batches: int) -> Watch:
        """`watch`, with Interrupted raised between micro-batches where the rest of the step would take long.

        What is given up is done again after a resume: a step that is nearly done is waited for.
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
    """Work that can be done again later was given up because of a signal."""


def agree_on_signal(ranks: Ranks, interruption: Interruption) -> signals.Signals | None:
    """The signal that has reached any rank; noted by all, so that all stop after the same step."""
    number = ranks.all_reduce_max(interruption.signal or 0)
    # A signal that comes right now must not be lost: nothing is noted where there is nothing to note.
    if not number:
        return None
    interruption.signal = signals.Signals(number)
    return interruption.signal


@contextmanager
def catch_interruption() -> Iterator[Interruption]:
    """Turn the first SIGINT or SIGTERM into a note; a second one acts as it always did."""
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
