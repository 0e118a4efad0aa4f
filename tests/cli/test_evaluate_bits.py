"""`napkin evaluate RUN --text FILE --error 0.01`, and the comparison of two such results."""

import json
from pathlib import Path

import pytest


def test_a_text_is_sampled_until_the_error_is_small_enough(napkin, place: Path) -> None:
    plan = napkin("evaluate", "runs/tiny", "--text", "docs", "--error", "0.05", "--plan", "--usd-per-hour", "9")
    assert "windows, timed here" in plan.out
    assert not Path("runs/tiny/evaluations").exists()
    done = napkin("evaluate", "runs/tiny", "--text", "docs", "--error", "0.05", "--stride", "4")
    assert done.status == 0, done.err
    assert "windows of 16 tokens, stride 4, each document by itself" in done.out
    (path,) = Path("runs/tiny/evaluations").glob("bits-per-byte-*.json")
    result = json.loads(path.read_text())
    assert result["bits"]["standard_error"] <= 0.05
    assert str(path) in done.out


@pytest.mark.torture
def test_models_of_two_tokenizers_are_compared_on_one_text_only(napkin, refusal, place: Path) -> None:
    sizes = "--model.d-model 16 --model.n-layers 1 --model.n-heads 2 --model.context-length 16 --training.steps 2"
    data = "--data.train one/train.tokens --data.validation None --data.tokenizer one/tokenizer.json --run runs/one"
    assert napkin("train", *data.split(), *sizes.split(), "--training.batch-size", "2").status == 0
    for run, out, text in (("runs/tiny", "a", "docs"), ("runs/one", "b", "docs"), ("runs/one", "c", "one.txt")):
        done = napkin("evaluate", run, "--text", text, "--max-tokens", "400", "--out", f"{out}.json")
        assert done.status == 0, done.err
    done = napkin("evaluate", "--compare", "a.json", "b.json")
    assert "bits per byte, 95% from" in done.out
    assert "different texts (docs" in refusal("evaluate", "--compare", "a.json", "c.json")
    assert "'a.json' exists" in refusal("evaluate", "runs/tiny", "--text", "docs", "--out", "a.json")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("runs/tiny --stride 99", "a stride of 99 is not possible: choose from 1 to 16"),
        ("runs/tiny --error -1", "an error of -1.0 bits per byte is not possible"),
        ("runs/tiny --text docs --tokens data/validation.tokens", "--text and --tokens are two texts"),
        ("runs/tiny --text docs --task one.txt", "'--task' does not go with --text, which is `napkin evaluate text`"),
        ("runs/tiny --plan", "'--plan' is an option of `napkin evaluate text` and `napkin evaluate task`"),
        ("runs/tiny --text missing", "'missing' does not exist"),
        ("runs/tiny --tokens missing --max-tokens 5", "there is no token file 'missing'"),
        ("runs/tiny --tokens one/validation.tokens --max-tokens 5", "was made by another tokenizer"),
    ],
)
def test_what_cannot_be_measured_is_one_line(refusal, place: Path, arguments: str, complaint: str) -> None:
    assert complaint in refusal("evaluate", *arguments.split())
