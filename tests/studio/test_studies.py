"""Sweeps, laws and evaluations on their pages, beside what the commands' own functions say of the same files."""

import dataclasses
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from napkin.errors import NapkinError
from napkin.evaluation.bits_per_byte import bits_result
from napkin.evaluation.tasks.results import FORMAT, VERSION, TaskResult, write_result
from napkin.evaluation.text_windows import SampledBits
from napkin.evaluation.uncertainty import mean_estimate
from napkin.json_files import format_json, write_json
from napkin.scaling.fitted_law import read_law
from napkin.scaling.law_fit import fit_law
from napkin.scaling.observations import EXAMPLE, read_observations, read_run_observations
from napkin.scaling.sweep import SWEEP_FILE, SweepFile
from napkin.studio.runs import RunIndex
from napkin.studio.studies import Studies
from oracles.browser import Browser
from reliability.harness import Napkin
from studio.conftest import Studio, started
from studio.test_studio_runs import HOSTILE, logged, make_run

RATES, WIDTHS = (1e-4, 1e-3, 1e-2), (64, 128, 256)


def task_result(model: str, task: str, right: int, items: int = 40) -> TaskResult:
    scores = [float(number < right) for number in range(items)]
    names = [str(number) for number in range(items)]
    estimate = mean_estimate(scores, names)
    about = {"name": task, "score": "acc"}
    made = {"napkin": "0"}
    return TaskResult(
        FORMAT, VERSION, about, {"name": model}, made, {"acc": estimate}, {}, names, [""] * items, {"acc": scores}
    )


def make_law(folder: Path) -> None:
    """Finished runs of the sizes and losses of published ones, and the law that fits them."""
    published = read_observations(EXAMPLE).runs[:120:4]
    for number, run in enumerate(published):
        place = folder / f"run-{number}"
        file = make_run(place, 0)
        row = {"quantity": "parameters", "unit": "count", "rule": None, "count": run.parameters, "note": ""}
        device = {"name": "x", "kind": "cpu", "matmul_peak": 1e12, "format": "fp32", "memory_bytes": 10**9}
        plan = {"napkin": "0", "created": "2026-11-20T10:00:00+00:00", "device": device, "steps": 1, "fits": True}
        plan |= {"tokens_per_step": 1, "seconds": 1.0, "peak_by_category": {}, "seconds_by_operator": {}}
        plan |= {"flops_by_phase": {"forward": run.compute}, "table": [row]}
        write_json(place / "plan.json", plan)
        file.append(dataclasses.replace(logged(1), tokens=int(run.tokens), validation_loss=run.loss))
    found = read_run_observations([str(path) for path in sorted(folder.iterdir())])
    fit_law(found.runs, "chinchilla", draws=20).law.write(folder / "law.json")


def make_studies(folder: Path) -> None:
    """A sweep of nine runs, a law, evaluations of four models, one of them with a name that would be markup."""
    generator = random.Random(3)
    trials = {}
    for rate in RATES:
        for width in WIDTHS:
            name = f"lr={rate:g},width={width}" if (rate, width) != (1e-3, 128) else "one"
            file = make_run(folder / "grid" / name, 0)
            (folder / "grid" / name / "recipe.toml").write_text("[training]\nsteps = 100\n")
            loss = 3 + abs(np.log10(rate) + 3) + 64 / width + generator.gauss(0, 0.01)
            for step in (1, 50, 100):
                file.append(dataclasses.replace(logged(step), validation_loss=loss if step == 100 else None))
            trials[name] = {"optimizer.learning_rate": rate, "model.d_model": width, "optimizer.name": HOSTILE}
    trials["not-begun"] = {"optimizer.learning_rate": 1.0, "model.d_model": 64, "optimizer.name": "muon"}
    failed = {"not-begun": HOSTILE}
    write_json(folder / "grid" / SWEEP_FILE, SweepFile(runs=trials, failed=failed))
    make_law(folder / "laws")
    evaluations = folder / "grid" / "one" / "evaluations"
    evaluations.mkdir()
    for model, right in (("small", 11), ("large", 31), (HOSTILE, 20)):
        write_result(evaluations / f"arc-{right}.json", task_result(model, "arc", right))
    bits = SampledBits(1.25, 0.01, 1.23, 1.27, 50, 100, 1000, 2000, 4000, 64, 64, 0, 2.9, 2.5)
    result = bits_result(bits, {"name": "held-out.txt", "sha256": "0"}, {"name": "small"}, {"napkin": "0"})
    (evaluations / "bits-per-byte.json").write_text(format_json(result))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studies")
    make_studies(folder)
    return folder


