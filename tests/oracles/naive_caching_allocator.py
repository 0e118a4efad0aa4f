"""CUDA's caching allocator once more, as plainly as can be.

A segment remembers where the blocks in use lie and nothing else: what is free between them is found anew for each
request, in all segments from end to end.
"""

from dataclasses import dataclass, field


@dataclass
class Segment:
    """`used` has the first byte, the end and the request's number of each block in use."""

    small: bool
    size: int
    used: list[tuple[int, int, int]] = field(default_factory=list)

    def layout(self) -> list[tuple[int, int | None]]:
        """(bytes, request's number or None) of each stretch, from end to end."""
        stretches: list[tuple[int, int | None]] = []
        end = 0
        for begin, next_end, number in [*sorted(self.used), (self.size, self.size, -1)]:
            stretches += [(begin - end, None), (next_end - begin, number)]
            end = next_end
        return [(size, number) for size, number in stretches if size]


class NaiveCachingAllocator:
    """Serves numbered requests."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def malloc(self, number: int, size: int) -> None:
        """Serve a request from the smallest free stretch that holds it, the earliest among equals."""
        while size % 512:
            size += 1
        small = size <= 2**20
        fits = []
        for place, segment in enumerate(self.segments):
            begin = 0
            for length, holder in segment.layout():
                if holder is None and length >= size and segment.small == small:
                    fits.append((length, place, begin))
                begin += length
        if not fits:
            self.segments.append(Segment(small, _segment_size(size)))
            fits = [(self.segments[-1].size, len(self.segments) - 1, 0)]
        length, place, begin = min(fits)
        if not small and length - size <= 2**20:
            size = length
        self.segments[place].used.append((begin, begin + size, number))

    def free(self, number: int) -> None:
        """Forget the request's block."""
        for segment in self.segments:
            segment.used = [block for block in segment.used if block[2] != number]


def _segment_size(size: int) -> int:
    if size <= 2**20:
        return 2 * 2**20
    if size < 10 * 2**20:
        return 20 * 2**20
    while size % (2 * 2**20):
        size += 512
    return size
