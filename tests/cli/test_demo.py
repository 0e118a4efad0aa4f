"""The demo keeps its five minutes on slow machines, too."""

import dataclasses
from pathlib import Path

import pytest

from napkin.cli.demo import within
from napkin.planning.planner import plan as make_plan
from oracles.tiny_run import tiny_recipe, write_tiny_text


def test_a_slow_machine_takes_as_many_evaluations_as_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_text(tmp_path)
    recipe = tiny_recipe(tmp_path, steps=800, evaluate_every=100)
    plan = make_plan(recipe)
    assert within(10 * plan.seconds, recipe) == recipe
    assert capsys.readouterr().out == ""
    shortened = within(plan.seconds / 2, recipe).training.steps
    # Two plans of the same steps differ by what else the machine was doing.
    assert shortened in range(200, 800, 100)
    assert f"on this machine: {shortened} here" in capsys.readouterr().out
    assert within(1e-9, recipe) == dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, steps=200))
