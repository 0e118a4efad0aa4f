"""No command replaces what napkin did not write as that kind of output, and none writes through a link."""

import json
import os
import shutil
from pathlib import Path

import pytest

from cli.conftest import Napkin

OUTPUTS = (
    ("runs runs/tiny --page {out}", "page.html"),
    ("train tiny.toml --run {out}", "folder"),
    ("export runs/tiny --weights-only --out {out}", "folder"),
    ("tokenizer train docs --out {out}", "tokenizer.json"),
    ("tokenizer import data/tokenizer.json --out {out}", "tokenizer.json"),
    ("tokenizer export data/tokenizer.json --out {out}", "tokenizer.json"),
)


@pytest.mark.parametrize(("command", "name"), OUTPUTS)
@pytest.mark.parametrize("there", ["file", "link", "dangling link", "folder"])
def test_what_is_there_is_refused_and_left_alone(
    napkin: Napkin, place: Path, command: str, name: str, there: str
) -> None:
    out, other = Path(f"out-{name}"), Path("other")
    if there == "folder":
        out.mkdir()
        (out / "kept").write_text("kept")
    elif there == "file":
        out.write_text("kept")
    else:
        if there == "link":
            other.write_text("kept")
        out.symlink_to(other)
    done = napkin(*command.format(out=out).split())
    assert done.status == 2
    assert len(done.err.splitlines()) == 1
    assert f"'{out}" in done.err
    if there == "folder":
        assert [path.name for path in out.iterdir()] == ["kept"]
    elif there == "file":
        assert out.read_text() == "kept"
    else:
        assert os.readlink(out) == "other"
        assert (other.read_text() if there == "link" else other.exists()) == ("kept" if there == "link" else False)


def test_a_comparison_replaces_its_own_page_alone(napkin: Napkin, place: Path) -> None:
    metrics = Path("runs/tiny/metrics.jsonl")
    for path in (metrics, Path("runs/tiny/report.html"), Path("runs/tiny/checkpoints")):
        before = path.read_bytes() if path.is_file() else None
        done = napkin("runs", "runs/tiny", "--page", str(path))
        assert done.status == 2
        assert f"'{path}' exists and is not a page that `napkin runs` wrote" in done.err
        assert before is None or path.read_bytes() == before
    assert napkin("runs", "runs/tiny", "--page", "page.html").status == 0
    first = Path("page.html").read_text()
    assert napkin("runs", "runs/tiny", "--page", "page.html", "--loss", "validation").status == 0
    assert Path("page.html").read_text() != first


def test_samples_that_napkin_did_not_write_are_not_replaced(napkin: Napkin, place: Path) -> None:
    samples = Path("runs/tiny/samples.txt")
    samples.write_text("my own notes\n")
    done = napkin("generate", "runs/tiny", "--save", "--tokens", "3")
    assert done.status == 2
    assert "samples.txt' exists and is not what `napkin generate --save` wrote" in done.err
    assert samples.read_text() == "my own notes\n"
    samples.unlink()
    for _ in range(2):
        assert napkin("generate", "runs/tiny", "--save", "--tokens", "3").status == 0
    assert samples.read_text().startswith("=== 1 (seed ")


@pytest.mark.filterwarnings("always:.*was not written by napkin")
def test_a_report_that_napkin_did_not_write_is_kept_under_another_name(napkin: Napkin, place: Path) -> None:
    report = Path("runs/tiny/report.html")
    assert napkin("report", "runs/tiny").err == ""
    for name in ("report-kept.html", "report-kept-2.html"):
        report.write_text("my own report\n")
        done = napkin("report", "runs/tiny")
        assert done.status == 0
        assert f"it is now '{name}'" in done.err
        assert (report.with_name(name)).read_text() == "my own report\n"
        assert "napkin · run report" in report.read_text()
    # A page of before pages named their generator is still napkin's.
    report.write_text(report.read_text().replace('<meta name="generator" content="napkin report">', ""))
    assert napkin("report", "runs/tiny").err == ""


def test_damaged_metrics_are_named_by_every_command_that_shows_them(napkin: Napkin, place: Path) -> None:
    shutil.copytree("runs/tiny", "runs/copy")
    metrics = Path("runs/copy/metrics.jsonl")
    lines = metrics.read_text().splitlines(keepends=True)
    step = json.loads(lines[3])["step"]
    metrics.write_text("".join([*lines[:3], lines[3].replace('"loss": ', '"loss": 1', 1), *lines[4:]]))
    for command in ("runs runs/copy", "runs", "report runs/copy", "runs --page page.html"):
        done = napkin(*command.split())
        assert done.status == 0
        assert "'runs/copy/metrics.jsonl': damaged line, left out: line 4 (its checksum is" in done.err
    for page in ("runs/copy/report.html", "page.html"):
        assert "damaged line, left out: line 4" in Path(page).read_text()
    resumed = napkin("resume", "runs/copy")
    assert resumed.status == 0
    assert "damaged line, kept in 'runs/copy/metrics.damaged.jsonl': line 4" in resumed.err
    assert json.loads(json.loads(Path("runs/copy/metrics.damaged.jsonl").read_text())["content"])["step"] == step
    assert "1 damaged line is kept in" in Path("runs/copy/report.html").read_text()
    assert step not in [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
