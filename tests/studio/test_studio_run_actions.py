"""Runs that a page starts, stops and resumes: real processes of this machine; and who is refused."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from napkin.checkpoint.folder import checkpoint_paths, read_checkpoint
from napkin.errors import NapkinError
from napkin.recipe.toml_file import format_recipe, read_recipe
from napkin.recipe.tuning_recipe import RECIPE_OF
from napkin.runs.metrics import METRICS_FILE, read_metrics
from napkin.runs.run_folder import is_being_trained
from napkin.studio.run_processes import RunProcesses, lock_holder
from oracles.browser import Browser
from oracles.tiny_run import tiny_recipe, write_tiny_text
from oracles.tiny_tuning import make_start, tuning_recipe, write_conversations
from reliability.harness import Napkin
from studio.conftest import PATIENCE, Studio, started
from studio.test_studio_runs import HOSTILE, make_run

MANY_STEPS = 100_000


def wait_for(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def newest_step(run: Path) -> int:
    """The step of an intact checkpoint."""
    return max(read_checkpoint(path).state.step for path in checkpoint_paths(run / "checkpoints"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for runs; what still trains in it afterwards is ended."""
    place = tmp_path / "runs"
    place.mkdir()
    write_tiny_text(place)
    (place / "long.toml").write_text(format_recipe(tiny_recipe(place, steps=MANY_STEPS, checkpoint_every=MANY_STEPS)))
    yield place
    for run in place.glob("*/.lock"):
        if (holder := lock_holder(run.parent)) is not None:
            os.kill(holder, signal.SIGKILL)


@pytest.fixture
def studio(folder: Path, server: subprocess.Popen[str]) -> Iterator[Studio]:
    with started(Napkin(folder.parent, server), str(folder), "--allow-actions") as studio:
        yield studio


def test_a_run_is_started_stopped_and_resumed_and_outlives_the_studio(
    folder: Path, server: subprocess.Popen[str]
) -> None:
    run = folder / "made-here"
    with started(Napkin(folder.parent, server), str(folder), "--allow-actions") as studio:
        recipe = {"recipe": (folder / "long.toml").read_text()}
        assert studio.ask("/api/runs/start", {"name": "made-here", **recipe}).status == 200
        assert studio.ask("/api/runs/start", {"name": "made-here", **recipe}).status == 422
        wait_for(lambda: (run / METRICS_FILE).is_file() and is_being_trained(run))
        studio.ask("/api/runs")
        wait_for(lambda: "napkin train" in studio.ask("/api/runs/log?run=made-here").json["log"])
        assert studio.ask("/api/runs/resume", {"name": "made-here"}).status == 422
        holder = lock_holder(run)
        assert holder is not None
        assert studio.ask("/api/runs/stop", {"name": "made-here"}).status == 200
        wait_for(lambda: not is_being_trained(run))
        # What Ctrl-C does: the step ended, and a checkpoint is there.
        stopped_at = newest_step(run)
        assert 0 < stopped_at < MANY_STEPS
        assert studio.ask("/api/runs/stop", {"name": "made-here"}).status == 422
        wait_for(lambda: studio.ask("/api/runs").json["started"]["made-here"] != "runs")
        assert studio.ask("/api/runs/resume", {"name": "made-here"}).status == 200
        wait_for(lambda: is_being_trained(run) and [*read_metrics(run / METRICS_FILE)][-1].step > stopped_at)
        resumed = lock_holder(run)
        assert resumed not in (None, holder)
    # The studio has ended, the run has not; one that is started anew stops it.
    assert is_being_trained(run)
    assert lock_holder(run) == resumed
    with started(Napkin(folder.parent, server), str(folder), "--allow-actions") as studio:
        studio.ask("/api/runs")
        assert studio.ask("/api/runs/stop", {"name": "made-here"}).status == 200
        wait_for(lambda: not is_being_trained(run))
        assert newest_step(run) > stopped_at


