"""The thread that steps the engine; tasks of the event loop wait for what it makes."""

import asyncio
import contextlib
import threading

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.request import Completion, Request


class Watch:
    """Wakes one task of the event loop whenever one of its completions grew or ended."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.failure: BaseException | None = None

    async def wait(self) -> None:
        """Until something has changed since the last call. Raises EngineFailure if the engine lost the completions."""
        await self._changed.wait()
        self._changed.clear()
        if self.failure is not None:
            raise EngineFailure(str(self.failure)) from self.failure

    def wake(self) -> None:
        """Call in the event loop only."""
        self._changed.set()


class EngineFailure(Exception):
    """A step of the engine raised; the completions that were in it are lost."""


class EngineThread:
    """Steps an engine while there is work, and wakes those who wait, all of a step at once.

    Made and used in the event loop. A step that raises ends the requests that were in flight; if the next one raises
    as well, the engine is given up, and `failure` says why.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
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
        if self.failure is not None:
            raise EngineFailure(str(self.failure))
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
        n_failures = 0
        while True:
            with self._condition:
                while not (self._closing or self.engine.has_work):
                    self._condition.wait()
                if self._closing:
                    return
            try:
                stepped = self.engine.step()
                n_failures = 0
            except Exception as error:
                n_failures += 1
                if n_failures > 1:
                    self.failure = error
                self._fail(error)
                if self.failure is not None:
                    return
                continue
            with self._condition:
                found = (self._watches.get(completion) for completion, _ in stepped)
                watches = dict.fromkeys(watch for watch in found if watch is not None)
            self._wake(list(watches))

    def _fail(self, error: BaseException) -> None:
        with self._condition:
            completions, watches = list(self._watches), list(dict.fromkeys(self._watches.values()))
            for completion in completions:
                self.engine.cancel(completion)
        for watch in watches:
            watch.failure = error
        self._wake(watches)

    def _wake(self, watches: list[Watch]) -> None:
        def wake() -> None:
            for watch in watches:
                watch.wake()

        if watches:
            # Once the loop is closed nobody waits any more.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(wake)