def test_what_the_commands_have_written_is_found_and_read(folder: Path) -> None:
    studies, index = Studies(folder), RunIndex(folder)
    found = studies.found()
    assert (found["sweeps"], found["laws"], found["problems"]) == (["grid"], ["laws/law.json"], [])
    rows = {(row["model"], row["task"]): row for row in found["evaluations"]}
    assert {model for model, task in rows if task == "arc"} == {"small", "large", HOSTILE}
    row = rows["large", "arc"]
    # Of 31 right among 40: the mean, and the standard error of a share with n - 1.
    assert row["mean"] == pytest.approx(31 / 40)
    assert row["standard_error"] == pytest.approx((31 / 40 * 9 / 40 / 39) ** 0.5)
    assert row["low"] < row["mean"] < row["high"]
    assert rows["small", "held-out.txt"]["mean"] == 1.25

    summaries = {index.known[each["name"]]: each for each in index.runs()}
    sweep = studies.sweep("grid", summaries)
    assert sweep["fields"] == ["optimizer.learning_rate", "model.d_model", "optimizer.name"]
    assert len(sweep["runs"]) == 10
    best = min((run for run in sweep["runs"] if run["loss"] is not None), key=lambda run: run["loss"])
    assert best["values"][:2] == [1e-3, 256]
    assert (best["step"], best["steps"]) == (100, 100)
    assert sweep["runs"][-1]["failed"] == HOSTILE

    law, shown = read_law(folder / "laws" / "law.json"), studies.law("laws/law.json")
    curve, points = shown["curves"][0], shown["points"]
    assert len(points) == shown["runs_fitted"] == len(read_observations(EXAMPLE).runs[:120:4])
    for place in (0, 20, 47):
        expected = law.optimum(curve["flops"][place]).loss
        assert (curve["loss"][place], curve["low"][place], curve["high"][place]) == pytest.approx(
            (expected.estimate, expected.low, expected.high)
        )
    assert curve["flops"][-1] == pytest.approx(100 * max(point["flops"] for point in points))
    for name in ("../grid", "", "laws", "laws/law.json/"):
        with pytest.raises(NapkinError, match="there is no"):
            studies.law(name)
        with pytest.raises(NapkinError, match="there is no"):
            studies.sweep(f"../{name}", {})