def test_tuning_is_started_planned_stopped_and_resumed(folder: Path, studio: Studio) -> None:
    make_start(folder)
    for name, seed in (("train", 0), ("held_out", 1)):
        write_conversations(folder / f"{name}.jsonl", 30, seed)
    run, recipe = folder / "tuned", tuning_recipe(folder, steps=MANY_STEPS, checkpoint_every=MANY_STEPS)
    assert studio.ask("/api/runs/start", {"name": "tuned", "recipe": format_recipe(recipe)}).status == 200
    wait_for(lambda: (run / METRICS_FILE).is_file() and [*read_metrics(run / METRICS_FILE)])
    assert (run / "plan.json").is_file()
    studio.ask("/api/runs")
    wait_for(lambda: "napkin tune sft" in studio.ask("/api/runs/log?run=tuned").json["log"])
    assert studio.ask("/api/runs/stop", {"name": "tuned"}).status == 200
    wait_for(lambda: not is_being_trained(run))
    stopped_at = newest_step(run)
    wait_for(lambda: studio.ask("/api/runs").json["started"]["tuned"] != "runs")
    assert studio.ask("/api/runs/resume", {"name": "tuned"}).status == 200
    wait_for(lambda: [*read_metrics(run / METRICS_FILE)][-1].step > stopped_at)


def test_a_recipe_to_fill_in_is_offered_for_each_way_of_tuning(folder: Path, studio: Studio) -> None:
    offered = studio.ask("/api/runs/recipes").json
    for method, kind in RECIPE_OF.items():
        assert f"tune {method}" in offered
        recipe = studio.ask(f"/api/runs/recipe?name=tune%20{method}").json["recipe"]
        told = studio.ask("/api/runs/start", {"name": "new", "recipe": recipe})
        assert (told.status, "tuning.start is empty" in told.json["error"]) == (422, True)
        # What is filled in is the same recipe with every field: nothing else was chosen for the user.
        (folder / "filled.toml").write_text(recipe)
        assert read_recipe(folder / "filled.toml") == kind()
    assert not (folder / ".studio" / "new.toml").exists()
    told = studio.ask("/api/runs/recipe?name=tune%20what")
    assert told.status == 422


