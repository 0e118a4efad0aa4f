"""A ladder: shapes by one rule, FLOPs by count, a budget that is kept; its law in the plan and the books of a run."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.json_files import read_json
from napkin.planning.planner import SharedPlans, plan
from napkin.recipe.recipe import Recipe
from napkin.runs.accounting_files import MeasurementFile, PlanFile
from napkin.runs.metrics import read_metrics
from napkin.scaling.budget_answer import count_parameters, predicting, with_predicted_loss
from napkin.scaling.fitted_law import FittedLaw
from napkin.scaling.ladder import (
    FEWEST_STEPS,
    Design,
    Ladder,
    Shapes,
    ladder_file_of,
    learning_rate_of,
    read_ladder,
    write_ladder,
)
from napkin.scaling.law_fit import fit_law
from napkin.scaling.observations import Observation
from napkin.scaling.sweep import run_seconds
from napkin.training.run import create_run, open_run, train_run
from oracles.tiny_run import tiny_recipe, write_tiny_text


def base() -> Recipe:
    recipe = tiny_recipe("missing", batch_size=16)
    model = dataclasses.replace(recipe.model, vocab_size=300, d_model=64, n_heads=4, n_kv_heads=None)
    optimizer = dataclasses.replace(recipe.optimizer, warmup_steps=None)
    return dataclasses.replace(recipe, model=model, optimizer=optimizer)


def law_of_known_truth() -> FittedLaw:
    """E = 2, A = 100, α = 0.4, B = 300, β = 0.5, fitted to runs without noise."""
    runs = [Observation(n, d, truth(n, d)) for n in (1e4, 3e4, 1e5, 3e5) for d in (1e5, 1e6, 1e7)]
    return fit_law(runs, "chinchilla", draws=20).law


def truth(parameters: float, tokens: float) -> float:
    return 2 + 100 / parameters**0.4 + 300 / tokens**0.5


def test_shapes_keep_the_aspect_and_the_nearest_is_the_nearest_of_all() -> None:
    shapes = Shapes(base(), aspect=32)
    parameters = {n: count_parameters(shapes.model(n)) for n in range(1, 13)}
    for wanted in (1e4, 6e4, 2e5, 5e5):
        ratios = {n: abs(math.log(parameters[n] / wanted)) for n in parameters}
        heads = shapes.nearest(wanted)
        assert heads == min(ratios, key=lambda n: ratios[n])
        model = shapes.model(heads)
        assert model.d_model == 16 * heads
        assert model.n_layers == max(2, round(model.d_model / 32))


@pytest.mark.thorough
def test_a_ladder_takes_its_budget_and_its_flops_are_counted() -> None:
    design = Design(levels=2, sizes=2, level_factor=3.0)
    ladder = Ladder.within(base(), seconds=20.0, design=design, on="T4")
    taken = sum(run_seconds(rung.plan) for rung in ladder.rungs)
    assert 0.8 * 20 <= taken <= 20
    assert len(ladder.rungs) == 4
    levels = sorted({rung.level for rung in ladder.rungs})
    assert levels[1] / levels[0] == pytest.approx(3)
    for rung in ladder.rungs[:2]:
        alone = plan(rung.trial.recipe, "T4")
        assert rung.flops == alone.steps * alone.ledger.flops
        assert abs(rung.flops - rung.level) <= alone.ledger.flops / 2
        assert rung.plan.seconds == pytest.approx(alone.seconds)
        assert rung.trial.recipe.training.evaluate_every == alone.steps
    for level in levels:
        sizes = [rung.plan.ledger.parameters for rung in ladder.rungs if rung.level == level]
        # Two sizes around the rule's: their tokens per parameter lie on either side of it.
        per_parameter = [level / 6 / size**2 for size in sizes]
        assert per_parameter[0] > 20 > per_parameter[1]
    larger = ladder.rung(8 * levels[-1])
    assert larger.flops == pytest.approx(8 * levels[-1], rel=0.01)


def test_runs_with_fewer_steps_than_the_recipe_s_warm_up_are_shortened_whole() -> None:
    begun = dataclasses.replace(base(), training=dataclasses.replace(base().training, steps=10**5))
    optimizer = dataclasses.replace(
        begun.optimizer, schedule="warmup-stable-decay", warmup_steps=10**4, decay_steps=2 * 10**4
    )
    ladder = Ladder(dataclasses.replace(begun, optimizer=optimizer), Design(), "T4", SharedPlans())
    recipe = ladder.rung(2e12).trial.recipe
    steps = recipe.training.steps
    assert steps < 10**4
    assert (recipe.optimizer.warmup_steps, recipe.optimizer.decay_steps) == (steps // 10, steps // 5)


@pytest.mark.thorough
def test_money_buys_the_ladder_of_its_seconds() -> None:
    ladder = Ladder.within(base(), dollars=0.005, design=Design(levels=1, sizes=1), on="H100")
    price = ladder.rungs[0].plan.site.usd_per_hour
    assert price is not None
    dollars = sum(run_seconds(rung.plan) for rung in ladder.rungs) / 3600 * price
    assert 0.8 * 0.005 <= dollars <= 0.005


def test_the_learning_rate_follows_its_rule() -> None:
    # Doubling FLOPs eight times halves it: 2^-(8 · 0.125).
    assert learning_rate_of(256e15) == pytest.approx(learning_rate_of(1e15) / 2)
    ladder = Ladder(base(), Design(learning_rate="mup"), "T4", SharedPlans())
    model = ladder.rung(1e13).trial.recipe.model
    assert (model.mup_base_d_model, model.d_model > 64) == (64, True)
    kept = Ladder(base(), Design(learning_rate="recipe"), "T4", SharedPlans()).rung(1e13).trial.recipe
    assert kept.optimizer == base().optimizer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seconds": 0.01}, "beside their steps"),
        ({"seconds": 0.0}, "a budget of 0"),
        ({"seconds": math.nan}, "a budget of nan"),
        ({}, "one budget"),
        ({"seconds": 10.0, "dollars": 10.0}, "one budget"),
    ],
)
def test_a_budget_that_buys_nothing_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(NapkinError, match=said):
        Ladder.within(base(), on="T4", **changes)
    with pytest.raises(NapkinError, match="--levels is 0"):
        Design(levels=0)
    with pytest.raises(NapkinError, match=f"{FEWEST_STEPS} or more"):
        Ladder(base(), Design(), "T4", SharedPlans()).rung(1e8)


def test_a_ladder_is_read_as_it_was_written(tmp_path: Path) -> None:
    ladder = Ladder(base(), Design(), "T4", SharedPlans())
    rungs = (ladder.rung(1e12), ladder.rung(2e12))
    file = ladder_file_of(rungs, ladder.rung(1e13))
    write_ladder(tmp_path / "new", file)
    assert read_ladder(tmp_path / "new") == file
    assert [trial.recipe for trial in file.trials] == [rung.trial.recipe for rung in rungs]
    assert read_ladder(tmp_path) is None


def test_a_plan_has_the_loss_of_the_law_for_its_counted_size() -> None:
    planned = plan(base(), "T4")
    with_loss = with_predicted_loss(planned, law_of_known_truth(), "law.json").predicted_loss
    assert with_loss is not None
    tokens = planned.steps * planned.tokens_per_step
    assert with_loss.loss == pytest.approx(truth(planned.ledger.parameters, tokens), rel=1e-3)
    assert with_loss.low <= with_loss.loss <= with_loss.high


@pytest.mark.thorough
def test_the_predicted_loss_is_reconciled_with_the_measured_one(tmp_path: Path) -> None:
    write_tiny_text(tmp_path)
    law_of_known_truth().write(tmp_path / "law.json")
    recipe = tiny_recipe(tmp_path, steps=6, checkpoint_every=3)
    preparation, run = create_run(recipe, tmp_path / "run", planner=predicting(str(tmp_path / "law.json")))
    train_run(preparation, run)
    began = read_json(run.path / "plan.json", PlanFile)
    assert began is not None
    assert began.predicted_loss is not None
    measured = read_json(run.path / "measurement.json", MeasurementFile)
    assert measured is not None
    (row,) = (row for row in measured.table if row.quantity == "validation loss")
    assert row.count == began.predicted_loss.loss
    assert row.meter == list(read_metrics(run.path / "metrics.jsonl"))[-1].validation_loss
    # The law's file is not needed any more.
    (tmp_path / "law.json").unlink()
    again, _ = open_run(run.path)
    assert again.plan is not None
    assert again.plan.predicted_loss == began.predicted_loss
