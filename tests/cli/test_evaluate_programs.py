"""`napkin evaluate programs`: programs of a file, and of a tiny model."""

import json
from pathlib import Path

import pytest

CHECK = "def check(candidate):\n    assert candidate(2) == 4\n"


@pytest.fixture
def problems(place: Path) -> str:
    rows = [{"task_id": f"t/{n}", "prompt": "def twice(n):\n", "test": CHECK, "entry_point": "twice"} for n in range(3)]
    Path("problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [
        {"task_id": f"t/{n}", "completion": f"    return {2 if each <= n else 3} * n\n"}
        for n in range(3)
        for each in range(3)
    ]
    Path("samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return "problems.jsonl"


def test_programs_of_a_file_are_graded(napkin, problems: str) -> None:
    command = ["evaluate", "programs", "--problems", problems, "--completions", "samples.jsonl", "--k", "1", "2"]
    done = napkin(*command, "--out", "passed.json")
    assert done.status == 0, done.err
    assert "6 of 9 programs pass, 3 of each problem" in done.out
    result = json.loads(Path("passed.json").read_text())
    assert result["item_scores"] == {"pass@1": [1 / 3, 2 / 3, 1.0], "pass@2": [pytest.approx(2 / 3), 1.0, 1.0]}
    compared = napkin("evaluate", "compare", "passed.json", "passed.json")
    assert "A - B: +0.00 points" in compared.out


def test_programs_of_a_model_are_drawn_and_kept(napkin, problems: str) -> None:
    command = ["evaluate", "runs/tiny", "--problems", problems, "--samples", "2", "--answer-tokens", "4", "--json"]
    done = napkin(*command)
    assert done.status == 0, done.err
    assert json.loads(done.out)["task"]["samples"] == 2
    (log,) = Path("runs/tiny/evaluations").glob("*.items.jsonl")
    texts = [json.loads(line)["texts"] for line in log.read_text().splitlines()[1:]]
    assert len({text for each in texts for text in each}) > 1
    assert "3 of 3 problems are done already" in napkin(*command).err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("runs/tiny", "--problems names no file"),
        ("--problems problems.jsonl", "name one of a RUN"),
        ("--problems missing.jsonl --completions samples.jsonl", "'missing.jsonl' cannot be read"),
        ("--problems problems.jsonl --completions samples.jsonl --k 4", "--k is 4: use 1 to 3"),
        ("--problems problems.jsonl --completions samples.jsonl --temperature 1", "--temperature is of programs"),
        ("--problems problems.jsonl --completions samples.jsonl --seconds 0", "--seconds is 0.0"),
        ("runs/tiny --problems problems.jsonl --samples 0", "--samples is 0"),
        ("runs/tiny --problems problems.jsonl --answer-tokens 99999", "leaves no room for a prompt"),
    ],
)
def test_what_cannot_be_graded_is_one_line(refusal, problems: str, arguments: str, complaint: str) -> None:
    assert complaint in refusal("evaluate", "programs", *arguments.split())
