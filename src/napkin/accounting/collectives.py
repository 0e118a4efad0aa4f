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


# Found by the beginning of the operator's name. Of its input and its output, the larger is the whole tensor.
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
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    sums = {name: _bytes_of(value) for name, value in arguments.items() if not isinstance(value, str)}
    ranks = _ranks_of(arguments)
    if operation == "all_to_all":
        data_bytes = next(size for name, size in sums.items() if name.startswith("input"))
    else:
        data_bytes = max(sums.values())
    if operator.namespace == "_c10d_functional" and operation == "all_gather":
        # The operator returns the whole tensor.
        data_bytes = max(data_bytes, len(ranks) * next(iter(sums.values())))
    peer = arguments.get("dst", arguments.get("src")) if operation in ("send", "receive") else None
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
#
# On a GPU the host waits in none of them: it queues a wait on the stream that computes. Moments are events on that
# stream then, recorded before and after what the host does, and seconds are those between two events.


@dataclass(slots=True)
class TimedCollective:
    """One collective of a step, in seconds of this rank's clock."""

    call: CollectiveCall
    entered: float
    """Time at which this rank called it; on a GPU, at which its stream reached the call."""
    exposed: float = 0.0
    """Seconds in which the rank computed nothing because it waited for this collective."""
    done: float | None = None
    """Time at which it ended; None where that is not known."""

    @property
    def seconds(self) -> float:
        return self.exposed if self.done is None else max(self.exposed, self.done - self.entered)


