"""The memory of a launch: tensors, each a buffer far from the others, and the shared memory of each block.

Every access is checked: its bytes have to belong to a tensor (or to the block's shared memory), be aligned, have been
written before they are read (shared memory), and not be in use by another thread that no barrier separates. Two threads
of a block are separated by a barrier that both have passed; threads of different blocks by nothing within a launch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oracles.ptx.program import PtxError

Threads = NDArray[np.int64]
"""Numbers of threads, counted through all blocks of the grid."""
Bytes = NDArray[np.uint8]

_BUFFER_BITS = 40
"""An address is the number of a buffer, and so many bits of a place in it: no shift leads from one to another."""
SHARED_BASE = 1024
"""Where a block's shared memory begins: the driver keeps what is before it."""
_NOBODY = -1


class Clock:
    """How many barriers each thread has passed, of its block and of its warp alone."""

    def __init__(self, blocks: int, threads: int) -> None:
        self.block = np.repeat(np.arange(blocks), threads)
        self.now = np.zeros(blocks * threads, np.int64)
        """The barriers of the block times 2^32, plus those of the warp."""

    def pass_barrier(self, threads: NDArray[Any]) -> None:
        self.now[threads] += 1 << 32

    def pass_warp_barrier(self, threads: Threads) -> None:
        self.now[threads] += 1


