"""Runs of several ranks that are stopped and resumed, and held against the run of one process."""

import contextlib
import dataclasses
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from napkin.recipe.toml_file import format_recipe
from napkin.recipe.training_config import ParallelismConfig
from oracles.tiny_run import tiny_recipe, write_tiny_text
from reliability.harness import Command, Napkin, checkpoints, figures, lines_of_metrics, wait_until
from reliability.ranks import run_ranks, start_ranks

STEPS = 50
TOLERANCE = 1e-5


def write_recipe(
    napkin: Napkin,
    *,
    n_layers: int = 1,
    optimizer: dict[str, Any] | None = None,
    sizes: dict[str, Any] | None = None,
    **training: Any,
) -> None:
    """Write recipe.toml; `optimizer` and `training` change fields of these tables, `sizes` are those of the layout."""
    settings = {"steps": STEPS, "precision": "fp32", "checkpoint_every": 10, "rank_timeout": 300.0, **training}
    recipe = tiny_recipe(".", **settings)
    recipe = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, n_layers=n_layers),
        optimizer=dataclasses.replace(recipe.optimizer, **optimizer or {}),
        parallelism=ParallelismConfig(**sizes or {}),
    )
    (napkin.folder / "recipe.toml").write_text(format_recipe(recipe))


def train_alone(folder: Path, server: subprocess.Popen[str], **recipe: Any) -> Path:
    """The run of one process, in an empty folder; `recipe` is what `write_recipe` takes."""
    write_tiny_text(folder)
    napkin = Napkin(folder, server)
    write_recipe(napkin, **recipe)
    assert napkin.run("train", "recipe.toml", "--run", "run").wait() == 0
    return folder / "run"


def assert_follows(run: Path, reference: Path, tolerance: float = TOLERANCE) -> float:
    """Every step's figures, to the order of sums; the largest deviation of a loss."""
    there, here = figures(reference), figures(run)
    assert [line["step"] for line in here] == [line["step"] for line in there]
    assert [line["tokens"] for line in here] == [line["tokens"] for line in there]
    for name in ("loss", "validation_loss", "gradient_norm"):
        for one, other in zip(here, there, strict=True):
            assert one[name] == pytest.approx(other[name], abs=tolerance), (name, one["step"])
    return max(abs(one["loss"] - other["loss"]) for one, other in zip(here, there, strict=True))


def start_and_stop(napkin: Napkin, size: int, *, whom: int) -> int:
    """Train for some steps, until SIGTERM comes to one rank; the step after which all have stopped."""
    run = napkin.folder / "run"
    if size == 1:
        ranks = [napkin.start("train", "recipe.toml", "--run", "run")]
    else:
        ranks = start_ranks(napkin, size, "train", "recipe.toml", "--run", "run", refuse_pickles=True)
    wait_until(lambda: lines_of_metrics(run) >= 12, ranks[0])
    ranks[whom].send(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [128 + signal.SIGTERM] * size, [rank.errors for rank in ranks]
    assert [len(rank.errors) for rank in ranks] == [1] + [0] * (size - 1)
    assert "napkin resume run" in ranks[0].errors[0]
    assert 12 <= checkpoints(run)[-1] == figures(run)[-1]["step"] < STEPS
    return checkpoints(run)[-1]


def take_up(napkin: Napkin, size: int, run: str) -> None:
    if size == 1:
        resumed = napkin.run("resume", run, refuse_pickles=True)
        assert (resumed.status, resumed.errors) == (0, [])
    else:
        ranks = run_ranks(napkin, size, "resume", run, refuse_pickles=True)
        assert [rank.errors for rank in ranks] == [[]] * size


def kill_rank(job: Command, rank: int) -> None:
    """`kill -9` for one rank of a launcher's."""
    for child in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.environ().get("RANK") == str(rank):
                child.kill()