class HostMoments:
    """Moments of the host, in seconds of `time.perf_counter`."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds_at(self, moment: float) -> float:
        return moment


class StreamMoments:
    """Moments of the device's stream, in seconds since the first of them; they are read when the device has passed
    them."""

    def __init__(self) -> None:
        self._first = self.now()

    def now(self) -> "torch.cuda.Event":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_at(self, moment: "torch.cuda.Event") -> float:
        moment.synchronize()
        return self._first.elapsed_time(moment) / 1000


# Runs for every operator of a step.
@no_type_check
class CollectiveClock(TorchDispatchMode):
    """The collectives of the step that runs in `timing`, and the step's seconds."""

    def __init__(self, device_type: str = "cpu") -> None:
        super().__init__()
        self.collectives: list[TimedCollective] = []
        self.seconds = 0.0
        self._on_device = device_type == "cuda"
        self._moments = StreamMoments() if self._on_device else HostMoments()
        self._thread = get_ident()
        self._calls: list[list[Any]] = []
        """Each collective: its call, the moment at which it was entered, waits as pairs of moments, and its end."""
        self._operators: list[tuple[Any, Any]] = []
        """The moments before and after each operator and each wait."""
        self._by_work: dict[int, tuple[Any, list[Any]]] = {}

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the block, which is one step."""
        wait, now = torch.distributed.Work.wait, self._moments.now

        def wait_(work: Any, *arguments: Any, **keywords: Any) -> Any:
            begin = now()
            try:
                return wait(work, *arguments, **keywords)
            finally:
                end = now()
                # The backward pass of a GPU runs on a thread of its own.
                if self._on_device or get_ident() == self._thread:
                    self._waits(self._by_work.get(id(work), (None, None))[1], begin, end)

        begin = now()
        with patch.object(torch.distributed.Work, "wait", wait_), self:
            yield
        self._read(begin, now())

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if get_ident() != self._thread and operator.namespace not in DISTRIBUTED and not self._on_device:
            return operator(*args, **kwargs)
        begin = self._moments.now()
        result = operator(*args, **kwargs)
        end = self._moments.now()
        self._operators.append((begin, end))
        if operator.namespace in DISTRIBUTED:
            self._note(operator, args, kwargs, result, begin, end)
        return result

    def _note(self, operator: Any, args: tuple, kwargs: dict, result: Any, begin: Any, end: Any) -> None:
        call = collective_of(operator, args, kwargs)
        if call is None:
            if operator.overloadpacket.__name__ == "wait_tensor" and self._calls:
                self._waits(self._by_work.get(id(args[0]), (None, self._calls[-1]))[1], begin, end)
            return
        noted = [call, begin, [(begin, end)], None]
        self._calls.append(noted)
        if operator.namespace != "c10d":
            self._by_work[id(result)] = (result, noted)
            return
        work = torch.distributed.Work.unbox(result[-1] if isinstance(result, tuple) else result)
        # Kept, so that the same object is returned to whoever waits for it.
        self._by_work[id(work)] = (work, noted)
        if self._on_device:
            return  # A future of NCCL is done when its collective is queued.
        # gloo's sends and receives have none.
        with suppress(RuntimeError):
            work.get_future().add_done_callback(lambda _: _ended(noted))

    def _waits(self, noted: list[Any] | None, begin: Any, end: Any) -> None:
        self._operators.append((begin, end))
        if noted is not None:
            noted[2].append((begin, end))

    def _read(self, begin: Any, end: Any) -> None:
        """Turn moments into seconds, when all is queued: events that the device has not passed are waited for here."""
        at = self._moments.seconds_at
        self.seconds = at(end) - at(begin)
        unwaited: list[TimedCollective] = []
        for call, entered, waits, ended in self._calls:
            timed = TimedCollective(call, at(entered), sum(at(stop) - at(start) for start, stop in waits))
            ends = [at(stop) for _, stop in waits[1:]] + ([] if ended is None else [at(ended)])
            timed.done = min(ends, default=None)
            self.collectives.append(timed)
            if len(waits) == 1:
                unwaited.append(timed)
        operators = sorted((at(start), at(stop)) for start, stop in self._operators)
        if self._on_device:
            _add_waits_of_streams(unwaited, operators, at(end))
        else:
            _add_waits_of_cpp(unwaited, operators)


LATEST_CALLBACK = 0.05
"""Seconds after the end of a collective within which its callback is expected: ten times the interval at which threads
of Python take turns."""


def _add_waits_of_cpp(unwaited: list[TimedCollective], operators: list[tuple[float, float]]) -> None:
    """Add the waits of C++ code, which are neither operators nor calls of `Work.wait`.

    A collective that no Python code waited for and that ended between two operators was waited for there: from the end
    of the operator before it to its own end it is exposed. A callback reports its end, and that callback may have to
    wait for the interpreter while the next operators already run: the longest pause shortly before the callback is
    taken as the wait.
    """
    waited_until = 0.0
    starts = [start for start, _ in operators]
    pending = [(timed.done, timed) for timed in unwaited if timed.done is not None]
    for reported, timed in sorted(pending, key=lambda pair: pair[0]):
        free, done = reported, reported
        for after in range(
            bisect.bisect_right(starts, reported - LATEST_CALLBACK), bisect.bisect_right(starts, reported) + 1
        ):
            begin = max(operators[after - 1][1] if after else 0.0, waited_until, timed.entered)
            end = min(reported, starts[after]) if after < len(starts) else reported
            if end - begin > done - free:
                free, done = begin, end
        if done > free:
            timed.exposed += done - free
            timed.done = waited_until = done


def _add_waits_of_streams(
    unwaited: list[TimedCollective], operators: list[tuple[float, float]], step_end: float
) -> None:
    """Add the waits that C++ code has queued on a stream: after the last of the collectives that no Python code waited
    for, the stream's longest pause between two operators.

    A host that launches the next operator too late makes such a pause too.
    """
    if not unwaited:
        return
    last = max(unwaited, key=lambda timed: timed.entered)
    later = [(start, stop) for start, stop in operators if start >= last.entered]
    pauses = zip(later, [*later[1:], (step_end, step_end)], strict=True)
    free, resumed = max(((before[1], after[0]) for before, after in pauses), key=lambda pause: pause[1] - pause[0])
    last.exposed += max(0.0, resumed - free)
    last.done = resumed


def _ended(noted: list[Any]) -> None:
    noted[3] = time.perf_counter()
