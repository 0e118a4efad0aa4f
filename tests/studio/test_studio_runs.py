"""Runs as the studio follows them: beside what the library reads, while files grow, are replaced, and are damaged."""

import dataclasses
import json
import math
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from napkin.runs.metrics import METRICS_FILE, MetricsFile, StepMetrics, read_metrics
from napkin.studio import curves, run_routes, runs
from napkin.studio.run_routes import in_words
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


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


Points = dict[str, list[tuple[float, float]]]


def points_of(content: bytes) -> tuple[Points, dict]:
    """What `RunIndex.curves` answers: points by run, and what is said of them."""
    length = int.from_bytes(content[:4], "little")
    told = json.loads(content[4 : 4 + length])
    numbers = memoryview(content[4 + length :]).cast("d")
    found, at = Points(), 0
    for run in told["runs"]:
        n = run["n"]
        found[run["name"]] = [*zip(numbers[at : at + n], numbers[at + n : at + 2 * n], strict=True)]
        at += 2 * n
    assert at == len(numbers)
    return found, told


def curve(index: RunIndex, name: str, curve: str = "loss", axis: str = "steps", points: int = 1000, **part):
    return points_of(index.curves([name], curve, axis, points, **part))[0][name]


@pytest.mark.parametrize("axis", ["steps", "tokens", "seconds"])
def test_curves_are_those_that_the_library_reads(tmp_path: Path, axis: str) -> None:
    make_run(tmp_path / "one", 300, scale=2.0)
    index, expected = RunIndex(tmp_path), list(read_metrics(tmp_path / "one" / METRICS_FILE))
    index.runs()
    place = {"steps": "step"}.get(axis, axis)
    for name in ("loss", "gradient_norm", "validation_loss"):
        known = [each for each in expected if (value := getattr(each, name)) is not None and not math.isnan(value)]
        found = curve(index, "one", name, axis, 10_000)
        assert [x for x, _ in found] == [getattr(each, place) for each in known]
        assert [y for _, y in found] == pytest.approx([getattr(each, name) for each in known], rel=1e-6)
    assert curve(index, "one", "reward")[-1] == (300, pytest.approx(0.3))
    assert points_of(index.curves(["one"], "loss", "steps", 10))[1]["figures"] == ["reward"]


