"""Ranks that communicate through torch.distributed: gloo between CPUs, NCCL between GPUs.

Collectives on activations have gradients: torch's functional ones, whose result is waited for at once.
"""

import datetime
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.rendezvous import rendezvous

from napkin.distributed.ranks import RankInfo, Ranks
from napkin.errors import NapkinError, first_line
from napkin.kernels.operators import in_autocast_dtype

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ProcessGroupRanks(Ranks):
    """The ranks of a process group; by default torch's own default group.

    Values are sent as JSON in tensors: torch's functions for objects would unpickle what they receive.
    """

    def __init__(self, info: RankInfo, limit: datetime.timedelta, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(info)
        self._limit = limit
        self._group = group

    def separate_group(self) -> "ProcessGroupRanks":
        group = dist.new_group(backend="gloo", timeout=self._limit)
        assert isinstance(group, dist.ProcessGroup)
        return ProcessGroupRanks(self.info, self._limit, group)

    def broadcast_from_zero(self, make: Callable[[], Any]) -> Any:
        """Rank 0 runs `make` and broadcasts the result; if it raises, the other ranks exit silently."""
        if not self.is_rank_zero:
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

    def all_gather(self, value: Any) -> list[Any]:
        data = _bytes(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), self._group)
        # all_gather needs tensors of equal size.
        room = max(int(size) for size in sizes)
        padded = torch.zeros(room, dtype=torch.uint8)
        padded[: len(data)] = data
        gathered = [torch.zeros(room, dtype=torch.uint8) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded, self._group)
        return [_value(each[: int(size)]) for each, size in zip(gathered, sizes, strict=True)]

    def all_reduce_max(self, number: int) -> int:
        tensor = torch.tensor(number)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group)
        return int(tensor)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._group)
        return total

    def _broadcast(self, value: Any) -> Any:
        data = _bytes(value)
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, self._group)
        if not self.is_rank_zero:
            data = torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, self._group)
        return _value(data)


@contextmanager
def join(info: RankInfo, *, device: Literal["auto", "cpu", "cuda"], timeout: float) -> Iterator[ProcessGroupRanks]:
    """Join the process group that torchrun has prepared, and leave it when all ranks have reached the end of the block.

    Where this machine has GPUs and `device` allows it, each rank uses its own GPU. Raises NapkinError where there are
    fewer GPUs than ranks, and where another rank has exited or does not answer for `timeout` seconds.
    """
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        if info.local_rank >= torch.cuda.device_count():
            raise NapkinError(
                f"rank {info.rank} needs GPU {info.local_rank} of this machine, which has "
                f"{torch.cuda.device_count()}: start one rank per GPU, --nproc-per-node {torch.cuda.device_count()}, "
                "or train with --training.device cpu"
            )
        torch.cuda.set_device(info.local_rank)
        backend = "cpu:gloo,cuda:nccl"
        record_flights(os.environ)
    with _in_one_line(info, timeout):
        limit = datetime.timedelta(seconds=timeout)
        store, _, _ = next(rendezvous("env://", info.rank, info.world_size, timeout=limit))
        # torchrun may keep its store through restarts, with the addresses of processes that have exited.
        store = PrefixStore(f"napkin restart {info.restart_count}", store)
        dist.init_process_group(backend, store=store, rank=info.rank, world_size=info.world_size, timeout=limit)
        # Groups made later, as those of a device mesh, would wait for 30 minutes.
        distributed_c10d.default_pg_timeout = limit
        distributed_c10d.default_pg_nccl_timeout = limit  # pyright: ignore[reportPrivateImportUsage]
        yield ProcessGroupRanks(info, limit)
        # If a rank exited early, torchrun would terminate ranks that are still writing.
        dist.all_reduce(torch.zeros(1))
        dist.destroy_process_group()


def record_flights(environment: MutableMapping[str, str]) -> None:
    """Switch on torch's flight recorder, which keeps the last collectives of NCCL, and writes them to a file per rank
    where one of them hangs; what the user has set stays."""
    environment.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
    environment.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    job = f"napkin-flight-{os.getuid()}-{environment.get('MASTER_PORT', '')}-rank-"
    environment.setdefault(_DUMP, str(Path(tempfile.gettempdir()) / job))


