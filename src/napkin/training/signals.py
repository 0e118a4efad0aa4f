"""Signals as requests to stop: the current step ends, a checkpoint is written, then the process exits.

Besides Ctrl-C and SIGTERM these are the signals that announce an end: SIGHUP where the terminal is lost, and SIGUSR1,
SIGUSR2 and SIGXCPU, which clusters send before a time limit. A process that is asked to stop has only some seconds:
longer work checks for the request while it runs.
"""

import os
import signal as signals
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from napkin.distributed.ranks import Ranks

PATIENCE_SECONDS = 2.0
"""A step that is expected to end within this time after a signal is completed."""

STOPS = (signals.SIGINT, signals.SIGTERM)
"""A second one of these ends the process at once."""

WARNINGS = tuple(
    getattr(signals, name) for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU") if hasattr(signals, name)
)
"""These are often sent more than once: SIGHUP by the shell and by the kernel, SIGXCPU every second. Only the first
counts, and none of them ends the process at once."""

Watch = Callable[[str], AbstractContextManager]


class Interruption:
    """A request to stop the process, by a signal."""

    signal: signals.Signals | None = None
    _end: Callable[[], None] | None = None

    def __init__(self) -> None:
        # torchrun starts a process by a variable of this name.
        self._torchrun = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    @property
    def has_lost_parent(self) -> bool:
        """True if torchrun has started this process and has ended since."""
        return self._torchrun is not None and os.getppid() != self._torchrun

    def note(self, signal: signals.Signals) -> None:
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
            if part in ("forward", "forward and backward"):
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
    """The signal that any rank has received, recorded on all ranks, so that they stop after the same step.

    Ranks whose torchrun has gone, killed by a signal that it does not forward, stop as if it had sent them SIGTERM.
    """
    own = interruption.signal or (signals.SIGTERM if interruption.has_lost_parent else 0)
    number = ranks.all_reduce_max(own)
    # Without a signal nothing is assigned: one that arrives right now must not be overwritten.
    if not number:
        return None
    interruption.signal = signals.Signals(number)
    return interruption.signal


@contextmanager
def catch_interruption() -> Iterator[Interruption]:
    """Record the first signal of `STOPS` and `WARNINGS`; of `STOPS`, a second one is handled as usual.

    A signal that is ignored stays so, as SIGHUP under nohup, or SIGINT in a background job of a shell; and of
    `WARNINGS` one that the program handles in its own way.
    """
    interruption = Interruption()
    previous: dict[int, Any] = {}

    def stop(number: int, _: Any) -> None:
        for each in STOPS:
            restore(each)
        note(number, _)

    def note(number: int, _: Any) -> None:
        # The first of several is what the process says that it was stopped by.
        if interruption.signal is None:
            interruption.note(signals.Signals(number))

    def restore(number: int) -> None:
        if number in previous:
            signals.signal(number, previous.pop(number))

    try:
        for number in STOPS:
            # None stands for a handler that Python cannot restore.
            if signals.getsignal(number) not in (signals.SIG_IGN, None):
                previous[number] = signals.signal(number, stop)
        for number in WARNINGS:
            if signals.getsignal(number) == signals.SIG_DFL:
                previous[number] = signals.signal(number, note)
    except ValueError:
        # Handlers can only be set in the main thread; in another one the caller stops the run.
        previous.clear()
    try:
        yield interruption
    finally:
        for number in list(previous):
            restore(number)
