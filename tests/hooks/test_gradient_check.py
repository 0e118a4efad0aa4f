"""`napkin check`: right programs pass in every arrangement, and each mistake is found and named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import napkin
from napkin.cli import main
from napkin.errors import NapkinError
from napkin.hooks.checked_program import random_examples, spread_examples
from oracles import checked_programs
from oracles.checked_programs import MeanOfMeans, OwnLoop, Right

FILE = checked_programs.__file__


@pytest.mark.parametrize("program", [Right, OwnLoop])
def test_a_right_program_passes_in_every_arrangement(program: Any) -> None:
    found = napkin.check(program, ranks=1)
    assert found.equal, found
    assert found.normalisation == "the mean over trained tokens"
    names = [result.name for result in found.results]
    assert names[:3] == ["the same again", "each alone", "permuted"]
    assert ("more padding" in names) == (program is Right)
    assert ("packed" in names) == (program is Right) != ("packed" in found.not_offered)
    # What rounding does is measured: in fp32 it is small, and not nothing.
    assert all(0 < result.bound < 1e-4 for result in found.results)


MISTAKES = {
    "MeanOfMeans": ({"4 micro-batches of 2", "8 micro-batches of 1"}, "each micro-batch is averaged by itself"),
    "Added": ({"4 micro-batches of 2", "8 micro-batches of 1"}, "added up, each averaged by itself"),
    "DividedTwice": ({"4 micro-batches of 2", "8 micro-batches of 1"}, "divided by the number of micro-batches"),
    "CountedPadding": ({"more padding", "4 micro-batches of 2", "8 micro-batches of 1"}, "padding counts in the mean"),
    "Dropout": ({"the same again"}, "dropout is on (mlp.0.3: p = 0.1"),
    "LeakedAttention": ({"packed"}, "attention is not reset between documents"),
    "LeakedPositions": ({"packed"}, "positions are not reset"),
    "BoundaryTargets": ({"packed"}, "trained to predict the first of the next"),
    "SeenPadding": (
        {"each alone", "more padding", "4 micro-batches of 2", "8 micro-batches of 1"},
        "influence each other",
    ),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found_where_it_shows_and_named(mistake: str) -> None:
    differing, said = MISTAKES[mistake]
    found = napkin.check(f"{FILE}:{mistake}", ranks=1)
    assert {result.name for result in found.results if result.differs} == differing
    for result in found.results:
        assert (said in result.cause) == result.differs, result


def test_weights_of_examples_are_those_of_the_closed_form() -> None:
    found = napkin.check(MeanOfMeans, ranks=1, arrangements=["micro-batches"])
    halves = found.results[0]
    rows = spread_examples(random_examples(MeanOfMeans().build()), 8)
    tokens = [sum(label != -100 for label in row["labels"][1:]) for row in rows]
    of_pair = [tokens[number // 2 * 2] + tokens[number // 2 * 2 + 1] for number in range(8)]
    assert halves.weights == pytest.approx([sum(tokens) / (4 * each) for each in of_pair], rel=1e-3)


def test_dropout_can_be_taken_away_first() -> None:
    assert napkin.check(checked_programs.Dropout, ranks=1, without_dropout=True).equal


def test_random_states_are_left_as_they_were() -> None:
    before = torch.get_rng_state()
    napkin.check(Right, ranks=1, arrangements=["permuted"])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.thorough
def test_ranks_that_average_by_themselves_are_named() -> None:
    found = napkin.check(checked_programs.PerRank, arrangements=["ranks"])
    assert [result.differs for result in found.results] == [True, True]
    assert all("each rank is averaged by itself" in result.cause for result in found.results)


@pytest.mark.torture
@pytest.mark.parametrize(("program", "cause"), [("Right", ""), ("OwnLoop", ""), ("ForgottenRanks", "number of ranks")])
def test_ranks_are_real_processes(program: str, cause: str) -> None:
    found = napkin.check(f"{FILE}:{program}", ranks=4, arrangements=["ranks"])
    assert found.equal == (not cause), found
    assert all(cause in result.cause for result in found.results)


def test_the_command_says_what_differs_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", f"{FILE}:Right", "--ranks", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["equal"]
    assert {each["name"] for each in printed["arrangements"]} >= {"each alone", "packed", "8 micro-batches of 1"}
    assert main(["check", f"{FILE}:MeanOfMeans", "--ranks", "1"]) == 1
    assert "divide by the trained tokens of the whole batch" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1", "not a program to check"),
        ("def build(): return 3\ndef loss(model, batch): pass", "build() returns a int"),
        ("import torch\ndef build(): return torch.nn.Embedding(9, 4)\ndef loss(m, b): return m(b['no'])", "KeyError"),
        ("import torch\ndef build(): return torch.nn.Linear(2, 2)\ndef loss(m, b): return 0", "define examples()"),
        ("raise SystemExit(3)", "cannot be imported"),
        ("def f(:", "cannot be imported"),
    ],
)
def test_what_is_no_program_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(text)
    with pytest.raises(NapkinError) as refused:
        napkin.check(str(file), ranks=1)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