_DUMP = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"


def flight_dump(environment: Mapping[str, str], rank: int, since: float) -> str:
    """For an error message: the file of a rank's last collectives that the flight recorder wrote after `since`, in
    seconds of `time.time`; "" if there is none."""
    path = Path(f"{environment.get(_DUMP, '')}{rank}")
    with suppress(OSError):
        if _DUMP in environment and path.stat().st_mtime >= since:
            return (
                f"; its last collectives are in '{path}': `python -m torch.distributed.flight_recorder.fr_trace "
                f"--prefix {path.name.removesuffix(str(rank))} {path.parent}` compares those of all ranks"
            )
    return ""


@contextmanager
def _in_one_line(info: RankInfo, timeout: float) -> Iterator[None]:
    """Errors of this rank name it; the loss of another rank is reported in one line, without a traceback."""
    since = time.time()
    try:
        yield
    except NapkinError as error:
        raise type(error)(f"{error} (rank {info.rank})") from error
    except RuntimeError as error:
        # A collective operation whose other ranks did not answer; gloo's message begins with a location in its source.
        if not isinstance(error, dist.DistError) and "gloo" not in str(error).lower():
            raise
        reason = first_line(error).rpartition("] ")[2][:200]
        raise NapkinError(
            f"rank {info.rank} has lost another rank, or had no answer from it in {timeout:.0f} s ({reason}): the last "
            "message of that rank is the cause; the run continues from its newest "
            f"checkpoint, with `napkin resume` or torchrun's --max-restarts{flight_dump(os.environ, info.rank, since)}"
        ) from error


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(data: Tensor) -> Any:
    return json.loads(bytes(data.tolist()))


# Each rank's use of a gathered tensor contributes a summand of its gradient: the backward pass of a gather adds up the
# summands and scatters the sum, that of a scatter gathers.

# The operators, and not the functions around them: these return a tensor that waits at its first use, of a class of its
# own, from which no gradient comes where it is a view (for a batch of 1).
_operators = torch.ops._c10d_functional


def all_gather(part: Tensor, dim: int, group: "ProcessGroup") -> Tensor:
    """The ranks' parts, of one shape, joined along a dimension. The backward pass reduce-scatters the gradient."""
    size = group.size()
    joined = wait_tensor(_operators.all_gather_into_tensor(part.contiguous(), size, group.group_name))
    return torch.cat(joined.chunk(size), dim=dim) if dim else joined


def reduce_scatter(summand: Tensor, dim: int, group: "ProcessGroup") -> Tensor:
    """This rank's part, along a dimension that divides evenly, of the sum of the ranks' tensors. The backward pass
    all-gathers the gradient."""
    size = group.size()
    parts = torch.cat(summand.chunk(size, dim=dim)) if dim else summand.contiguous()
    return wait_tensor(_operators.reduce_scatter_tensor(parts, "sum", size, group.group_name))


def all_reduce(summand: Tensor, group: "ProcessGroup", how: str = "sum") -> Tensor:
    """The sum (or "max") of the ranks' tensors. The backward pass of a sum adds up the ranks' gradients."""
    return wait_tensor(_operators.all_reduce(summand.contiguous(), how, group.group_name))


def all_to_all(rows: Tensor, sent: list[int], received: list[int], group: "ProcessGroup") -> Tensor:
    """The rows that the ranks send to this one, in their order: `sent` and `received` are how many, by rank. The
    backward pass sends the gradients back."""
    return wait_tensor(_operators.all_to_all_single(rows.contiguous(), received, sent, group.group_name))


def all_reduce_together(summands: list[Tensor], group: "ProcessGroup") -> list[Tensor]:
    """The sums of the ranks' tensors, which are sent at once. Without gradients."""
    return [wait_tensor(each) for each in _operators.all_reduce_coalesced(summands, "sum", group.group_name)]


def in_products_dtype(x: Tensor) -> Tensor:
    """x as autocast's matrix products take it: what is cast before it is sent has fewer bytes."""
    return in_autocast_dtype(x)[0]
