"""Ranks that talk through torch.distributed: gloo between CPUs, NCCL between GPUs."""

import datetime
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from napkin.distributed.ranks import Place, Ranks
from napkin.errors import NapkinError, first_line


class JoinedRanks(Ranks):
    """The ranks of a process group, by default that of all that they do.

    What is agreed on travels as JSON in tensors: torch's own functions for objects would unpickle what they are sent.
    """

    def __init__(self, place: Place, limit: datetime.timedelta, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(place)
        self._limit = limit
        self._group = group

    def apart(self) -> "JoinedRanks":
        """The same ranks on a line of their own: what a thread says there does not cross what the others say."""
        group = dist.new_group(backend="gloo", timeout=self._limit)
        assert isinstance(group, dist.ProcessGroup)
        return JoinedRanks(self.place, self._limit, group)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What the first rank makes; an error there is raised there, and ends the others without a word."""
        if not self.is_first:
            answer = self._broadcast({})
            if "value" not in answer:
                raise SystemExit(2)
            return answer["value"]
        try:
            value = make()
        except BaseException:
            self._broadcast({"failed": True})
            raise
        return self._broadcast({"value": value})["value"]

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        data = _bytes(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), self._group)
        # Each takes as much room as the longest.
        room = max(int(size) for size in sizes)
        padded = torch.zeros(room, dtype=torch.uint8)
        padded[: len(data)] = data
        gathered = [torch.zeros(room, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(gathered, padded, self._group)
        return [_value(each[: int(size)]) for each, size in zip(gathered, sizes, strict=True)]

    def most(self, number: int) -> int:
        """The largest of everybody's numbers."""
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group)
        return int(tensor)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of everybody's tensors."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total

    def _broadcast(self, value: Any) -> Any:
        data = _bytes(value)
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, self._group)
        if not self.is_first:
            data = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, self._group)
        return _value(data)


@contextmanager
def join(place: Place, *, device: Literal["auto", "cpu", "cuda"], timeout: float) -> Iterator[JoinedRanks]:
    """Make the process group that torchrun has prepared, and leave it when all have come to the block's end.

    Where this machine has GPUs and `device` allows, each rank works on its own. Raises NapkinError where there are
    fewer GPUs than ranks, and where another rank is gone or silent for `timeout` seconds.
    """
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        if place.local_rank >= torch.cuda.device_count():
            raise NapkinError(
                f"rank {place.rank} is number {place.local_rank} on this machine, which has "
                f"{torch.cuda.device_count()} GPUs: start as many ranks, --nproc-per-node {torch.cuda.device_count()}, "
                "or train with --training.device cpu"
            )
        torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    with _told_in_a_line(place, timeout):
        limit = datetime.timedelta(seconds=timeout)
        store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=limit))
        # torchrun may keep its store through restarts, with the addresses of processes that are gone.
        store = PrefixStore(f"napkin attempt {place.attempt}", store)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=limit)
        yield JoinedRanks(place, limit)
        # A rank that ends early would have torchrun end those that still write.
        dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()


@contextmanager
def _told_in_a_line(place: Place, timeout: float) -> Iterator[None]:
    """Errors of this rank begin with its number; that another one is gone is told without a traceback."""
    try:
        yield
    except NapkinError as error:
        raise type(error)(f"{error} (rank {place.rank})") from error
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise NapkinError(
            f"rank {place.rank} has lost another rank, or had no answer from it in {timeout:.0f} s "
            f"({_of_gloo(error)}): what that rank has said last is the cause; the run goes on from its newest "
            "checkpoint, with `napkin resume` or torchrun's --max-restarts"
        ) from error


def is_lost_rank(error: RuntimeError) -> bool:
    """Whether an error says that a collective operation had no partner."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _of_gloo(error: Exception) -> str:
    # It begins with the place in its own source.
    return first_line(error).rpartition("] ")[2][:200]


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(data: Tensor) -> Any:
    return json.loads(bytes(data.tolist()))
