from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.accounting.cuda.caching_allocator import Block, CachingAllocator, replay, rounded, segment_bytes
from oracles.naive_caching_allocator import NaiveCachingAllocator

KIB, MIB = 2**10, 2**20

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, MIB),
    st.integers(MIB - 1024, 3 * MIB),
    st.integers(MIB, 12 * MIB),
    st.sampled_from([512, 513, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB, 20 * MIB]),
)
REQUESTS = st.lists(st.one_of(SIZES, st.integers(-30, -1)), max_size=40)
"""A size asks for a block, a negative number gives back one of those in use."""


def _played(requests: list[int]) -> tuple[CachingAllocator, NaiveCachingAllocator, dict[int, Block]]:
    allocator, naive = CachingAllocator(), NaiveCachingAllocator()
    blocks: dict[int, Block] = {}
    for number, request in enumerate(requests):
        if request > 0:
            blocks[number] = allocator.malloc(request)
            naive.malloc(number, request)
        elif blocks:
            freed = list(blocks)[request % len(blocks)]
            allocator.free(blocks.pop(freed))
            naive.free(freed)
    return allocator, naive, blocks


@settings(max_examples=80)
@given(REQUESTS)
def test_each_request_gets_the_block_that_a_search_of_all_cells_finds(requests: list[int]):
    allocator, naive, blocks = _played(requests)
    numbers = {block.address: number for number, block in blocks.items()}
    segments: list[list[tuple[int, int | None]]] = []
    for block in allocator.blocks():
        if block.before is None:
            segments.append([])
        segments[-1].append((block.size, numbers[block.address] if block.in_use else None))
    assert segments == [segment.layout() for segment in naive.segments]
    assert allocator.reserved_bytes == sum(segment.size for segment in naive.segments)


@settings(max_examples=80)
@given(REQUESTS)
def test_blocks_never_overlap_and_fill_their_segments(requests: list[int]):
    allocator, _, blocks = _played(requests)
    by_address = sorted(allocator.blocks(), key=lambda block: block.address)
    assert all(low.address + low.size <= high.address for low, high in pairwise(by_address))
    assert sum(block.size for block in by_address) == allocator.reserved_bytes
    assert sum(block.size for block in blocks.values()) == allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.reserved_bytes % (2 * MIB) == 0
    assert all(block.size % 512 == 0 and block.in_use for block in blocks.values())
    # No two free neighbours, or they would have been joined.
    assert all(low.in_use or high.in_use for low, high in pairwise(by_address) if low.after is high)


@given(REQUESTS)
def test_what_is_reserved_never_falls_and_is_there_again_when_all_is_given_back(requests: list[int]):
    allocator, _, blocks = _played(requests)
    before = allocator.reserved_bytes
    for block in blocks.values():
        allocator.free(block)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, before)
    assert len(list(allocator.blocks())) == len(allocator.segments)


@pytest.mark.parametrize(
    ("size", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        # cuBLAS's workspace.
        (8_519_680, 8_519_680, 20 * MIB),
    ],
)
def test_requests_are_rounded_and_served_from_segments(size: int, block: int, segment: int):
    assert (rounded(size), segment_bytes(rounded(size))) == (block, segment)


def test_a_step_by_hand():
    allocator = CachingAllocator()
    three, four = allocator.malloc(3 * MIB), allocator.malloc(4 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    # 13 MiB are left in the segment, too few for 15.
    fifteen = allocator.malloc(15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB + 16 * MIB
    # 1 MiB more than was asked for is not worth splitting off, 512 bytes more than that are.
    assert fifteen.size == 16 * MIB
    allocator.free(fifteen)
    assert allocator.malloc(15 * MIB - 512).size == 15 * MIB - 512

    allocator.free(three)
    # The smallest stretch that fits is where three was.
    again = allocator.malloc(2 * MIB + 512)
    assert (again.address, again.size) == (three.address, 3 * MIB)
    allocator.free(again)
    allocator.free(four)
    # Three, four and the rest are one again.
    assert allocator.malloc(20 * MIB).address == three.address
    assert allocator.reserved_bytes == 36 * MIB

    small = [allocator.malloc(MIB) for _ in range(3)]
    assert allocator.reserved_bytes == 36 * MIB + 2 * 2 * MIB
    allocator.free(small[1])
    # The small pool splits off whatever 512 bytes are left; the large one is never served from it.
    assert allocator.malloc(MIB - 512).size == MIB - 512
    allocator.malloc(512)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_replay_tells_the_size_of_each_requests_block():
    played = replay([(0, 100), (2, 15 * MIB), (0, -100), (3, 0), (1, 300)], 4)
    assert (played.block_bytes, played.reserved_bytes) == ([512, 512, 16 * MIB, 0], 18 * MIB)
