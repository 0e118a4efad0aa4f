import dataclasses
import importlib.util
import json
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

from napkin.errors import NapkinError
from napkin.recipe.training_config import TrackerName, TrackingConfig
from napkin.runs.metrics import StepMetrics, read_metrics
from napkin.runs.run_folder import RunFolder
from napkin.training.callbacks import TRACKERS, TrackedRun, metrics_of
from napkin.training.pretraining import Pretraining
from napkin.training.run import create_run, prepare, train_run
from oracles.tiny_run import tiny_recipe, with_recipe, write_tiny_text
from peers import peer

STEPS = 9


@pytest.fixture(scope="module")
def preparation(tmp_path_factory: pytest.TempPathFactory) -> Pretraining:
    folder = tmp_path_factory.mktemp("text")
    write_tiny_text(folder)
    recipe = tiny_recipe(folder, steps=STEPS, checkpoint_every=4, evaluate_every=5, log_every=2)
    preparation, _ = create_run(recipe, folder / "run")
    assert isinstance(preparation, Pretraining)
    return preparation


def tracked_by(preparation: Pretraining, *names: Any) -> Pretraining:
    recipe = dataclasses.replace(preparation.recipe, tracking=TrackingConfig(names))
    return with_recipe(preparation, recipe)


def run_in(folder: Path, preparation: Pretraining) -> RunFolder:
    return RunFolder.create(folder / "run", preparation.recipe, preparation.tokenizer)


def stop_after(step: int) -> Any:
    return lambda metrics: signal.raise_signal(signal.SIGTERM) if metrics.step == step else None


class Notebook:
    """A tracker that writes down what it is told."""

    opened: list["Notebook"]

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.told, self.closed = run, [], False
        type(self).opened.append(self)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.told.append((step, metrics))

    def close(self) -> None:
        self.closed = True


class Failing(Notebook):
    def log(self, step: int, metrics: dict[str, float]) -> None:
        super().log(step, metrics)
        if step >= 4:
            raise ConnectionError("no\nnet")


@pytest.fixture
def notebooks(monkeypatch: pytest.MonkeyPatch) -> list[Notebook]:
    Notebook.opened = []
    monkeypatch.setitem(TRACKERS, "wandb", Notebook)
    monkeypatch.setitem(TRACKERS, "trackio", Failing)
    return Notebook.opened


@pytest.mark.torture
def test_a_tracker_is_told_what_metrics_tell_and_goes_on_where_the_run_does(
    preparation: Pretraining, notebooks: list[Notebook], tmp_path: Path
) -> None:
    tracked = tracked_by(preparation, "wandb")
    run = run_in(tmp_path, tracked)
    train_run(tracked, run, on_step=stop_after(4))
    train_run(tracked, run)
    first, second = notebooks
    assert first.closed
    assert second.closed
    assert (first.run.step, second.run.step) == (0, 4)
    assert first.run.identifier == second.run.identifier
    assert [step for step, _ in first.told + second.told] == [2, 4, 5, 6, 8, 9]
    assert [figures for _, figures in first.told + second.told] == [
        metrics_of(line) for line in read_metrics(run.path / "metrics.jsonl")
    ]


@pytest.mark.thorough
def test_a_tracker_that_fails_is_named_once_and_stops_nothing(
    preparation: Pretraining, notebooks: list[Notebook], tmp_path: Path
) -> None:
    tracked = tracked_by(preparation, "trackio", "wandb")
    said: list[str] = []
    outcome = train_run(tracked, run_in(tmp_path, tracked), on_message=said.append)
    assert outcome.step == STEPS
    assert said == ["tracker trackio has failed and is disabled (no net); metrics.jsonl has everything"]
    failed, well = notebooks
    assert [step for step, _ in failed.told] == [2, 4]
    assert [step for step, _ in well.told] == [2, 4, 5, 6, 8, 9]


@pytest.mark.thorough
def test_a_run_without_trackers_leaves_no_trace_of_any(
    preparation: Pretraining, notebooks: list[Notebook], tmp_path: Path
) -> None:
    run = run_in(tmp_path, preparation)
    train_run(preparation, run)
    assert not notebooks
    assert not (run.path / "tracking.json").exists()


def test_figures_are_numbers_and_experts_are_told_by_their_balance() -> None:
    metrics = StepMetrics(
        3, 30, 2.5, 0.1, 1.0, 9.0, 3.0, 10.0, 0.4, 1000, expert_tokens=[[4, 4], [6, 2]], dropped_tokens=[0, 3]
    )
    figures = metrics_of(metrics)
    assert figures["busiest_expert"] == 1.5
    assert figures["dropped_tokens"] == 3.0
    assert figures["loss"] == 2.5
    assert all(type(value) is float for value in figures.values())
    assert not {"step", "validation_loss", "expert_tokens"} & figures.keys()


@pytest.mark.parametrize("name", get_args(TrackerName))
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_made(
    preparation: Pretraining, name: TrackerName
) -> None:
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    with pytest.raises(NapkinError, match=f"tracking.trackers.*{name}.*`pip install {name}`"):
        prepare(tracked_by(preparation, name).recipe)


@pytest.mark.peers
def test_tensorboard_shows_the_whole_run_once(preparation: Pretraining, tmp_path: Path) -> None:
    accumulator = peer("tensorboard.backend.event_processing.event_accumulator")
    tracked = tracked_by(preparation, "tensorboard")
    run = run_in(tmp_path, tracked)
    train_run(tracked, run, on_step=stop_after(6))
    # A kill: the steps after the last checkpoint are done again.
    (run.checkpoints / "step-00000006").rename(tmp_path / "away")
    train_run(tracked, run)
    events = accumulator.EventAccumulator(str(run.path / "tensorboard")).Reload()
    lines = list(read_metrics(run.path / "metrics.jsonl"))
    shown = {event.step: event.value for event in events.Scalars("loss")}
    assert list(shown) == [line.step for line in lines]
    assert list(shown.values()) == pytest.approx([line.loss for line in lines])
    assert [event.step for event in events.Scalars("validation_loss")] == [5, 9]


@pytest.mark.peers
def test_wandb_keeps_one_run_over_two_processes(
    preparation: Pretraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracked = tracked_by(preparation, "wandb")
    run = run_in(tmp_path, tracked)
    train_run(tracked, run, on_step=stop_after(4))
    train_run(tracked, run)
    identifier = json.loads((run.path / "tracking.json").read_text())["id"]
    kept = list((run.path / "wandb").glob("offline-run-*"))
    assert kept
    assert all(folder.name.endswith(identifier) for folder in kept)


@pytest.mark.peers
def test_trackio_keeps_one_run_over_two_processes(
    preparation: Pretraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Read once, when it is imported, which other libraries do too.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    peer("trackio")
    tracked = tracked_by(preparation, "trackio")
    run = run_in(tmp_path, tracked)
    train_run(tracked, run, on_step=stop_after(4))
    train_run(tracked, run)
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, step from metrics order by step").fetchall()
    steps = [step for _, step in rows]
    # trackio writes from a thread of its own, which drops a batch where its database is busy.
    assert set(steps) <= {2, 4, 5, 6, 8, 9}
    assert len(set(steps)) == len(steps)
    assert min(steps) <= 4 < max(steps)
    assert len({name for name, _ in rows}) == 1
