"""`napkin data train-classifier`: from files of texts to a model, and to documents that it keeps."""

import json
from pathlib import Path

import pytest


@pytest.mark.thorough
def test_a_classifier_is_trained_and_used(napkin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good").mkdir()
    for i in range(30):
        (tmp_path / "good" / f"{i}.txt").write_text(f"The proof of theorem {i} follows by induction on n.")
    lines = [json.dumps({"text": f"Click here to win prize {i} now!!!"}) for i in range(40)]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    train = "data train-classifier --positive good --negative bad.jsonl --columns 4096 --json"
    done = napkin(*train.split())
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert (told["positives"], told["negatives"], told["model"]) == (30, 40, "quality.model")
    assert told["held_out"]["accuracy"] == 1.0

    again = napkin(*train.split())
    assert again.status == 2
    assert "'quality.model' exists" in again.err

    kept = "data classifier good bad.jsonl --model quality.model --min-score 0.5 --out corpus --workers 1 --json"
    done = napkin(*kept.split())
    assert done.status == 0, done.err
    assert json.loads(done.out)["manifest"]["documents"] == 30
