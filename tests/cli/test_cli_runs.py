"""`napkin runs`: the list and the comparison."""

import json
import shutil
from pathlib import Path

import pytest

from napkin.runs.run_folder import RunFolder, is_being_trained


def test_runs_are_listed_and_compared(napkin, place: Path) -> None:
    listed = napkin("runs")
    assert listed.status == 0
    assert "tiny" in listed.out
    assert "finished" in listed.out
    assert "at equal" not in listed.out
    shutil.copytree("runs/tiny", "runs/copy")
    done = napkin("runs", "--over", "steps", "--page", "page.html", "--loss", "training")
    assert "training loss, nats per token, at equal steps" in done.out
    assert Path("page.html").read_text().count('data-chart="') == 2
    # Runs that were evaluated are compared by validation loss, unless the other is asked for.
    assert "validation loss, nats per token, at equal steps" in napkin("runs", "--over", "steps").out
    found = json.loads(napkin("runs", "runs/tiny", "runs/copy", "--over=steps", "--loss=training", "--json").out)
    assert [run["name"] for run in found["runs"]] == ["tiny", "copy"]
    assert found["points"][-1] == 6
    assert found["losses"]["runs/tiny"] == found["losses"]["runs/copy"]


def test_runs_of_one_name_are_told_apart_and_a_broken_one_is_left_out(napkin, place: Path) -> None:
    for folder in ("more/tiny", "more/broken"):
        shutil.copytree("runs/tiny", folder)
    Path("more/broken/plan.json").write_text("{")
    done = napkin("runs", "runs", "more")
    assert done.status == 0
    assert done.err.startswith("left out: 'more/broken/plan.json' is malformed")
    assert "runs/tiny" in done.out
    assert "more/tiny" in done.out


def test_a_run_is_in_training_while_a_process_holds_it(place: Path) -> None:
    run = RunFolder.open("runs/tiny")
    assert not is_being_trained(run.path)
    with run.locked():
        assert is_being_trained(run.path)
    assert not is_being_trained(run.path)
    assert not is_being_trained(place / "docs")


def test_what_cannot_be_compared_is_refused(refusal, place: Path) -> None:
    shutil.rmtree("runs")
    assert "there is no folder 'runs' here" in refusal("runs")
    assert "--points is 0" in refusal("runs", "docs", "--points", "0")
    assert "'docs' is not a run and contains none" in refusal("runs", "docs")
    assert "--usd-per-hour is -1.0" in refusal("runs", "docs", "--usd-per-hour=-1")


def test_an_overfitted_run_is_named_and_is_not_the_best(napkin, place: Path) -> None:
    shutil.copytree("runs/tiny", "runs/overfitted")
    write_losses(Path("runs/tiny"), [(4.0, 4.1), (3.0, 3.2), (2.5, 2.9)])
    write_losses(Path("runs/overfitted"), [(4.0, 4.1), (2.0, 3.3), (0.5, 3.9)])
    said = napkin("runs").out
    assert "tiny has the lowest validation loss, 2.9000 nats per token at step 3." in said
    assert "The lowest training loss is that of overfitted, 0.5000. It does not make that run the best" in said
    assert "overfitted is overfitted: the validation loss rose from its lowest, 3.3000 at step 2, to 3.9000" in said
    found = json.loads(napkin("runs", "--json").out)
    assert found["loss"] == "validation"
    assert [run["overfitted"] for run in found["runs"]] == [True, False]
    assert [run["best_validation_step"] for run in found["runs"]] == [2, 3]


def write_losses(run: Path, losses: list[tuple[float, float]]) -> None:
    lines = [
        {"step": step, "tokens": 64 * step, "seconds": float(step), "loss": training, "validation_loss": validation}
        for step, (training, validation) in enumerate(losses, 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("content", [b'{"format": "\xe4\x00"}', b"[" * 100_000, b"{", b""])
def test_a_damaged_tokenizer_does_not_keep_a_run_from_being_listed(napkin, place: Path, content: bytes) -> None:
    shutil.copytree("runs/tiny", "runs/damaged")
    Path("runs/damaged/tokenizer.json").write_bytes(content)
    listed = napkin("runs")
    assert listed.status == 0, listed.err
    assert "damaged" in listed.out


@pytest.mark.parametrize("text", ["data", "."], ids=["with its folder", "beside its runs"])
def test_a_run_that_was_moved_with_its_text_is_evaluated_and_quantized(napkin, place: Path, text: str) -> None:
    here = json.loads(napkin("evaluate", "runs/tiny", "--json").out)
    project = place / "elsewhere" / "project"
    shutil.copytree("runs", project / "runs")
    (project / text).mkdir(exist_ok=True)
    for file in Path("data").glob("*.tokens*"):
        file.rename(project / text / file.name)
    # Of the same name, nearer, and another tokenizer's: another text.
    for file in Path("one").glob("validation.tokens*"):
        shutil.copy(file, project / "runs" / file.name)
    assert napkin("evaluate", "runs/tiny").status == 2
    run = str(project / "runs" / "tiny")
    assert json.loads(napkin("evaluate", run, "--json").out) == here
    assert json.loads(napkin("quantize", run, "--json").out)["tokens"] == here["tokens"]
