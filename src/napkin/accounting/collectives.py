"""Operators of torch.distributed in a ledger: which collective a call is, how many bytes it moves, and among whom.

`CollectiveClock` times the collectives of one step on one rank: when it entered each, and for how long its computation
waited.
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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from napkin.accounting.ledger import CollectiveCall

DISTRIBUTED = frozenset({"c10d", "_c10d_functional"})
"""Namespaces of the operators of torch.distributed: those that write into tensors, and those that return new ones."""


@no_type_check
def needs_other_ranks(operator: Any) -> bool:
    """True if a call of an operator waits for other ranks: it cannot be timed alone."""
    return operator.namespace in DISTRIBUTED or operator.overloadpacket.__name__.startswith("ring_attention")


# By parts of an operator's name. Of tensors in both directions, the larger are the whole tensor.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "isend": "send",
    "send": "send",
    "irecv": "receive",
    "recv": "receive",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}


# Runs for every operator of torch.distributed in a step.
@no_type_check
def collective_of(operator: Any, args: tuple, kwargs: dict) -> CollectiveCall | None:
    """The collective that a call is; None for any other operator, and for waiting for one."""
    if operator.namespace not in DISTRIBUTED:
        return None
    name = operator.overloadpacket.__name__.strip("_")
    operation = next((found for part, found in _OPERATIONS.items() if name.startswith(part)), None)
    if operation is None:
        return None
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    sums = {name: _bytes_of(value) for name, value in given.items() if not isinstance(value, str)}
    ranks = _ranks_of(given)
    if operation == "all_to_all":
        data_bytes = next(size for name, size in sums.items() if name.startswith("input"))
    else:
        data_bytes = max(sums.values())
    if operator.namespace == "_c10d_functional" and operation == "all_gather":
        # The operator returns the whole tensor.
        data_bytes = max(data_bytes, len(ranks) * next(iter(sums.values())))
    peer = given.get("dst", given.get("src")) if operation in ("send", "receive") else None
    return CollectiveCall(operation, data_bytes, ranks, None if peer is None else ranks[peer])


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_bytes_of, value)) if isinstance(value, (list, tuple)) else 0


@no_type_check
def _ranks_of(given: dict[str, Any]) -> tuple[int, ...]:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    group = given.get("process_group")
    if group is not None:
        group = dist.ProcessGroup.unbox(group)
    elif isinstance(given["group_name"], str):
        group = _resolve_process_group(given["group_name"])
    else:
        group = given["group_name"]
    return tuple(dist.get_process_group_ranks(group))


@contextmanager
def waits_unseen() -> Iterator[None]:
    """No dispatch mode sees what waiting for a collective computes: where gloo lacks one, it copies from another."""
    if not torch.distributed.is_available():
        yield
        return
    wait = torch.distributed.Work.wait

    def wait_(work: Any, *arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return wait(work, *arguments, **keywords)

    with patch.object(torch.distributed.Work, "wait", wait_):
        yield


# A rank waits in three ways: in the call itself, in `Work.wait` or `wait_tensor`, and, where C++ waits as DDP does at
# the end of a backward pass, between two operators. What a collective takes beyond that is hidden behind computation.


@dataclass(slots=True)
class TimedCollective:
    """One collective of a step, in seconds of `time.perf_counter`."""

    call: CollectiveCall
    entered: float
    """Time at which this rank called it."""
    exposed: float = 0.0
    """Seconds for which the rank computed nothing because of it."""
    done: float | None = None
    """When it had ended; None where that is not known."""

    @property
    def seconds(self) -> float:
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
