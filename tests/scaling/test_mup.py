"""µP: coordinates that do not depend on the width, where those of plain layers do; best rates that a parabola has."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from napkin.errors import NapkinError
from napkin.recipe.recipe import Recipe
from napkin.scaling.mup import check_coordinates, curves, transfer, transfer_trials, widened
from napkin.scaling.sweep import Sweep
from oracles.tiny_run import tiny_recipe, write_tiny_text


@pytest.fixture
def base(tmp_path: Path) -> Recipe:
    write_tiny_text(tmp_path)
    return tiny_recipe(tmp_path, steps=4)


@pytest.mark.parametrize("tied", [False, True])
def test_changes_of_activations_depend_on_the_width_without_multipliers_alone(base: Recipe, tied: bool) -> None:
    model = dataclasses.replace(base.model, d_model=32, n_heads=2, tie_embeddings=tied)
    optimizer = dataclasses.replace(base.optimizer, learning_rate=2e-3)
    base = dataclasses.replace(base, model=model, optimizer=optimizer)
    checks = [check_coordinates([widened(base, width, mup=mup) for width in (32, 128)]) for mup in (True, False)]
    assert [check.holds for check in checks] == [True, False]
    assert set(checks[0].changes) == {*(f"block {n}" for n in range(base.model.n_layers)), "logits"}
    # The base is the same model either way.
    for part, changes in checks[0].changes.items():
        assert changes[0] == pytest.approx(checks[1].changes[part][0], rel=1e-5)


def test_a_recipe_is_widened_by_heads_of_the_same_width(base: Recipe) -> None:
    model = dataclasses.replace(base.model, d_model=32, n_heads=4, n_kv_heads=2, d_ff=48)
    wide = widened(dataclasses.replace(base, model=model), 96).model
    assert (wide.n_heads, wide.resolved_n_kv_heads, wide.resolved_head_dim, wide.d_ff) == (12, 6, 8, 144)
    assert wide.mup_base_d_model == 32
    assert widened(dataclasses.replace(base, model=wide), 192).model.mup_base_d_model == 32
    for width, complaint in ((36, "not a multiple of head_dim 8"), (24, "3 heads, which 2 queries per key")):
        with pytest.raises(NapkinError, match=complaint):
            widened(dataclasses.replace(base, model=model), width)


def test_the_best_rate_is_the_vertex_of_the_parabola_and_an_edge_is_told() -> None:
    def losses(vertex: float) -> list[tuple[float, float]]:
        return [(rate, 2 + 0.1 * math.log(rate / vertex) ** 2) for rate in np.geomspace(1e-4, 1e-1, 7).tolist()]

    found = transfer({64: losses(3e-3), 128: losses(4e-3), 256: losses(2.5e-3)})
    assert [each.rate for each in found.best] == pytest.approx([3e-3, 4e-3, 2.5e-3], rel=1e-6)
    assert found.factor == pytest.approx(1.6, rel=1e-6)
    assert found.holds is True
    assert transfer({64: losses(1e-3), 128: losses(2.1e-3)}).holds is False
    assert transfer({64: losses(1e-3), 128: losses(1.0)}).holds is None
    with pytest.raises(NapkinError, match="no run of width 128"):
        transfer({64: losses(1e-3), 128: []})


@pytest.mark.torture
def test_a_transfer_test_is_a_sweep_whose_runs_are_of_all_widths_and_rates(base: Recipe, tmp_path: Path) -> None:
    width = base.model.d_model
    trials = transfer_trials(base, [2 * width, width], [1e-2, 1e-3, 3e-3])
    sweep = Sweep.plan(trials, tmp_path / "mup", at_once=1)
    assert sweep.run() is None
    found = curves(sweep.standings())
    assert {each: [rate for rate, _ in points] for each, points in found.items()} == {
        width: [1e-3, 3e-3, 1e-2],
        2 * width: [1e-3, 3e-3, 1e-2],
    }
    assert all(math.isfinite(loss) for points in found.values() for _, loss in points)
    assert len(transfer(found).best) == 2
    for widths, rates, complaint in (
        ([width], [1e-3, 2e-3, 3e-3], "needs 2 widths, 1 are given"),
        ([width, 2 * width], [1e-3, 2e-3], "needs 3 learning rates, 2 are given"),
        ([width, 2 * width, width], [1e-3, 2e-3, 3e-3], "one of the widths is given twice"),
    ):
        with pytest.raises(NapkinError, match=complaint):
            transfer_trials(base, widths, rates)
