"""Runs as the studio follows them: beside what the library reads, while files grow, are replaced, and are damaged."""

import dataclasses
import json
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from napkin.runs.metrics import METRICS_FILE, MetricsFile, StepMetrics, read_metrics
from napkin.studio import runs
from napkin.studio.runs import RunIndex
from oracles.browser import Browser
from reliability.harness import Napkin
from studio.conftest import PATIENCE, Studio, started

HOSTILE = "<img src=x onerror=document.title='taken'>"
RECIPE = '[model]\nn_layers = {}\n[training]\nsteps = 1000\n[tracking]\nproject = "{}"\n'


def logged(step: int, scale: float = 1.0) -> StepMetrics:
    return StepMetrics(
        step=step,
        tokens=128 * step,
        loss=scale * (2 + 3 / step) if step != 7 else math.nan,
        learning_rate=1e-3,
        gradient_norm=0.5 + 0.1 * math.sin(step),
        seconds=0.5 * step,
        step_seconds=0.5,
        tokens_per_second=256.0,
        mfu=0.25,
        bytes=10**6,
        validation_loss=scale * 2.5 if step % 100 == 0 else None,
        figures={"reward": step / 1000} if scale > 1 else None,
    )


def make_run(folder: Path, steps: int, *, scale: float = 1.0, layers: int = 2) -> MetricsFile:
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"format": "napkin-run", "version": 2}))
    (folder / "recipe.toml").write_text(RECIPE.format(layers, HOSTILE))
    file = MetricsFile(folder)
    for step in range(1, steps + 1):
        file.append(logged(step, scale))
    return file


def test_curves_are_those_that_the_library_reads(tmp_path: Path) -> None:
    make_run(tmp_path / "one", 300, scale=2.0)
    found = RunIndex(tmp_path).curves("one", 1000)
    expected = list(read_metrics(tmp_path / "one" / METRICS_FILE))
    assert found["steps"] == [each.step for each in expected]
    assert found["tokens"] == [each.tokens for each in expected]
    for name in ("loss", "gradient_norm", "validation_loss"):
        values = [getattr(each, name) for each in expected]
        told = [None if each is None or math.isnan(each) else pytest.approx(each, rel=1e-5) for each in values]
        assert found["curves"][name] == told
    assert found["curves"]["reward"][-1] == pytest.approx(0.3)


def test_a_curve_is_thinned_with_its_extremes_and_a_part_is_seen_closer(tmp_path: Path) -> None:
    file = make_run(tmp_path / "one", 3000)
    file.append(dataclasses.replace(logged(3001), loss=99.0))
    index = RunIndex(tmp_path)
    whole = index.curves("one", 50)
    assert len(whole["steps"]) < 700
    assert max(each for each in whole["curves"]["loss"] if each is not None) == 99.0
    part = index.curves("one", 50, 1000, 1040)
    assert part["steps"] == list(range(1000, 1041))


def test_a_file_that_grows_is_read_on_and_one_that_was_replaced_again(tmp_path: Path) -> None:
    file = make_run(tmp_path / "one", 100)
    index = RunIndex(tmp_path)
    assert index.curves("one", 1000)["end"] == 100
    path = tmp_path / "one" / METRICS_FILE
    file.append(logged(101))
    with open(path, "ab") as growing:
        growing.write(b'{"step": 102, "tok')
        growing.flush()
        # What is being written is not yet there, and is not damaged.
        assert (index.curves("one", 1000)["end"], index.curves("one", 1000)["damaged"]) == (101, 0)
        growing.write(b"\xff\n")
    assert index.curves("one", 1000)["damaged"] == 1
    MetricsFile(tmp_path / "one").rewind(50, last_logged=50)
    assert index.curves("one", 1000)["end"] == 50
    shutil.rmtree(tmp_path / "one")
    assert RunIndex(tmp_path).runs() == []


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abc":
        make_run(tmp_path / name, 200)
    index = RunIndex(tmp_path)
    size = index._follow("a").size
    monkeypatch.setattr(runs, "MOST_CURVE_BYTES", 2 * size)
    for name in "bca":
        assert index.curves(name, 1000)["end"] == 200
    assert list(index._followed) == ["c", "a"]