def test_what_would_change_something_is_refused(folder: Path, server: subprocess.Popen[str], studio: Studio) -> None:
    make_run(folder / "one", 3)
    asked = {"start": {"name": "new", "recipe": (folder / "long.toml").read_text()}}
    asked |= {"stop": {"name": "one"}, "resume": {"name": "one"}}
    studio.ask("/api/runs")
    for what, body in asked.items():
        path = f"/api/runs/{what}"
        assert studio.ask(path).status == 405
        # Of a page elsewhere, of none that says so, and without the token.
        for wrong in ({"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "none"}, {"origin": "http://evil.example"}):
            assert studio.ask(path, body, headers=wrong).status == 403
        assert studio.ask(path, body, as_page=False).status == 403
        assert studio.ask(path, body, with_token=False).status == 403
    place = folder.parent / "elsewhere"
    place.mkdir()
    with started(Napkin(place, server), str(folder)) as reader:
        assert not reader.ask("/api/runs").json["allow_actions"]
        for what, body in asked.items():
            told = reader.ask(f"/api/runs/{what}", body)
            assert (told.status, "--allow-actions" in told.json["error"]) == (403, True)
    assert not (folder / "new").exists()
    assert not (folder / ".studio").exists()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../out", "/etc/x", "a/b", ".hidden", "x" * 101, "a\0b", "-run", "one"]
)
def test_a_new_run_has_a_name_that_is_no_path_and_is_free(folder: Path, name: str) -> None:
    make_run(folder / "one", 3)
    before = sorted(each.name for each in folder.rglob("*"))
    with pytest.raises(NapkinError):
        RunProcesses(folder).start(name, (folder / "long.toml").read_text())
    assert sorted(each.name for each in folder.rglob("*")) == before


@pytest.mark.parametrize("recipe", ["[model", "[model]\nd_modell = 3\n", "x = 1", "\0"])
def test_a_recipe_that_cannot_be_trained_is_refused_in_a_line(studio: Studio, recipe: str) -> None:
    told = studio.ask("/api/runs/start", {"name": "new", "recipe": recipe})
    assert told.status == 422
    assert "\n" not in told.json["error"]


def test_only_the_process_that_holds_the_lock_is_its_holder(folder: Path) -> None:
    make_run(folder / "one", 3)
    run = folder / "one"
    assert lock_holder(run) is None
    # A process that has the file open, and one that was forked from the holder, do not hold it.
    code = "import fcntl, os, sys, time; f = open(sys.argv[1], 'a'); "
    holds = code + "fcntl.flock(f, fcntl.LOCK_EX); print(os.getpid(), flush=True); os.fork() or time.sleep(600); "
    holder = subprocess.Popen([sys.executable, "-c", holds + "time.sleep(600)", run / ".lock"], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        with holder.stdout as told:
            pid = int(told.readline())
        reader = subprocess.Popen([sys.executable, "-c", code + "time.sleep(600)", run / ".lock"])
        assert lock_holder(run) == pid
        reader.kill()
        reader.wait()
    finally:
        children = subprocess.run(["pgrep", "-P", str(holder.pid)], capture_output=True, text=True, check=False)
        holder.kill()
        holder.wait()
    # Its child keeps the lock, and is not asked to stop in its place.
    assert is_being_trained(run)
    assert lock_holder(run) is None
    with pytest.raises(NapkinError, match="where it was started"):
        RunProcesses(folder).stop("one", run)
    for child in children.stdout.split():
        os.kill(int(child), signal.SIGKILL)


def test_this_process_does_not_stop_itself(folder: Path) -> None:
    make_run(folder / "one", 3)
    with open(folder / "one" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert lock_holder(folder / "one") is None


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
def test_a_run_is_started_and_stopped_with_the_keyboard(folder: Path, studio: Studio, tmp_path: Path) -> None:
    (folder / "hostile.toml").write_text((folder / "long.toml").read_text().replace('"napkin"', f'"{HOSTILE}"'))
    with Browser(tmp_path / "profile") as browser:
        browser.open(studio.address)
        browser.open(f"http://127.0.0.1:{studio.port}/runs")
        browser.wait_for("!document.querySelector('#actions').hidden")
        browser.run("document.querySelector('#begin').focus()")
        browser.press("Enter")
        browser.wait_for("document.querySelector('#start').open")
        browser.run("document.querySelector('#start-name').focus()")
        browser.type("by-page")
        browser.run(
            "(e => { e.value = 'tune sft'; e.dispatchEvent(new Event('input')); })"
            "(document.querySelector('#start-recipe'))"
        )
        browser.wait_for("document.querySelector('#start-text').value.includes('tuning')")
        browser.run(
            "(e => { e.value = 'hostile.toml'; e.dispatchEvent(new Event('input')); })"
            "(document.querySelector('#start-recipe'))"
        )
        browser.wait_for("document.querySelector('#start-text').value.includes('onerror')")
        browser.picture(tmp_path / "start.png")
        browser.run("document.querySelector('#start-yes').focus()")
        browser.press("Enter")
        browser.wait_for("location.pathname === '/run' && document.querySelector('#stop')?.hidden === false")
        browser.wait_for("document.querySelector('#log').textContent.includes('napkin train')")
        assert browser.run("document.querySelectorAll('img').length") == 0
        browser.run("document.querySelector('#stop').focus()")
        browser.press("Enter")
        browser.wait_for("document.querySelector('#sure').open")
        browser.press("Escape")
        browser.wait_for("!document.querySelector('#sure').open")
        assert is_being_trained(folder / "by-page")
        browser.press("Enter")
        browser.wait_for("document.querySelector('#sure').open && document.activeElement.id === 'yes'")
        browser.press("Enter")
        wait_for(lambda: not is_being_trained(folder / "by-page"))
        browser.wait_for("!document.querySelector('#resume').hidden")
        browser.wait_for("document.querySelector('#status').textContent.startsWith('Stopped at step')")
        for width in (390, 2560):
            browser.size(width, 900)
            assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.complaints == []
    assert json.loads((folder / "by-page" / "run.json").read_text())["format"] == "napkin-run"
