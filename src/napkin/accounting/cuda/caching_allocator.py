"""CUDA's caching allocator in plain Python: the memory that torch reserves on a GPU for the requests of a step.

A request is rounded up to 512 bytes and served from one of two pools; the small one is for up to 1 MiB. The smallest
free block that is large enough is taken, and split if the remainder is worth keeping. If there is none, the driver
allocates a new segment. A freed block is merged with free neighbours of its segment and kept for later requests. A
segment is returned to the driver only when memory runs out, which is not modelled: reserved memory never shrinks.

Modelled after c10/cuda/CUDACachingAllocator.cpp of torch 2.13, with its default settings, on one stream.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import no_type_check

MIB = 2**20

ROUNDING = 512
LARGEST_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
SHARED_LARGE_SEGMENT = 20 * MIB
"""The segment for requests above 1 MiB and below 10 MiB."""
LEAST_OWN_SEGMENT = 10 * MIB
SEGMENT_ROUNDING = 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """A range of a segment, in use or free."""

    address: int
    size: int
    small: bool
    """True if it belongs to the small pool."""
    in_use: bool = True
    before: "Block | None" = field(default=None, repr=False)
    """Neighbour in the segment at the lower address."""
    after: "Block | None" = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Replay:
    """The blocks and segments that served a sequence of requests."""

    block_bytes: list[int]
    """Size of each request's block, by the request's number."""
    reserved_bytes: int


# Runs for every allocation of a step: the type checks that are on during tests would take most of the time.
@no_type_check
class CachingAllocator:
    """Serves requests as torch does on a CUDA device.

    >>> allocator = CachingAllocator()
    >>> block = allocator.malloc(1000)
    >>> block.size, allocator.allocated_bytes, allocator.reserved_bytes
    (1024, 1024, 2097152)
    >>> allocator.free(block)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (0, 2097152)
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        """Bytes of blocks in use, as torch.cuda.memory_allocated counts them."""
        self.reserved_bytes = 0
        """Bytes of segments, as torch.cuda.memory_reserved counts them."""
        self.segments: list[Block] = []
        """The block at the lowest address of each segment, in order of allocation."""
        # Free blocks of the large and of the small pool: sorted keys (size, address), and the block at each address.
        self._keys: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._free: dict[int, Block] = {}
        self._end = 0

    def malloc(self, size: int) -> Block:
        """The block that serves a request of `size` bytes, 1 or more."""
        size = rounded(size)
        block = self._best_fit(size) or self._new_segment(size)
        rest = block.size - size
        if rest >= ROUNDING if block.small else rest > LARGEST_SMALL:
            self._split(block, size)
        block.in_use = True
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """Free a block, and merge it with the free blocks next to it."""
        self.allocated_bytes -= block.size
        block.in_use = False
        for neighbour in (block.before, block.after):
            if neighbour is not None and not neighbour.in_use:
                self._remove(neighbour)
                block = self._join(block, neighbour)
        self._add(block)

    def blocks(self) -> Iterator[Block]:
        """All blocks, in use and free, segment by segment and by address."""
        for first in self.segments:
            block: Block | None = first
            while block is not None:
                yield block
                block = block.after

    def _best_fit(self, size: int) -> Block | None:
        keys = self._keys[size <= LARGEST_SMALL]
        index = bisect_left(keys, (size, 0))
        return self._free.pop(keys.pop(index)[1]) if index < len(keys) else None

    def _new_segment(self, size: int) -> Block:
        block = Block(self._end, segment_bytes(size), size <= LARGEST_SMALL)
        # Segments are not adjacent: the driver guarantees nothing about their addresses.
        self._end += block.size + SEGMENT_ROUNDING
        self.reserved_bytes += block.size
        self.segments.append(block)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(
            block.address + size, block.size - size, block.small, in_use=False, before=block, after=block.after
        )
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._add(rest)

    def _join(self, one: Block, other: Block) -> Block:
        low, high = (one, other) if one.address < other.address else (other, one)
        low.size += high.size
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        return low

    def _add(self, block: Block) -> None:
        insort(self._keys[block.small], (block.size, block.address))
        self._free[block.address] = block

    def _remove(self, block: Block) -> None:
        keys = self._keys[block.small]
        del keys[bisect_left(keys, (block.size, block.address))]
        del self._free[block.address]


@no_type_check
def replay(events: Iterable[tuple[int, int]], n_requests: int) -> Replay:
    """Replay events in order: (number of the request, bytes; negative when they are freed).

    A request of 0 bytes gets no block.
    """
    allocator = CachingAllocator()
    block_bytes = [0] * n_requests
    blocks: dict[int, Block] = {}
    for number, change in events:
        if change > 0:
            blocks[number] = block = allocator.malloc(change)
            block_bytes[number] = block.size
        elif change < 0:
            allocator.free(blocks.pop(number))
    return Replay(block_bytes, allocator.reserved_bytes)


def rounded(size: int) -> int:
    """Bytes that a request of `size` bytes is rounded up to."""
    return max(-(-size // ROUNDING), 1) * ROUNDING


def segment_bytes(size: int) -> int:
    """Bytes of the segment that is allocated for a rounded request if no free block is large enough."""
    if size <= LARGEST_SMALL:
        return SMALL_SEGMENT
    if size < LEAST_OWN_SEGMENT:
        return SHARED_LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
