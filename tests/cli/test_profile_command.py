"""`napkin profile`: of a recipe and of a run; its files; what it refuses."""

import json
from pathlib import Path

import pytest

from cli.conftest import Napkin
from napkin.planning.planner import resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.toml_file import read_recipe
from napkin.train_step.step_ledger import count_step


@pytest.mark.thorough
def test_a_recipe_is_profiled_beside_its_plan(place: Path, napkin: Napkin) -> None:
    done = napkin("profile", "tiny.toml", "--steps", "2", "--json", "--page", "out/page.html", "--trace", "out/t.json")
    assert done.status == 0, done
    told = json.loads(done.out)
    ledger = count_step(resolve(read_recipe("tiny.toml"), ThisMachine()))
    assert told["flops"] == ledger.flops
    assert told["peak_bytes"] == pytest.approx(ledger.peak_bytes, rel=0.01)
    assert sum(row["counted_calls"] for row in told["rows"]) == len(ledger.rows)
    assert sum(row["planned_seconds"] for row in told["rows"]) == pytest.approx(told["planned_seconds"])
    seconds = sum(row["seconds"] for row in told["rows"]) + sum(row["seconds"] for row in told["outside"])
    assert seconds == pytest.approx(told["seconds"])
    # All calls but those that Python's dispatch alone sees.
    alone = [row["operator"] for row in told["rows"] if row["calls"] != row["counted_calls"]]
    assert set(alone) <= {"promote_types", "detach"}
    assert {row["phase"] for row in told["rows"]} == {"forward", "backward", "optimizer"}
    assert "tiny.toml" in Path("out/page.html").read_text()
    assert json.loads(Path("out/t.json").read_text())["traceEvents"]


@pytest.mark.thorough
def test_a_run_is_profiled_by_its_recipe(place: Path, napkin: Napkin) -> None:
    before = sorted(path for path in Path("runs/tiny").rglob("*"))
    done = napkin("profile", "runs/tiny", "--steps", "1", "--by", "module")
    assert done.status == 0, done
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0][:4] == ["module", "calls", "planned", "measured"]
    assert [line for line in lines if line[:2] == ["in", "operators"]]
    assert "the mean of 1 step" in done.out
    assert sorted(path for path in Path("runs/tiny").rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("tiny.toml --steps 0", "--steps is 0: use 1 to 1000"),
        ("tiny.toml --page one.txt", "'one.txt' exists and is not overwritten: remove it or choose another --page"),
        ("tiny.toml --trace docs", "'docs' exists and is not overwritten: remove it or choose another --trace"),
        ("tiny.toml --page a --trace a", "--page and --trace are both 'a': name two files"),
        ("docs", "'docs' is not a run"),
        ("missing.toml", "'missing.toml' does not exist"),
    ],
)
def test_what_cannot_be_profiled_is_one_line(place: Path, napkin: Napkin, arguments: str, said: str) -> None:
    done = napkin("profile", *arguments.split())
    assert done.status == 2
    assert said in done.err
    assert len(done.err.splitlines()) == 1


def test_a_memory_snapshot_is_written_and_shown_beside_its_plan(place: Path, napkin: Napkin) -> None:
    done = napkin("profile", "tiny.toml", "--steps", "1", "--memory-snapshot", "new/step.pickle")
    assert done.status == 0, done
    shown = napkin("profile", "memory", "new/step.pickle", "--recipe", "tiny.toml", "--json")
    assert shown.status == 0, shown
    told = json.loads(shown.out)
    assert sum(each["bytes"] for each in told["in_use_at_peak"]) == told["peak_bytes"]
    quantity = told["quantities"][0]
    assert quantity["meter"] == told["peak_bytes"]
    assert quantity["count"] == pytest.approx(told["peak_bytes"], rel=0.01)
    plain = napkin("profile", "memory", "new/step.pickle", "--page", "new/step.html")
    assert "optimizer state" in plain.out
    assert "<svg" in Path("new/step.html").read_text()
    for arguments, said in (
        ("memory one.txt", "neither a pickle of plain data nor JSON"),
        ("memory missing.pickle", "cannot be read"),
        ("memory new/step.pickle --device 4", "has device 0 to 0"),
        ("memory new/step.pickle --on H100", "name its --recipe"),
        ("memory new/step.pickle --page one.txt", "choose another --page"),
        ("tiny.toml --trace a --memory-snapshot a", "--trace and --memory-snapshot are both 'a'"),
    ):
        refused = napkin("profile", *arguments.split())
        assert refused.status == 2
        assert said in refused.err
        assert len(refused.err.splitlines()) == 1
