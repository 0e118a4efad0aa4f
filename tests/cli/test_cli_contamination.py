"""`napkin contamination`: what is printed, and the score that remains."""

import json
from pathlib import Path

import pytest

QUESTION = "Which of the two rivers that meet at Koblenz has its source in the Vosges mountains of France?"
OTHER = "Which metal is liquid at the temperature of a room and was used in thermometers for a long time?"


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": "river", "prompt": QUESTION, "choices": ["Moselle", "Rhine"], "answer": 0},
        {"id": "metal", "prompt": OTHER, "choices": ["mercury", "lead"], "answer": 0},
    ]
    Path("trivia.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("corpus.txt").write_text(f"Quizzes. {QUESTION.upper()} Answers are below.")


def test_contaminated_items_are_named(napkin) -> None:
    done = napkin("contamination", "trivia.jsonl", "--texts", "corpus.txt")
    assert (done.status, done.err) == (0, "")
    assert "1 of 2 items of trivia stand in" in done.out
    assert "river" in done.out
    found = json.loads(napkin("contamination", "trivia.jsonl", "--texts", "corpus.txt", "--json").out)
    assert [each["item"] for each in found["contaminated"]] == ["river"]
    assert found["clean"] == ["metal"]


def test_the_score_without_contaminated_items_is_told(napkin) -> None:
    from napkin.evaluation.tasks import TaskResult, write_result
    from napkin.evaluation.uncertainty import mean_estimate

    scores = [1.0, 0.0]
    result = TaskResult(
        format="napkin-task-result",
        version=1,
        task={},
        model={},
        made_with={},
        scores={"acc": mean_estimate(scores)},
        sections={},
        names=["river", "metal"],
        groups=["", ""],
        item_scores={"acc": scores},
    )
    write_result(Path("result.json"), result)
    options = ("contamination", "trivia.jsonl", "--texts", "corpus.txt", "--result", "result.json")
    found = json.loads(napkin(*options, "--json").out)["scores"]["acc"]
    assert (found["all"]["mean"], found["clean"]["mean"], found["contaminated"]["mean"]) == (0.5, 0.0, 1.0)
    assert "without contaminated ones" in napkin(*options).out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("", "no TASK is given"),
        ("trivia.jsonl", "no text is given"),
        ("trivia.jsonl --token-files train.tokens", "--token-files and --tokenizer belong together"),
        ("trivia.jsonl --token-files train.tokens --tokenizer none.json", "none.json"),
        ("missing.jsonl --texts corpus.txt", "missing.jsonl"),
        ("trivia.jsonl --texts missing", "'missing' does not exist"),
        ("trivia.jsonl --texts corpus.txt --share 0", "share of windows is 0"),
        ("trivia.jsonl --texts corpus.txt --result none.json", "there is no result 'none.json'"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(refusal, arguments: str, complaint: str) -> None:
    assert complaint in refusal("contamination", *arguments.split())
