"""The runs of a sweep, its best one, and the edges: against brute force."""

import itertools
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.recipe.recipe import Recipe
from napkin.scaling.sweep import Edge, edges, neighbours
from napkin.scaling.trials import grid, listed, read_axis, sampled

WIDTHS = read_axis("--model.d-model", "64,128,256")
RATES = read_axis("--optimizer.learning-rate", "1e-3,3e-3")
RANGE = read_axis("--optimizer.learning-rate", "1e-4..1e-2")
STEPS = read_axis("--training.steps", "70")


def test_a_grid_has_every_combination_and_nothing_else_is_changed() -> None:
    trials = grid(Recipe(), [WIDTHS, RATES, STEPS])
    found = [(trial.recipe.model.d_model, trial.recipe.optimizer.learning_rate) for trial in trials]
    assert found == list(itertools.product([64, 128, 256], [1e-3, 3e-3]))
    assert {trial.recipe.training.steps for trial in trials} == {70}
    assert {(trial.recipe.data, trial.recipe.model.n_layers) for trial in trials} == {(Recipe().data, 4)}
    # A value that all have in common is in no name.
    assert trials[0].name == "d_model=64,learning_rate=0.001"
    assert len({trial.name for trial in trials}) == 6


def test_a_list_takes_the_values_one_by_one() -> None:
    trials = listed(Recipe(), [WIDTHS, read_axis("--optimizer.learning-rate", "3e-3,2e-3,1e-3"), STEPS])
    found = [(trial.recipe.model.d_model, trial.recipe.optimizer.learning_rate) for trial in trials]
    assert found == [(64, 3e-3), (128, 2e-3), (256, 1e-3)]
    with pytest.raises(NapkinError, match=r"--model\.d-model.*3, --optimizer\.learning-rate.*2"):
        listed(Recipe(), [WIDTHS, RATES])


def test_a_sample_is_the_same_for_the_same_seed_and_begins_a_larger_one() -> None:
    few, more = (sampled(Recipe(), [WIDTHS, RANGE], n, seed=3) for n in (5, 12))
    assert more[:5] == few
    assert sampled(Recipe(), [WIDTHS, RANGE], 5, seed=4) != few
    rates = [trial.recipe.optimizer.learning_rate for trial in more]
    assert len({trial.name for trial in more}) == 12
    assert all(rate is not None and 1e-4 <= rate <= 1e-2 for rate in rates)
    with pytest.raises(NapkinError, match=r"found 6 different.*use --random 6"):
        sampled(Recipe(), [WIDTHS, RATES], 7, seed=0)


def test_a_range_needs_a_sample() -> None:
    with pytest.raises(NapkinError, match=r"range 0\.0001\.\.0\.01") as refused:
        grid(Recipe(), [RANGE])
    assert "--random N" in str(refused.value)


def test_an_impossible_combination_is_named() -> None:
    with pytest.raises(NapkinError, match=r"n_heads=7.*impossible"):
        grid(Recipe(), [read_axis("--model.d-model", "132"), read_axis("--model.n-heads", "2,7")])


def test_files_in_names_are_no_paths() -> None:
    (first, _) = grid(Recipe(), [read_axis("--data.train", "../a.tokens,b.tokens")])
    assert Path(first.name).name == first.name


def test_neighbours_and_edges_are_those_of_the_grid() -> None:
    three = read_axis("--optimizer.learning-rate", "3e-3,1e-3,2e-3")
    trials = grid(Recipe(), [WIDTHS, three, read_axis("--training.init-seed", "0,1")])
    by_place = {
        (trial.recipe.model.d_model, trial.recipe.optimizer.learning_rate, trial.recipe.training.init_seed): trial
        for trial in trials
    }
    middle = by_place[128, 2e-3, 0]
    expected = [by_place[place] for place in ((64, 2e-3, 0), (256, 2e-3, 0), (128, 1e-3, 0), (128, 3e-3, 0))]
    assert neighbours(middle, trials) == [*expected, by_place[128, 2e-3, 1]]
    assert edges(middle, trials) == []
    assert edges(by_place[256, 1e-3, 1], trials) == [
        Edge("model.d_model", 256, is_smallest=False),
        Edge("optimizer.learning_rate", 1e-3, is_smallest=True),
    ]
