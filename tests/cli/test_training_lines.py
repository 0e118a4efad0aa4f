"""What training prints of its losses: validation and epochs, in the live line and in the summary."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from napkin.cli.common.progress import compose_line
from napkin.cli.train.following import PretrainingLines
from napkin.data import Document, write_token_file
from napkin.data.mixing import TokenMixture
from napkin.runs.metrics import StepMetrics, format_metrics, parse_metrics
from napkin.tokenizer import ByteTokenizer


def lines_of(run: Path) -> PretrainingLines:
    """The lines of 100 steps of 64 tokens, over a training file of 1,280."""
    file = write_token_file(run / "train.tokens", [Document("text", "a" * 1278)], ByteTokenizer(["<|endoftext|>"]))
    assert file.n_tokens == 1280
    return PretrainingLines(run, steps=100, tokens_per_step=64, train_tokens=TokenMixture([file]))


def after(step: int, **figures: Any) -> StepMetrics:
    known = {"step": step, "tokens": 64 * step, "seconds": 1.0, "loss": 3.0, "tokens_per_second": 12300.0, "mfu": 0.45}
    return parse_metrics(json.dumps({**known, "bytes": 812_000_000, **figures}))


def test_the_live_line_has_the_last_validation_loss_and_epochs(tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    assert lines.of_step(after(5)) == "step 5/100  loss 3.000  0.250 epochs  12.3 k tok/s  MFU 45%  812 MB"
    evaluated = lines.of_step(after(50, validation_loss=3.25))
    assert evaluated == "step 50/100  loss 3.000  val 3.250@50  2.50 epochs  12.3 k tok/s  MFU 45%  812 MB"
    assert "val 3.250@50  2.55 epochs" in lines.of_step(after(51))
    assert lines.validation() == "validation loss 3.2500 at step 50"
    lines.of_step(after(60, validation_loss=3.5))
    assert lines.validation() == "validation loss 3.5000 at step 60; the lowest was 3.2500 at step 50"
    lines.of_step(after(70, validation_loss=3.0))
    assert lines.validation() == "validation loss 3.0000 at step 70, the lowest"
    assert lines.trained(70) == "70 steps, 4.48 k tokens, 3.50 epochs of 1.28 k tokens"


def test_a_resumed_run_remembers_its_evaluations_but_not_those_it_repeats(tmp_path: Path) -> None:
    earlier = [after(10, validation_loss=3.1), after(20, validation_loss=2.9), after(30, validation_loss=1.0)]
    (tmp_path / "metrics.jsonl").write_text("".join(map(format_metrics, earlier)))
    lines = lines_of(tmp_path)
    assert "val 2.900@20" in lines.of_step(after(25))


def test_a_narrow_terminal_keeps_losses_and_the_time_left(tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    line = lines.of_step(after(100, validation_loss=3.25))
    shown = compose_line("training runs/run", 0.5, line, "12 min 03 s left", width=77).plain
    assert shown == "step 100/100  loss 3.000  val 3.250@100  5.00 epochs  12 min 03 s left"


def test_a_run_without_validation_says_nothing_of_it(tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    assert "val" not in lines.of_step(after(3))
    assert lines.validation() is None
    assert lines.as_json(3) == {"epochs": pytest.approx(0.15), "validation_loss": None, "lowest_validation_loss": None}


@pytest.mark.thorough
def test_training_ends_with_validation_loss_and_epochs(napkin, place: Path) -> None:
    shutil.rmtree("runs/tiny")
    done = napkin("train", "tiny.toml", "--run", "runs/tiny")
    assert done.status == 0
    summary = re.search(r"trained 6 steps, 384 tokens, ([\d.]+) epochs of [\d.]+(?: k)? tokens", done.out)
    assert summary
    evaluated = [json.loads(line) for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert f"validation loss {evaluated[-1]['validation_loss']:.4f} at step 6" in done.out
    as_json = json.loads(napkin("train", "tiny.toml", "--run", "runs/again", "--json").out)
    assert as_json["epochs"] == pytest.approx(float(summary[1]), rel=0.005)
    assert as_json["validation_loss"] == evaluated[-1]["validation_loss"]
