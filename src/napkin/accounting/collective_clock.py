"""Times the collectives of one step on one rank: when it entered each, and for how long its computation waited.

A rank waits in three ways: in the call itself, in `Work.wait` or `wait_tensor`, and, where C++ waits as DDP does at the
end of a backward pass, between two operators. What a collective takes beyond that is hidden behind computation.
"""

import bisect
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import get_ident
from typing import Any, no_type_check
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.accounting.collective_call import CollectiveCall
from napkin.accounting.collectives import DISTRIBUTED, collective_of


@dataclass(slots=True)
class TimedCollective:
    """One collective of a step, in seconds of `time.perf_counter`."""

    call: CollectiveCall
    entered: float
    """When this rank called it."""
    exposed: float = 0.0
    """Seconds for which the rank computed nothing because of it."""
    done: float | None = None
    """When it had ended; None where that is not known."""

    @property
    def seconds(self) -> float:
        """From the call to the end."""
        return self.exposed if self.done is None else max(self.exposed, self.done - self.entered)


# Runs for every operator of a step.
@no_type_check
class CollectiveClock(TorchDispatchMode):
    """The collectives of the step that runs in `timing`, and the step's seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[TimedCollective] = []
        self.seconds = 0.0
        self._thread = get_ident()
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._by_work: dict[int, tuple[Any, TimedCollective]] = {}
        self._waited: set[int] = set()

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the block, which is one step."""
        wait = torch.distributed.Work.wait

        def wait_(work: Any, *arguments: Any, **keywords: Any) -> Any:
            begin = time.perf_counter()
            try:
                return wait(work, *arguments, **keywords)
            finally:
                end = time.perf_counter()
                if get_ident() == self._thread:
                    self._waits(self._by_work.get(id(work), (None, None))[1], begin, end)

        begin = time.perf_counter()
        with patch.object(torch.distributed.Work, "wait", wait_), self:
            yield
        self.seconds = time.perf_counter() - begin
        self._add_waits_of_cpp()

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if get_ident() != self._thread and operator.namespace not in DISTRIBUTED:
            return operator(*args, **kwargs)
        begin = time.perf_counter()
        result = operator(*args, **kwargs)
        end = time.perf_counter()
        self._starts.append(begin)
        self._ends.append(end)
        if operator.namespace in DISTRIBUTED:
            self._note(operator, args, kwargs, result, begin, end)
        return result

    def _note(self, operator: Any, args: tuple, kwargs: dict, result: Any, begin: float, end: float) -> None:
        call = collective_of(operator, args, kwargs)
        if call is None:
            if operator.overloadpacket.__name__ == "wait_tensor" and self.collectives:
                self._waits(self._by_work.get(id(args[0]), (None, self.collectives[-1]))[1], begin, end)
            return
        timed = TimedCollective(call, begin, end - begin)
        self.collectives.append(timed)
        if operator.namespace != "c10d":
            self._by_work[id(result)] = (result, timed)
            return
        work = torch.distributed.Work.unbox(result[-1] if isinstance(result, tuple) else result)
        # Kept, so that the same object is returned to whoever waits for it.
        self._by_work[id(work)] = (work, timed)
        # gloo's sends and receives have none.
        with suppress(RuntimeError):
            work.get_future().add_done_callback(lambda _: _ended(timed))

    def _waits(self, timed: TimedCollective | None, begin: float, end: float) -> None:
        self._starts.append(begin)
        self._ends.append(end)
        if timed is not None:
            timed.exposed += end - begin
            timed.done = end if timed.done is None else min(end, timed.done)
            self._waited.add(id(timed))

    def _add_waits_of_cpp(self) -> None:
        """Add the waits of C++ code, which are neither operators nor calls of `Work.wait`.

        A collective that no Python code waited for and that ended between two operators was waited for there: from the
        end of the operator before it to its own end it is exposed.
        """
        waited_until = 0.0
        unwaited = (timed for timed in self.collectives if id(timed) not in self._waited)
        pending = [(timed.done, timed) for timed in unwaited if timed.done is not None]
        for done, timed in sorted(pending, key=lambda pair: pair[0]):
            after = bisect.bisect_right(self._starts, done)
            free = max(self._ends[after - 1] if after else 0.0, waited_until, timed.entered)
            if done > free:
                timed.exposed += done - free
                waited_until = done


def _ended(timed: TimedCollective) -> None:
    timed.done = time.perf_counter()
