"""`napkin evaluate judge` writes votes, `napkin evaluate votes` rates by them."""

import json
from pathlib import Path

import pytest


@pytest.fixture
def answers(place: Path) -> list[str]:
    for name in ("short", "long"):
        rows = [{"prompt": f"{n}?", "answer": f"{n}" * (1 + 2 * (name == "long"))} for n in range(6)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("judge.txt").write_text("{prompt} {first} {second}\n")
    return ["short.jsonl", "long.jsonl"]


def test_a_model_judges_and_its_votes_rate(napkin, answers: list[str]) -> None:
    command = ["evaluate", "judge", "runs/tiny", "--answers", *answers, "--template", "judge.txt"]
    done = napkin(*command, "--out", "votes.jsonl")
    assert done.status == 0, done.err
    assert "wrote 12 votes to votes.jsonl" in done.out
    assert "6 of 6 items were judged in both positions" in done.out
    assert not Path("votes.items.jsonl").exists()
    with open("votes.jsonl", "a") as file:
        file.writelines(
            json.dumps({"a": "short", "b": "long", "winner": winner}) + "\n" for winner in ("short", "long")
        )
    figures = json.loads(napkin("evaluate", "votes", "votes.jsonl", "--json").out)
    assert figures["votes"] == 14
    assert sum(each["votes"] for each in figures["ratings"]["models"]) == 28
    told = napkin("evaluate", "votes", "votes.jsonl", "--bootstrap", "100")
    assert "bootstrap over items, 100 samples" in told.out
    assert "short" in told.out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("votes", "no file of votes is named"),
        ("votes missing.jsonl", "'missing.jsonl' cannot be read"),
        ("votes short.jsonl", "'short.jsonl' line 1 is not a vote"),
        ("votes short.jsonl --bootstrap 5", "--bootstrap is 5"),
        ("votes short.jsonl --models one", "--models names 1: name two"),
        ("judge runs/tiny --answers short.jsonl --out new", "--answers names 1 files"),
        ("judge runs/tiny --answers short.jsonl long.jsonl", "no file to write is named"),
        ("judge runs/tiny --answers short.jsonl short.jsonl --out new", "need two names"),
        ("judge runs/tiny --answers short.jsonl long.jsonl --out one.txt", "'one.txt' exists"),
        ("judge runs/tiny --answers short.jsonl long.jsonl --out new", "the judge's context is"),
    ],
)
def test_what_cannot_be_judged_is_one_line(refusal, answers: list[str], arguments: str, complaint: str) -> None:
    assert complaint in refusal("evaluate", *arguments.split())
    assert not Path("new").exists()
