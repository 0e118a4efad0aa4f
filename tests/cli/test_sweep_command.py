"""`napkin sweep`: planned, trained, continued; what cannot be a sweep is one line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Napkin
from napkin.planning.planner import resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.toml_file import read_recipe
from napkin.train_step.step_ledger import count_step

RATES = ("--optimizer.learning-rate", "1e-3,1e-2", "--training.steps=3", "--at-once", "1")


@pytest.mark.thorough
def test_a_sweep_is_planned_trained_and_continued(place: Path, napkin: Napkin) -> None:
    planned = napkin("sweep", "tiny.toml", *RATES, "--plan", "--json")
    assert planned.status == 0, planned
    assert not Path("runs/tiny-sweep").exists()
    plan = json.loads(planned.out)
    machine = ThisMachine()
    assert plan["flops"] == 2 * 3 * count_step(resolve(read_recipe("tiny.toml"), machine)).flops
    assert set(plan["runs"]) == {"learning_rate=0.001", "learning_rate=0.01"}
    done = napkin("sweep", "tiny.toml", *RATES)
    assert done.status == 0, done
    assert "the best optimizer.learning_rate, 0.01, is the largest that was tried" in done.out
    assert "next to it: learning_rate=0.001" in done.out
    again = napkin("sweep", "tiny.toml", *RATES, "--json")
    assert again.status == 0, again
    told = json.loads(again.out)
    assert told["best"] == "learning_rate=0.01"
    assert [each["step"] for each in told["runs"]] == [3, 3]
    # The ordinary commands take its runs as theirs.
    assert napkin("runs", "runs/tiny-sweep").status == 0
    assert napkin("resume", "runs/tiny-sweep/learning_rate=0.01").status == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tiny.toml", "there is nothing to vary"),
        ("tiny.toml --model.d-modle 16,32", "did you mean --model.d-model?"),
        ("tiny.toml --model.d-model 16,x", "'x' is not a whole number"),
        ("tiny.toml --model.d-model", "--model.d-model has no value"),
        ("tiny.toml --model.d-model --plan", "--model.d-model has no value"),
        ("tiny.toml --model.d-model 16 --model.d-model 32", "is given twice"),
        ("tiny.toml --model.d-model 16..32", "--random N"),
        ("tiny.toml --model.d-model 16,32 --random 0", "--random is 0"),
        ("tiny.toml --model.d-model 16,32 --random 3 --list", "--list and --random exclude each other"),
        ("tiny.toml --model.d-model 16,32 --at-once 0", "--at-once is 0"),
        ("tiny.toml --model.d-model 16,32 --training.threads 1024 --at-once 2", "2 runs of 1024 threads do not fit on"),
        ("tiny.toml --model.d-model 16,32 --runs runs", "holds runs and is not of a sweep"),
        ("tiny.toml --model.d-model 16,32 --runs runs/tiny", "is a run and is not of a sweep"),
        ("missing.toml --model.d-model 16,32", "'missing.toml' does not exist"),
        ("tiny.toml --data.train missing.tokens,data/train.tokens", "there is no token file 'missing.tokens'"),
        ("tiny.toml --model.n-heads 2,3", "the run n_heads=3 is impossible"),
    ],
)
def test_what_cannot_be_a_sweep_is_refused(place: Path, refusal: Callable[..., str], arguments: str, said: str) -> None:
    assert said in refusal("sweep", *arguments.split())
