"""`napkin ladder`: recipes within a budget, trained and fitted here; what has no ladder is one line."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Napkin
from napkin.planning.planner import SharedPlans
from napkin.recipe.toml_file import read_recipe
from napkin.scaling.fitted_law import read_law
from napkin.scaling.ladder import Design, Ladder, ladder_file_of, predict, write_ladder

FEW_TOKENS = ("--training.evaluation-tokens", "64")


@pytest.mark.thorough
def test_a_ladder_for_elsewhere_is_written_as_recipes(place: Path, napkin: Napkin) -> None:
    done = napkin(*"ladder tiny.toml --on T4 --seconds 30 --levels 2 --sizes 1 --out new".split(), *FEW_TOKENS)
    assert done.status == 0, done
    written = sorted(path.name for path in Path("new").iterdir())
    assert len(written) == 3
    assert "next.toml" in written
    flops = [float(name.split(",")[0].removeprefix("flops=")) for name in written if name != "next.toml"]
    assert max(flops) / min(flops) == pytest.approx(2, rel=0.01)
    steps = [read_recipe(Path("new") / name).training.steps for name in written]
    assert all(each >= 20 for each in steps)


@pytest.mark.torture
def test_a_ladder_that_runs_here_predicts_a_larger_run(place: Path, napkin: Napkin) -> None:
    # Of fixed FLOPs, whatever this machine reaches: a ladder that was begun is continued.
    training = {"evaluation_tokens": 64, "threads": 1}
    base = read_recipe("tiny.toml")
    base = dataclasses.replace(base, training=dataclasses.replace(base.training, **training))
    ladder = Ladder(base, Design(tokens_per_parameter=1), None, SharedPlans())
    folder = Path("runs/tiny-ladder")
    rungs = tuple(ladder.rung(flops) for flops in (1e8, 1.2e8, 1.4e8, 1.6e8))
    write_ladder(folder, ladder_file_of(rungs, ladder.rung(1.9e8)))
    arguments = ("ladder", "tiny.toml", "--seconds", "9", "--run", "--law", "kaplan-c", "--at-once", "1")
    done = napkin(*arguments)
    assert done.status == 0, done
    assert "predicted loss: " in done.out
    predicted = predict(read_law(folder / "law.json"), read_recipe(folder / "next.toml"))
    again = napkin(*arguments, "--json")
    assert again.status == 0, again
    assert json.loads(again.out)["next"]["loss"]["estimate"] == predicted.loss.estimate
    planned = napkin("plan", str(folder / "next.toml"), "--law", str(folder / "law.json"), "--json")
    assert json.loads(planned.out)["predicted_loss"]["loss"] == pytest.approx(predicted.loss.estimate)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "give --seconds 600, or --budget 10usd with --on"),
        ("--seconds 10 --budget 1usd", "give --seconds 600, or --budget 10usd with --on"),
        ("--seconds 0", "a budget of 0"),
        ("--seconds 1e-3 --on T4 --sizes 1", "give a larger budget"),
        ("--budget ten --on T4", "ten"),
        ("--budget 1usd", "this machine has no price"),
        ("--seconds 10 --on T5", "T5"),
        ("--seconds 10 --levels 0", "--levels is 0"),
        ("--seconds 10 --times 1", "--times is 1.0"),
        ("--seconds 10 --law chinchila --run", "did you mean chinchilla?"),
        ("--seconds 10 --on T4 --run", "--run trains on this machine"),
        ("--seconds 10 --on T4 --out docs", "'docs' exists"),
    ],
)
def test_what_has_no_ladder_is_refused(place: Path, refusal: Callable[..., str], arguments: str, said: str) -> None:
    assert said in refusal("ladder", "tiny.toml", *arguments.split())


def test_a_law_for_many_layouts_is_refused(place: Path, refusal: Callable[..., str]) -> None:
    assert "leave --layout" in refusal("plan", "tiny.toml", "--law", "law.json", "--layout", "auto", "--on", "8xH100")
    assert "'law.json' does not exist" in refusal("train", "tiny.toml", "--law", "law.json", "--run", "new")