class Accesses:
    """The last accesses of each byte of a memory, to find two that nothing separates.

    Of readers one is kept, and how far apart those are that read since the last barrier between them: one thread, of
    one warp, of one block, or of several.
    """

    def __init__(self, name: str, size: int, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._writer, self._reader = np.full((2, size), _NOBODY, np.int64)
        self._written, self._read = np.zeros((2, size), np.int64)
        self._spread = np.zeros(size, np.int8)

    def reading(self, at: Threads, threads: Threads) -> None:
        """Note that threads read bytes, [threads, bytes]."""
        mine = np.broadcast_to(threads[:, None], at.shape)
        now = self._clock.now[mine]
        self._refuse(at, mine, self._writer[at], self._written[at], np.int8(0), "reads", "wrote")
        before, spread = self._reader[at], np.zeros(at.shape, np.int8)
        if (met := before != _NOBODY).any():
            again, threads, others = at[met], mine[met], before[met]
            wide = self._spread[again]
            forgotten = self._is_separated(threads, others, self._read[again], wide)
            spread[met] = np.where(forgotten, np.int8(0), np.maximum(wide, self._distance(threads, others)))
        self._reader[at], self._read[at], self._spread[at] = mine, now, spread
        last = self._reader[at]
        if (together := last != mine).any():
            # Threads that read one byte in one instruction: the last has been noted.
            distance = np.maximum(spread[together], self._distance(mine[together], last[together]))
            np.maximum.at(self._spread, at[together], distance)

    def writing(self, at: Threads, threads: Threads, changed: NDArray[np.bool_]) -> None:
        """Note that threads write bytes, some of which change: equal numbers may be written twice."""
        mine = np.broadcast_to(threads[:, None], at.shape)
        self._refuse(at, mine, self._reader[at], self._read[at], self._spread[at], "writes", "read")
        at, mine = at[changed], mine[changed]
        self._refuse(at, mine, self._writer[at], self._written[at], np.int8(0), "writes", "wrote")
        self._writer[at], self._written[at] = mine, self._clock.now[mine]

    def writer(self, at: Threads) -> Threads:
        """The thread that last wrote each place, or any where there is none."""
        return self._writer[at]

    def _distance(self, threads: Threads, others: Threads) -> NDArray[np.int8]:
        """0 of a thread from itself, 1 within a warp, 2 within a block, 3 between blocks."""
        blocks = self._clock.block
        apart = (threads != others).astype(np.int8) + (threads // 32 != others // 32)
        return apart + (blocks[threads] != blocks[others])

    def _is_separated(
        self, threads: Threads, others: Threads, then: Threads, spread: NDArray[np.int8] | np.int8
    ) -> NDArray[np.bool_]:
        """True where a barrier stands between what a thread does now and what others, so far apart, did then."""
        now = self._clock.now[threads]
        distance = np.maximum(self._distance(threads, others), spread)
        passed = np.where(distance <= 1, then != now, (then >> 32 != now >> 32) & (distance == 2))
        return passed | (distance == 0)

    def _refuse(
        self, at: Threads, mine: Threads, others: Threads, then: Threads, spread: Any, does: str, did: str
    ) -> None:
        """Fail where another thread did something to a byte, and nothing has separated the two since."""
        met = (others != _NOBODY) & ((others != mine) | (spread > 0))
        if not met.any():
            return
        at, mine, spread = at[met], mine[met], np.broadcast_to(spread, met.shape)[met]
        races = ~self._is_separated(mine, others[met], then[met], spread)
        if races.any():
            place = int(np.flatnonzero(races)[0])
            raise PtxError(
                f"race: thread {mine[place]} {does} place {at[place]} of {self._name}, which another thread "
                f"{did} without a barrier between them"
            )

    def refuse_collision(self) -> None:
        raise PtxError(f"race: two threads write different numbers to one place of {self._name} at once")


class _Buffer:
    """A tensor's storage, and which of its bytes belong to a tensor of the launch."""

    def __init__(self, tensor: Tensor, clock: Clock) -> None:
        storage = tensor.untyped_storage()
        self.bytes: Bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()  # pyright: ignore[reportArgumentType]
        self.belongs = np.zeros(len(self.bytes), np.bool_)
        self.accesses = Accesses("a tensor", len(self.bytes), clock)

    def add(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        place = np.full(1, tensor.storage_offset(), np.int64)
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            place = (place[:, None] + np.arange(length) * stride).ravel()
        whole = len(self.belongs) // size * size
        self.belongs[:whole].reshape(-1, size)[place] = True


class GlobalMemory:
    """The tensors of a launch, and those whose addresses it finds in one of its tensors.

    What a kernel loads as 64 bits that are an address of a tensor in the host's memory becomes its address here.
    """

    def __init__(self, tensors: Iterable[Tensor], clock: Clock) -> None:
        self._places: dict[int, int] = {}
        self._buffers: list[_Buffer] = []
        for tensor in tensors:
            if tensor.numel():
                start = tensor.untyped_storage().data_ptr()
                if start not in self._places:
                    self._places[start] = len(self._buffers)
                    self._buffers.append(_Buffer(tensor, clock))
                self._buffers[self._places[start]].add(tensor)

    def address(self, tensor: Tensor) -> int:
        """The kernel's pointer to a tensor, as aligned as it is in the host's memory."""
        start = tensor.untyped_storage().data_ptr()
        if start not in self._places:
            return 0
        return (self._places[start] + 1 << _BUFFER_BITS) + start % 256 + tensor.data_ptr() - start

    def load(self, addresses: Threads, threads: Threads, size: int) -> Bytes:
        """The bytes of each thread: [threads, size]."""
        found = np.empty((len(threads), size), np.uint8)
        for buffer, rows, at in self._located(addresses, threads, size, "reads"):
            buffer.accesses.reading(at, threads[rows])
            found[rows] = buffer.bytes[at]
        if not size % 8:
            words = found.view(np.int64)
            for number, buffer in enumerate(self._buffers):
                start = buffer.bytes.ctypes.data
                inside = (words >= start) & (words < start + len(buffer.bytes))
                words[inside] += (number + 1 << _BUFFER_BITS) + start % 256 - start
        return found

    def store(self, addresses: Threads, threads: Threads, data: Bytes) -> None:
        for buffer, rows, at in self._located(addresses, threads, data.shape[1], "writes"):
            write(buffer.bytes, buffer.accesses, at, threads[rows], data[rows])

    def _located(
        self, addresses: Threads, threads: Threads, size: int, does: str
    ) -> Iterable[tuple[_Buffer, Threads, Threads]]:
        check_alignment(addresses, size, does)
        numbers = (addresses >> _BUFFER_BITS) - 1
        for number in np.unique(numbers):
            rows = np.flatnonzero(numbers == number)
            if not 0 <= number < len(self._buffers):
                raise PtxError(f"thread {threads[rows[0]]} {does} address {addresses[rows[0]]:#x}, where no tensor is")
            buffer = self._buffers[number]
            start = buffer.bytes.ctypes.data % 256
            at = (addresses[rows] & (1 << _BUFFER_BITS) - 1)[:, None] - start + np.arange(size)
            inside = (at >= 0) & (at < len(buffer.bytes))
            outside = ~(inside & buffer.belongs[np.where(inside, at, 0)])
            if outside.any():
                row, column = np.argwhere(outside)[0]
                raise PtxError(
                    f"thread {threads[rows[row]]} {does} byte {at[row, column]} of a storage of {len(buffer.bytes)} "
                    "bytes, which belongs to no tensor of the launch"
                )
            yield buffer, rows, at


def write(memory: NDArray[Any], accesses: Accesses, at: Threads, threads: Threads, data: NDArray[Any]) -> None:
    """Write after a check; two threads may write the same number to one place, but not two."""
    accesses.writing(at, threads, memory[at] != data)
    memory[at] = data
    if (memory[at] != data).any():
        accesses.refuse_collision()


def check_alignment(addresses: Threads, size: int, does: str) -> None:
    if (misaligned := addresses[addresses % size != 0]).size:
        raise PtxError(f"a thread {does} {size} bytes at {misaligned[0]:#x}, which is not a multiple of {size}")


@dataclass(frozen=True)
class _Copy:
    """An asynchronous copy on its way: the threads that began it, its place and bytes, and its group in each thread."""

    threads: Threads
    at: Threads
    data: NDArray[Any]
    group: Threads


class SharedMemory:
    """The shared memory of all blocks, one after the other, in units that no access divides."""

    def __init__(self, size: int, unit: int, clock: Clock) -> None:
        self._unit = unit
        self._size = -(-size // unit)
        units = int(clock.block[-1] + 1) * self._size
        self._numbers = np.zeros(units, f"u{unit}")
        self._clock = clock
        self._ready, self._on_its_way = np.zeros((2, units), np.bool_)
        self._accesses = Accesses("shared memory", units, clock)
        self._copies: list[_Copy] = []
        self._read_by = np.full(units, -1, np.int64)
        """The last group of wgmma's products that reads each unit."""
        self._done = 0
        self._written, self._fenced = np.zeros(units, np.int64), np.zeros(len(clock.block), np.int64)
        """When each unit was written, and when each thread has made what it sees visible to products."""
        self._time = 0
        self._committed = np.zeros(len(clock.block), np.int64)

    def load(self, addresses: Threads, threads: Threads, size: int) -> Bytes:
        """The bytes of each thread: [threads, size]."""
        at = self._located(addresses, threads, size, "reads")
        self._refuse(at, threads, ~self._ready[at], "reads", "which nothing wrote")
        self._accesses.reading(at, threads)
        return self._numbers[at].view(np.uint8)

    def store(self, addresses: Threads, threads: Threads, data: Bytes) -> None:
        at = self._located(addresses, threads, data.shape[1], "writes")
        self._write(at, threads, data.view(self._numbers.dtype))

    def load_for_product(self, addresses: Threads, threads: Threads, size: int, group: int) -> Bytes:
        """What a product of a group reads: since it was written its writer or this thread must have passed a fence."""
        at = self._located(addresses, threads, size, "multiplies")
        fenced = np.maximum(self._fenced[self._accesses.writer(at)], self._fenced[threads][:, None])
        self._refuse(at, threads, self._ready[at] & (fenced < self._written[at]), "multiplies", "without a fence")
        self._read_by[at] = group
        return self.load(addresses, threads, size)

    def fence(self, threads: Threads) -> None:
        """fence.proxy.async"""
        self._time += 1
        self._fenced[threads] = self._time

    def release(self, done: int) -> None:
        """What products of the groups before one have read may be written again."""
        self._done = done

    def _write(self, at: Threads, threads: Threads, data: NDArray[Any]) -> None:
        write(self._numbers, self._accesses, at, threads, data)
        self._ready[at] = True
        self._time += 1
        self._written[at] = self._time

    def begin_copy(self, addresses: Threads, threads: Threads, data: Bytes) -> None:
        """cp.async: the bytes arrive no later than the thread waits for their group, and until then nobody may look."""
        at = self._located(addresses, threads, data.shape[1], "copies to")
        self._accesses.writing(at, threads, np.ones(at.shape, np.bool_))
        self._on_its_way[at] = True
        self._copies.append(_Copy(threads, at, data.view(self._numbers.dtype), self._committed[threads]))

    def commit(self, threads: Threads) -> None:
        self._committed[threads] += 1

    def wait(self, threads: Threads, pending: int) -> None:
        """Let the copies of each thread's groups arrive, but for the last `pending` ones."""
        waits = np.zeros(len(self._committed), np.bool_)
        waits[threads] = True
        left: list[_Copy] = []
        for copy in self._copies:
            arrives = waits[copy.threads] & (copy.group < self._committed[copy.threads] - pending)
            at = copy.at[arrives]
            self._on_its_way[at] = False
            self._write(at, copy.threads[arrives], copy.data[arrives])
            if not arrives.all():
                kept = ~arrives
                left.append(_Copy(copy.threads[kept], copy.at[kept], copy.data[kept], copy.group[kept]))
        self._copies = left

    def _located(self, addresses: Threads, threads: Threads, size: int, does: str) -> Threads:
        check_alignment(addresses, size, does)
        at = (addresses - SHARED_BASE)[:, None] // self._unit + np.arange(size // self._unit)
        self._refuse(at, threads, (at < 0) | (at >= self._size), does, "which is beyond the block's")
        at += self._clock.block[threads][:, None] * self._size
        self._refuse(at, threads, self._on_its_way[at], does, "to which an asynchronous copy is on its way")
        if does in ("writes", "copies to"):
            self._refuse(at, threads, self._read_by[at] >= self._done, does, "which a product reads")
        return at

    def _refuse(self, at: Threads, threads: Threads, wrong: NDArray[np.bool_], does: str, why: str) -> None:
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise PtxError(f"thread {threads[row]} {does} byte {at[row, column] * self._unit} of shared memory, {why}")
