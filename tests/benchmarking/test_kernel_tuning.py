"""How the fastest tile is looked for: by halving and doubling, with a timer that is passed in."""

import math

import pytest

from napkin.benchmarking.kernel_tuning import LIMITS, fastest_tile
from napkin.kernels.triton_tiles import AttentionTile, ProductTile, Tile

BEST = AttentionTile(64, 128, 4, 2)


def distance(tile: Tile) -> float:
    """Seconds that grow with the number of doublings between a tile and the best."""
    assert isinstance(tile, AttentionTile)
    sizes = zip((tile.queries, tile.keys, tile.warps), (BEST.queries, BEST.keys, BEST.warps), strict=True)
    return 1.0 + sum(abs(math.log2(mine / best)) for mine, best in sizes) + abs(tile.stages - BEST.stages)


@pytest.mark.parametrize("default", [AttentionTile(16, 16, 16, 1), AttentionTile(256, 256, 1, 5), BEST], ids=str)
def test_a_valley_is_walked_down_to_its_end_and_no_tile_timed_twice(default: AttentionTile) -> None:
    timed: list[Tile] = []

    def seconds_of(tile: Tile) -> float:
        timed.append(tile)
        return distance(tile)

    assert fastest_tile(default, seconds_of) == (BEST, 1.0, distance(default))
    assert len(timed) == len(set(timed))


def test_tiles_that_do_not_run_are_never_chosen_and_sizes_keep_their_limits() -> None:
    timed: list[Tile] = []

    def seconds_of(tile: Tile) -> float:
        assert isinstance(tile, ProductTile)
        timed.append(tile)
        return math.inf if tile.rows * tile.columns > 2**12 else 1 / (tile.rows * tile.columns * tile.depth)

    best, seconds, _ = fastest_tile(ProductTile(16, 16, 16, 4, 3), seconds_of)
    assert isinstance(best, ProductTile)
    assert (best.rows * best.columns, best.depth) == (2**12, LIMITS["depth"][1])
    assert math.isfinite(seconds)
    for tile in timed:
        assert isinstance(tile, ProductTile)
        assert all(LIMITS[name][0] <= getattr(tile, name) <= LIMITS[name][1] for name in LIMITS if hasattr(tile, name))


def test_a_default_that_does_not_run_is_left_for_one_that_does() -> None:
    def seconds_of(tile: Tile) -> float:
        assert isinstance(tile, AttentionTile)
        return math.inf if tile.queries > 64 else 1.0

    best, seconds, default_seconds = fastest_tile(AttentionTile(128, 64, 4, 3), seconds_of)
    assert isinstance(best, AttentionTile)
    assert (best.queries, seconds, default_seconds) == (64, 1.0, math.inf)


def test_a_gain_within_the_noise_changes_nothing() -> None:
    default = AttentionTile(64, 64, 4, 2)
    assert fastest_tile(default, lambda tile: 1.0 if tile == default else 0.99)[0] == default
