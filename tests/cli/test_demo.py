"""The demo keeps its five minutes on slow machines, too."""

import dataclasses
from pathlib import Path

import pytest

from napkin.cli.demo import within
from napkin.planning.planner import plan as make_plan
from oracles.tiny_run import tiny_recipe, write_tiny_text


def test_a_slow_machine_takes_as_many_evaluations_as_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_text(tmp_path)
    recipe = tiny_recipe(tmp_path, steps=800, evaluate_every=100)
    plan = make_plan(recipe)
    # Two plans of the same steps differ by what else the machine was doing.
    monkeypatch.setattr("napkin.planning.planner.plan", lambda recipe, *, progress: plan)
    assert within(plan.seconds, recipe) == recipe
    assert capsys.readouterr().out == ""
    for fraction, steps in ((0.99, 700), (0.51, 400), (0.26, 200), (1e-9, 200)):
        shortened = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, steps=steps))
        assert within(fraction * plan.seconds, recipe) == shortened
        assert f"on this machine: {steps} here" in capsys.readouterr().out