def test_a_long_run_is_kept_in_buckets_with_all_extremes_and_its_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what a loop over the lines finds, however the file has grown."""
    monkeypatch.setattr(curves, "CHUNK", 2**13)
    generator = random.Random(5)
    losses = [generator.gauss(3, 1) for _ in range(7001)]
    losses[4711], losses[13] = 99.0, math.nan
    make_run(tmp_path / "one", 0)
    index, file = RunIndex(tmp_path), MetricsFile(tmp_path / "one")
    for step, loss in enumerate(losses, 1):
        file.append(dataclasses.replace(logged(step), loss=loss))
        if generator.random() < 0.02:
            index.curves(["one"], "loss", "steps", 100)
    found = curve(index, "one", points=100)
    run = index._follow("one").curves
    assert run.rows == 7001
    assert run.width == 8
    assert len(run.buckets) == math.ceil(7001 / 8)
    assert (4712, 99.0) in found
    assert len(found) <= 102
    # The buckets are merged by eighteen: 144 lines each.
    for number in range(0, 7001, 144):
        known = [(step, loss) for step, loss in enumerate(losses, 1) if number < step <= number + 144 and loss == loss]
        extremes = {min(known, key=lambda each: each[1]), max(known, key=lambda each: each[1])}
        within = [each for each in found if number < each[0] <= number + 144]
        assert [x for x, _ in within] == sorted(x for x, _ in extremes)
        assert sorted(y for _, y in within) == pytest.approx(sorted(y for _, y in extremes))
    means = curve(index, "one", points=100, means=True)
    assert len(means) == math.ceil(len(run.buckets) / 9)
    known = [loss for loss in losses[72:144] if loss == loss]
    assert means[1] == (pytest.approx(73 + 36, abs=1), pytest.approx(sum(known) / len(known), rel=1e-5))

    # A part of it, so close that the file is read again: every line of it.
    close = curve(index, "one", points=100, begin=3000, end=3050)
    assert {*range(3000, 3051)} <= {int(x) for x, _ in close}
    assert len(close) < 120
    assert [y for _, y in close] == pytest.approx([losses[int(x) - 1] for x, _ in close])


def test_a_long_file_is_sampled_at_first_and_then_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "SAMPLED_BYTES", 2**14)
    file = make_run(tmp_path / "one", 2000)
    file.append(dataclasses.replace(logged(2001), loss=99.0))
    file.append(logged(2002))
    index = RunIndex(tmp_path)
    first, told = points_of(index.curves(["one"], "loss", "steps", 600))
    assert told["runs"][0]["sampled"]
    assert 100 < len(first["one"]) <= curves.SAMPLES + 1
    assert (first["one"][0][0], first["one"][-1][0]) == (1, 2002)
    losses = {each.step: each.loss for each in read_metrics(tmp_path / "one" / METRICS_FILE)}
    assert all(y == pytest.approx(losses[int(x)], rel=1e-6) for x, y in first["one"])
    wait_for(lambda: not points_of(index.curves(["one"], "loss", "steps", 600))[1]["runs"][0]["sampled"])
    assert (2001, 99.0) in curve(index, "one", points=600)
    # From now on it is read where it grows.
    file.append(logged(2003))
    assert curve(index, "one", points=600)[-1][0] == 2003


def test_a_file_that_grows_is_read_on_and_one_that_was_replaced_again(tmp_path: Path) -> None:
    file = make_run(tmp_path / "one", 100)
    index = RunIndex(tmp_path)
    assert curve(index, "one")[-1][0] == 100
    path = tmp_path / "one" / METRICS_FILE
    file.append(logged(101))

    def damaged() -> int:
        return points_of(index.curves(["one"], "loss", "steps", 10))[1]["runs"][0]["damaged"]

    with open(path, "ab") as growing:
        growing.write(b'{"step": 102, "tok')
        growing.flush()
        # What is being written is not yet there, and is not damaged.
        assert (curve(index, "one")[-1][0], damaged()) == (101, 0)
        growing.write(b"\xff\n")
    assert damaged() == 1
    MetricsFile(tmp_path / "one").rewind(50, last_logged=50)
    assert curve(index, "one")[-1][0] == 50
    shutil.rmtree(tmp_path / "one")
    assert curve(index, "one")[-1][0] == 50
    assert RunIndex(tmp_path).runs() == []


HOSTILE_LINES = [
    b"",
    b"null",
    b"[" * 100_000,
    b'{"step": 1e999}',
    b'{"step": -1}',
    b'{"step": 12, "loss": 1e300, "figures": {"x": 1e300}}',
    b'{"step": 13, "loss": "3"}',
    b'{"step": 14, "loss": NaN}',
    b'{"step": 1' + b"0" * 500 + b"}",
    b'{"step": 15, "figures": {' + b",".join(b'"f%d": 1' % number for number in range(2000)) + b"}}",
    b"x" * 2**20,
    b"\x00\xff\xfe",
]


def test_lines_that_are_not_of_napkin_are_counted_and_take_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "LONGEST_LINE", 2**19)
    make_run(tmp_path / "one", 5)
    with open(tmp_path / "one" / METRICS_FILE, "ab") as file:
        file.write(b"\n".join([*HOSTILE_LINES, b'{"step": 99, "loss": 1.5}', b""]))
    index = RunIndex(tmp_path)
    assert curve(index, "one")[-1] == (99, 1.5)
    wait_for(lambda: index.n_waiting == 0)
    # Those that are of a step, whose loss is no number that can be drawn, leave a gap.
    assert [x for x, _ in curve(index, "one")] == [1, 2, 3, 4, 5, 99]
    run = index._follow("one")
    assert 8 <= run.damaged <= 11
    assert len(run.curves.names) <= curves.MOST_FIGURES + len(curves.NAMES)
    assert index.runs()[0]["step"] == 99


def test_what_is_kept_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcd":
        make_run(tmp_path / name, 1000)
    index = RunIndex(tmp_path)
    whole = curve(index, "a", points=10_000)
    size = index._follow("a").size
    monkeypatch.setattr(runs, "MOST_CURVE_BYTES", 2 * size)
    for name in "abcd":
        assert curve(index, name)[-1][0] == 1000
    # All are there, each with fewer buckets, and still with its extremes.
    assert list(index._followed) == ["a", "b", "c", "d"]
    assert index._kept_bytes() <= 2 * size
    assert max(y for _, y in curve(index, "a")) == max(y for _, y in whole)
    monkeypatch.setattr(runs, "MOST_CURVE_BYTES", index._follow("a").size // 8)
    for name in "bca":
        assert curve(index, name)[-1][0] == 1000
    assert list(index._followed) == ["a"]


def test_a_name_is_no_path(tmp_path: Path) -> None:
    make_run(tmp_path / "inside" / "one", 3)
    make_run(tmp_path / "outside", 3)
    index = RunIndex(tmp_path / "inside")
    for name in ("../outside", "/etc", "one/../../outside", "", "one/."):
        with pytest.raises(runs.NapkinError, match="there is no run"):
            index.path_of(name)
        assert points_of(index.curves([name], "loss", "steps", 10))[0] == {}


def test_ten_thousand_folders_links_and_folders_that_vanish(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    for number in range(10_000):
        place = inside / f"{number % 100:02}" / f"{HOSTILE.replace('/', '')}-{number}"
        place.mkdir(parents=True)
        (place / "run.json").touch()
    make_run(tmp_path / "outside", 3)
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "circle").symlink_to(inside)
    make_run(inside / "odd", 3)
    # A file that never ends to be read, and a recipe that no parser of TOML reads.
    (inside / "odd" / METRICS_FILE).unlink()
    os.mkfifo(inside / "odd" / METRICS_FILE)
    (inside / "odd" / "recipe.toml").write_text("a" + ".a" * 5000 + " = 1\n[training]\nsteps = 9\n")
    index = RunIndex(inside)
    wait_for(lambda: all("sampled" in run for run in index.runs()))
    found = [run["name"] for run in index.runs()]
    assert len(found) == len({*found}) == 10_001
    assert not any(name.startswith(("link", "circle")) for name in found)
    assert points_of(index.curves(["odd"], "loss", "steps", 10))[0] == {"odd": []}
    assert [each["field"] for each in index.differences(["odd", found[0]])] == []
    shutil.rmtree(inside / "odd")
    assert points_of(index.curves(["odd"], "loss", "steps", 10))[0] == {"odd": []}
    with pytest.raises(runs.NapkinError):
        in_words(index, "odd")


def test_a_long_run_is_told_by_a_bounded_part_of_its_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path / "long", 5000)
    index, file = RunIndex(tmp_path), tmp_path / "long" / METRICS_FILE
    index.runs()
    whole = in_words(index, "long")
    monkeypatch.setattr(run_routes, "MOST_METRICS_BYTES", 2**16)
    part = in_words(index, "long")
    assert {**part, "warnings": None} == {**whole, "warnings": None}
    lost, read = part["warnings"]
    assert lost.startswith("The loss was not finite at 1 of ")
    assert lost.endswith(" logged steps, of those that were read, first at step 7.")
    assert read.startswith("Of 5,000 logged steps ")
    few = curves.telling_lines(file, most=16)
    steps = [each.step for each in few.metrics]
    assert len(steps) <= 4 * 16
    assert len(steps) + few.left_out == 5000
    assert (steps[0], steps[-1]) == (1, 5000)
    # A line that no parser reads is one that was not read.
    file.write_bytes(file.read_bytes() + b"{\n")
    assert [each.step for each in curves.telling_lines(file, most=16).metrics] == steps


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
        browser.wait_for("document.body.dataset.drawn === '8'")
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
        # Along and closer by keys alone; the mean of a group with its range; both axes logarithmic.
        place = "document.querySelector('[data-curve=loss]')"
        browser.run(f"{place}.focus()")
        for key, is_so in (("+", f"!{said}.includes('to 1.2500')"), ("0", f"{said}.includes('to 1.2500')")):
            browser.run(f"{place}.dispatchEvent(new KeyboardEvent('keydown', {{ key: '{key}', bubbles: true }}))")
            browser.wait_for(is_so)
        for _ in range(3):
            browser.press("ArrowRight")
        browser.wait_for(f"!{said}.includes('from 5.0000')")
        browser.run("document.querySelector('#whole').click()")
        browser.wait_for(f"{said}.includes('to 1.2500')")
        choose = "(e => {{ e.value = '{}'; e.dispatchEvent(new Event('input')); }})(document.querySelector('#group'))"
        browser.run(choose.format("folder"))
        browser.wait_for(f"{said}.includes('sweep (1 run) from')")
        browser.run(choose.format(""))
        browser.wait_for(f"{said}.includes('first from')")
        for box in ("logarithmic", "logarithmic-x"):
            browser.run(f"document.querySelector('#{box}').click()")
        browser.wait_for("document.body.dataset.drawn === '8'")
        browser.hover("[data-curve=loss] .u-over")
        browser.wait_for(f"{place}.querySelector('.at').textContent.includes('first ')")
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
    asked = {"runs": ["first"], "curve": "loss"}
    assert watched.ask("/api/runs/curves", asked).status == 200
    for wrong in (
        {"points": "x"},
        {"points": 1},
        {"points": 10**7},
        {"begin": "a"},
        {"axis": "days"},
        {"runs": "first"},
    ):
        assert watched.ask("/api/runs/curves", {**asked, **wrong}).status == 400
    # A plan is needed for these.
    assert points_of(watched.ask("/api/runs/curves", {**asked, "axis": "flops"}).content)[0] == {}