def test_files_that_are_damaged_or_lead_elsewhere_are_named_or_left_out(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "inside"
    shutil.copytree(folder, place)
    (tmp_path / "outside").mkdir()
    shutil.copytree(folder / "grid", tmp_path / "outside" / "grid")
    (place / "link").symlink_to(tmp_path / "outside")
    (place / "grid" / "one" / "evaluations" / "broken.json").write_text('{"format": "napkin-task-result", "version"')
    (place / "grid" / "one" / "evaluations" / "other.json").write_text("[1, 2]")
    (place / "laws" / "2-law.json").write_text("{}")
    found = Studies(place).found()
    assert found["sweeps"] == ["grid"]
    assert len(found["problems"]) == 1
    assert "broken.json" in found["problems"][0]
    with pytest.raises(NapkinError, match=r"2-law\.json"):
        Studies(place).law("laws/2-law.json")


@pytest.fixture(scope="module")
def watched(folder: Path, tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Iterator[Studio]:
    with started(Napkin(tmp_path_factory.mktemp("place"), server), str(folder)) as studio:
        yield studio


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
def test_sweeps_laws_and_evaluations_are_drawn_and_chosen(watched: Studio, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(watched.address)
        browser.open(f"http://127.0.0.1:{watched.port}/scaling")
        browser.wait_for("document.body.dataset.ready === 'scaling'")
        assert browser.run("document.querySelectorAll('#lines path.line').length") == 10
        count = "document.querySelector('#count').textContent"
        assert browser.run(count) == "10 of 10 runs"
        first = "document.querySelector('#runs tbody tr').innerText"
        assert browser.run(first).startswith("lr=0.001,width=256")
        # By dragging along an axis: its upper half are the wider models.
        box = browser.run(
            "(b => [b.x + b.width / 2, b.y, b.height])"
            "(document.querySelector('[data-axis=\"model.d_model\"]').getBoundingClientRect())"
        )
        mouse = {"button": "left", "clickCount": 1}
        browser.do("Input.dispatchMouseEvent", type="mousePressed", x=box[0], y=box[1] + 0.02 * box[2], **mouse)
        browser.do("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1] + 0.5 * box[2], button="left")
        browser.do("Input.dispatchMouseEvent", type="mouseReleased", x=box[0], y=box[1] + 0.5 * box[2], **mouse)
        browser.wait_for(f"{count} === '3 of 10 runs'")
        assert browser.run("document.querySelectorAll('#runs tbody tr').length") == 3
        chosen = "new URLSearchParams(document.querySelector('#draw').hash.slice(1)).getAll('run').length"
        assert browser.run(chosen) == 3
        browser.run("document.querySelector('#clear').focus()")
        browser.press("Enter")
        browser.wait_for(f"{count} === '10 of 10 runs'")
        # By fields alone, and sorted by a head that has the focus.
        choose = "(e => {{ e.value = '{}'; e.dispatchEvent(new Event('input')); }})(document.querySelector('{}'))"
        browser.run(choose.format("loss", "#field"))
        browser.run("document.querySelector('#to').focus()")
        browser.type("3.4")
        expected = "document.querySelectorAll('#runs tbody tr').length === 1"
        browser.wait_for(expected)
        browser.run("document.querySelector('#clear').click()")
        browser.run("document.querySelectorAll('#runs thead button')[0].focus()")
        browser.press("Enter")
        browser.wait_for(f"{first}.startsWith('lr=0.0001,width=64')")
        browser.press("Enter")
        browser.wait_for(f"{first}.startsWith('one')")
        # The law with its runs.
        said = browser.run("document.querySelector('#law-chart').ariaLabel")
        assert "best loss, 90% interval from" in said
        assert "runs from" in said
        assert browser.run("document.querySelectorAll('#coefficients tbody tr').length") >= 5
        assert browser.run("document.querySelectorAll('img').length") == 0

        browser.open(f"http://127.0.0.1:{watched.port}/evaluations")
        browser.wait_for("document.body.dataset.ready === 'evaluations'")
        assert browser.run("document.querySelectorAll('.dots').length") == 2
        assert browser.run("document.querySelectorAll('.dots circle').length") == 4
        assert "large 77.5% ± 6.7%" in browser.run("document.querySelector('.dots svg').ariaLabel")
        browser.run(choose.format("arc", "#task"))
        assert browser.run("document.querySelectorAll('#table tbody tr').length") == 3
        assert browser.run("document.querySelectorAll('img').length") == 0
        for page in ("scaling", "evaluations"):
            browser.open(f"http://127.0.0.1:{watched.port}/{page}")
            browser.wait_for(f"document.body.dataset.ready === '{page}'")
            for width in (390, 2560):
                browser.size(width, 900)
                assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.complaints == []
