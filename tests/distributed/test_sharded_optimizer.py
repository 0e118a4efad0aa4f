"""Parameters are divided among ranks by their sizes."""

import random

from napkin.distributed.sharding import balanced


def test_parts_are_similar_and_the_first_is_the_largest() -> None:
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.randint(1, 1000) for _ in range(draw.randint(1, 40))]
        parts = draw.randint(1, 9)
        part_of = balanced(sizes, parts)
        totals = [sum(size for size, at in zip(sizes, part_of, strict=True) if at == part) for part in range(parts)]
        assert sum(totals) == sum(sizes)
        assert totals[0] == max(totals)
        # What any order reaches (Graham 1966).
        assert max(totals) <= sum(sizes) / parts + (1 - 1 / parts) * max(sizes)
