"""`napkin evaluate RUN --task FILE`, and `--compare`."""

import json
from pathlib import Path

import pytest

ROWS = [
    {"prompt": f"the {n}", "choices": ["word", "a b c", "zz"], "answer": n % 3, "group": str(n // 2)} for n in range(12)
]


@pytest.fixture
def task(place: Path) -> str:
    Path("colours.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "colours.jsonl"


def test_a_task_is_planned_put_and_kept_in_the_run(napkin, task: str) -> None:
    done = napkin("evaluate", "runs/tiny", "--task", task)
    assert done.status == 0, done.err
    assert "12 items of kind choice; 36 sequences" in done.out
    assert "These 12 items cannot tell two models apart unless they differ by more than" in done.out
    (path,) = Path("runs/tiny/evaluations").glob("*.json")
    result = json.loads(path.read_text())
    assert result["task"]["files"] == {
        f"{Path.cwd().name}/{task}": result["task"]["files"][f"{Path.cwd().name}/{task}"]
    }
    assert result["scores"]["acc"]["groups"] == 6
    assert len(result["item_scores"]["acc"]) == 12
    (log,) = Path("runs/tiny/evaluations").glob("*.items.jsonl")
    before = log.read_bytes()
    again = napkin("evaluate", "runs/tiny", "--task", task, "--json")
    assert "12 of 12 items are done already" in again.err
    assert json.loads(again.out)["scores"] == result["scores"]
    assert log.read_bytes() == before
    assert napkin("evaluate", "runs/tiny", "--task", task, "--limit", "5", "--seed", "1").status == 0
    assert len([*Path("runs/tiny/evaluations").glob("*.items.jsonl")]) == 2


def test_two_results_are_compared_on_the_items_that_both_have(napkin, task: str) -> None:
    for out, more in (("a.json", []), ("b.json", ["--limit", "8", "--unconditional"])):
        assert napkin("evaluate", "runs/tiny", "--task", task, "--out", out, *more).status == 0
    done = napkin("evaluate", "--compare", "a.json", "b.json")
    assert "both are of the same weights" in done.out
    assert "not the same: unconditional is False for A, True for B" in done.out
    assert "A - B: +0.00 points" in done.out
    assert "8 items in" in done.out
    assert "cannot tell the two apart" in done.out
    figures = json.loads(napkin("evaluate", "--compare", "a.json", "b.json", "--json").out)
    assert (figures["items"], figures["p_value"]) == (8, 1)


def test_of_several_tasks_the_differences_that_remain_are_called_real(napkin, task: str) -> None:
    folders = []
    for run, right in (("first", 1), ("second", 0)):
        folders.append(Path(run))
        folders[-1].mkdir()
        for name, n_different in (("easy", 2), ("hard", 12)):
            out = folders[-1] / f"{name}.json"
            assert napkin("evaluate", "runs/tiny", "--task", task, "--out", str(out)).status == 0
            # Of a result only the scores are changed.
            result = json.loads(out.read_text())
            result.pop("crc32")
            result["task"]["name"], result["groups"] = name, [""] * 12
            result["item_scores"]["acc"] = [float(right)] * n_different + [1.0] * (12 - n_different)
            out.write_text(json.dumps(result))
    figures = json.loads(napkin("evaluate", "compare", "first", "second", "--json").out)["comparisons"]
    assert [row["task"] for row in figures] == ["easy", "hard"]
    assert [row["p_value"] for row in figures] == [0.5, 2 / 2**12]
    assert [row["adjusted_p_value"] for row in figures] == [0.5, 4 / 2**12]
    assert [row["real"] for row in figures] == [False, True]
    done = napkin("evaluate", "compare", *(f"{run}/{name}.json" for name in ("easy", "hard") for run in folders))
    assert "adjusted for 2 comparisons by Holm's procedure" in done.out


def test_a_plan_is_timed_and_nothing_is_written(napkin, task: str) -> None:
    done = napkin("evaluate", "runs/tiny", "--task", task, "--plan", "--usd-per-hour", "3600")
    assert "by the tokens of 8 items, timed here" in done.out
    assert "$" in done.out
    figures = json.loads(napkin("evaluate", "runs/tiny", "--task", task, "--plan", "--json").out)
    assert figures["items"] == 12
    assert figures["computed_tokens"] < figures["tokens"]
    assert figures["seconds"] > 0
    assert not Path("runs/tiny/evaluations").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("runs/tiny --task", "--task names no file"),
        ("runs/tiny --task missing.jsonl", "'missing.jsonl' cannot be read"),
        ("runs/tiny --task colours.jsonl --shots 1", "1 examples are asked for, the dev split has 0"),
        ("runs/tiny --task colours.jsonl --chat", "has no chat template"),
        ("runs/tiny --task colours.jsonl --score f1", "the task has no score 'f1': use one of acc, acc_norm"),
        ("runs/tiny --task colours.jsonl --score acc_uncond", "needs --unconditional"),
        ("runs/tiny --task colours.jsonl --limit 0", "--limit is 0"),
        ("runs/tiny --task colours.jsonl --answer-tokens 5", "for a task whose answers are generated"),
        ("runs/tiny --task colours.jsonl --tokens data/validation.tokens", "'--tokens' does not go with --task"),
        ("runs/tiny --task colours.jsonl --out one.txt", "'one.txt' exists and is not overwritten"),
        ("nowhere --task colours.jsonl", "'nowhere' is neither a run nor a Hugging Face folder, it does not exist"),
        ("compare runs/tiny data", "'runs/tiny' has no result of a task"),
        ("compare runs/tiny colours.jsonl", "folders and results are mixed"),
        ("--compare a.json", "1 result to compare: name two, or several pairs"),
        ("--compare colours.jsonl colours.jsonl", "'colours.jsonl' is malformed"),
        ("", "missing from napkin evaluate: RUN"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(refusal, task: str, arguments: str, complaint: str) -> None:
    assert complaint in refusal("evaluate", *arguments.split())
    assert not Path("runs/tiny/evaluations").exists()
