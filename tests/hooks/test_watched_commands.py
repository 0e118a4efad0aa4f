"""What napkin's commands say of the run of a program that napkin watched: they read it, or name what it is."""

import shutil
import subprocess
from pathlib import Path

import pytest

from hooks.test_watched_loop import quick_price, watched_run  # noqa: F401 - a fixture of this file too
from napkin.report.page import write_report
from reliability.harness import Napkin


@pytest.fixture
def run(tmp_path: Path) -> Path:
    watched_run(run=tmp_path / "runs" / "mine", steps=6, on="H100")
    return tmp_path / "runs" / "mine"


@pytest.mark.thorough
def test_commands_read_the_run_or_name_it(run: Path, server: subprocess.Popen[str]) -> None:
    shutil.copytree(run, run.with_name("other"))
    napkin = Napkin(run.parent.parent, server)
    for reads in (["runs"], ["runs", "runs/mine"], ["report", "runs/mine"], ["runs", "--page", "page.html"]):
        done = napkin.run(*reads)
        assert done.status == 0, done.errors
    for needs_a_model in (
        ["resume", "runs/mine"],
        ["generate", "runs/mine", "--prompts", "hi"],
        ["evaluate", "runs/mine"],
        ["chat", "runs/mine"],
        ["serve", "runs/mine"],
        ["quantize", "runs/mine"],
        ["export", "runs/mine", "--out", "exported"],
        ["diff", "runs/mine", "runs/other"],
        ["train", "--run", "runs/mine"],
    ):
        done = napkin.run(*needs_a_model)
        assert done.status == 2, needs_a_model
        assert len(done.errors) == 1, done.errors
        assert "a program that napkin watched" in done.errors[0], (needs_a_model, done.errors)


def test_the_verdict_is_at_the_top_of_its_page(run: Path) -> None:
    (run / "verdict.txt").write_text("waits for data 31.0% of the time: <b>\nas planned\n")
    page = write_report(run).read_text()
    first = page.index("<li>waits for data 31.0% of the time: &lt;b&gt;</li>")
    assert page.index("<h1>") < first < page.index("<li>as planned</li>") < page.index('id="quantities"')
    (run / "verdict.txt").unlink()
    assert "<li>as planned</li>" not in write_report(run).read_text()
