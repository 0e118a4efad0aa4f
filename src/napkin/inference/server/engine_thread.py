"""The thread that steps the engine; tasks of the event loop wait for what it makes."""

import asyncio
import contextlib
import threading
import time

from napkin.errors import NapkinError
from napkin.hardware.malloc import return_freed_memory
from napkin.inference.engine import Engine, Progress
from napkin.inference.request import Completion, Request
from napkin.inference.settings import Sampling

_TRIM_SECONDS = 60.0
"""Requests of many sizes, in several threads, leave free memory between what is used: it is given back so often."""


class Watch:
    """Wakes one task of the event loop whenever one of its completions grew or ended."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()

    async def wait(self) -> None:
        """Until something has changed since the last call."""
        await self._changed.wait()
        self._changed.clear()

    def wake(self) -> None:
        """Call in the event loop only."""
        self._changed.set()


class EngineThread:
    """Steps an engine while there is work, and wakes those who wait, all of a step at once.

    Made and used in the event loop. Requests that cannot be computed fail alone; then a plain one tells whether the
    engine still works, and `failure` says why where it does not. Requests are still tried, and one that succeeds ends
    the failure.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: str | None = None
        self._probe: Completion | None = None
        self._loop = asyncio.get_running_loop()
        self._watches: dict[Completion, Watch] = {}
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Completions that are watched: running, waiting, or not yet read to the end."""
        return len(self._watches)

    def submit(self, requests: list[Request], watch: Watch) -> list[Completion]:
        """Hand requests to the engine, all or none. Raises NapkinError for what can never run."""
        submitted: list[Completion] = []
        with self._condition:
            try:
                for request in requests:
                    # One after another: those before one that is refused are to be cancelled.
                    submitted.append(self.engine.submit(request))  # noqa: PERF401
            except NapkinError:
                for completion in submitted:
                    self.engine.cancel(completion)
                raise
            finally:
                self._condition.notify()
            self._watches |= dict.fromkeys(submitted, watch)
        return submitted

    def release(self, completions: list[Completion]) -> None:
        """Forget completions, and cancel those that have not ended."""
        with self._condition:
            for completion in completions:
                self._watches.pop(completion, None)
                if completion.finish is None:
                    self.engine.cancel(completion)
            self._condition.notify()

    async def close(self) -> None:
        """End the thread after its step."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        trimmed = time.monotonic()
        while True:
            with self._condition:
                while not (self._closing or self.engine.has_work):
                    self._condition.wait()
                if self._closing:
                    return
            try:
                stepped = self.engine.step(isolate=True)
            except Exception as error:
                stepped = self.engine.fail_all(error)
            self._judge(stepped)
            with self._condition:
                found = (self._watches.get(completion) for completion, _ in stepped)
                watches = dict.fromkeys(watch for watch in found if watch is not None)
            self._wake(list(watches))
            if time.monotonic() > trimmed + _TRIM_SECONDS:
                return_freed_memory()
                trimmed = time.monotonic()

    def _judge(self, stepped: list[Progress]) -> None:
        """Whether the engine works. Where a request fails, a plain one tells whose fault it is."""
        for completion, _ in stepped:
            is_probe = completion is self._probe
            if is_probe:
                self._probe = None
            if completion.finish != "failed":
                self.failure = self.failure if completion.finish == "cancelled" else None
            elif is_probe:
                self.failure = completion.failure
            elif self._probe is None and self.failure is None:
                self._probe = self.engine.submit(Request([0], 1, Sampling(temperature=0)))

    def _wake(self, watches: list[Watch]) -> None:
        def wake() -> None:
            for watch in watches:
                watch.wake()

        if watches:
            # Once the loop is closed nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(wake)