def test_a_name_is_no_path(tmp_path: Path) -> None:
    make_run(tmp_path / "inside" / "one", 3)
    make_run(tmp_path / "outside", 3)
    index = RunIndex(tmp_path / "inside")
    for name in ("../outside", "/etc", "one/../../outside", "", "one/."):
        with pytest.raises(runs.NapkinError, match="there is no run"):
            index.curves(name, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first", 400, layers=2)
    make_run(folder / "sweep" / HOSTILE.replace("/", ""), 300, scale=2.0, layers=4)
    return folder


@pytest.fixture(scope="module")
def watched(folder: Path, tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Iterator[Studio]:
    with started(Napkin(tmp_path_factory.mktemp("place"), server), str(folder)) as studio:
        yield studio


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
def test_runs_are_drawn_grow_and_are_compared(watched: Studio, folder: Path, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(watched.address)
        browser.open(f"http://127.0.0.1:{watched.port}/runs")
        browser.wait_for("document.querySelectorAll('#list li').length === 2 && document.body.dataset.drawn === '8'")
        # Names and recipes of runs are text.
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.run("document.title") == "Runs · napkin"
        assert HOSTILE.replace("/", "") in browser.run("document.querySelector('#list').innerText")
        table = browser.run("document.querySelector('#table').innerText")
        assert "model.n_layers" in table
        assert "tracking.project" not in table
        said = "document.querySelector('[data-curve=loss]').ariaLabel"
        assert "first from 5.0000 to 2.0075" in browser.run(said)

        # A run that trains is drawn on.
        file = MetricsFile(folder / "first")
        file.last_step = 400
        file.append(dataclasses.replace(logged(401), loss=1.25))
        end = time.monotonic() + PATIENCE
        while "to 1.2500" not in browser.run(said):
            assert time.monotonic() < end
            time.sleep(0.1)

        # Another axis, a closer look, and one run alone.
        browser.run(
            "(e => { e.value = 'steps'; e.dispatchEvent(new Event('input')); })(document.querySelector('#axis'))"
        )
        box = browser.run("(b => [b.x, b.y, b.width])(document.querySelector('.u-over').getBoundingClientRect())")
        at = [box[0] + part * box[2] for part in (0.25, 0.5)]
        mouse = {"y": box[1] + 40, "button": "left", "clickCount": 1}
        browser.do("Input.dispatchMouseEvent", type="mouseMoved", x=at[0], y=mouse["y"])
        browser.do("Input.dispatchMouseEvent", type="mousePressed", x=at[0], **mouse)
        browser.do("Input.dispatchMouseEvent", type="mouseMoved", x=at[1], y=mouse["y"], button="left")
        browser.do("Input.dispatchMouseEvent", type="mouseReleased", x=at[1], **mouse)
        browser.wait_for(f"!{said}.includes('to 1.2500')")
        browser.run("document.querySelector('#whole').click()")
        browser.wait_for(f"{said}.includes('to 1.2500')")
        browser.run("document.querySelector('#none').click()")
        browser.wait_for("!document.querySelector('#empty').hidden && !document.querySelector('.u-over')")
        browser.run("[...document.querySelectorAll('#list input')].at(-1).click()")
        browser.wait_for("document.querySelector('.u-over') !== null")
        assert browser.run("new URLSearchParams(location.hash.slice(1)).getAll('run').length") == 1
        for width in (390, 2560):
            browser.size(width, 900)
            assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.complaints == []


def test_the_report_of_a_run_is_as_it_is_now(watched: Studio) -> None:
    told = watched.ask("/runs/report?run=first")
    assert told.status == 200
    assert "Content-Security-Policy" in told.content.decode()
    assert "unsafe" not in told.headers["content-security-policy"]
    assert watched.ask("/runs/report?run=../first").status == 422
    for wrong in ("points=x", "points=1", "points=10000000", "from=a"):
        assert watched.ask(f"/api/runs/curves?run=first&{wrong}").status == 400
