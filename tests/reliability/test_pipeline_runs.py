"""Whole runs whose layers are on several ranks: they end well whatever becomes of a rank, and go on elsewhere."""

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest

from napkin.recipe.parallelism_config import ParallelismConfig
from napkin.recipe.toml_file import format_recipe
from oracles.tiny_run import tiny_recipe
from reliability.harness import Napkin, lines_of_metrics, wait_until
from reliability.ranks import start_ranks
from reliability.test_several_ranks import assert_follows, take_up


def write_recipe(napkin: Napkin, parallelism: ParallelismConfig, **training: Any) -> None:
    settings = {"steps": 30, "precision": "fp32", "checkpoint_every": 10, "micro_batch_size": 1, "rank_timeout": 300.0}
    recipe = tiny_recipe(".", **{**settings, **training})
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, n_layers=6), parallelism=parallelism)
    (napkin.folder / "recipe.toml").write_text(format_recipe(recipe))


def train_alone(napkin: Napkin) -> Path:
    write_recipe(napkin, ParallelismConfig())
    assert napkin.run("train", "recipe.toml", "--run", "alone").wait() == 0
    return napkin.folder / "alone"


def test_a_lost_rank_ends_the_pipeline_with_a_line_and_the_run_goes_on(napkin: Napkin) -> None:
    alone = train_alone(napkin)
    write_recipe(napkin, ParallelismConfig(pipeline=3, schedule="zb-v"))
    ranks = start_ranks(napkin, 3, "train", "recipe.toml", "--run", "run", refuse_pickles=True)
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 12, ranks[0])
    ranks[1].send(signal.SIGKILL)
    for rank in (ranks[0], ranks[2]):
        assert rank.wait() == 2
        assert len(rank.errors) == 1, rank.errors
        assert "has lost another rank" in rank.errors[0]
    take_up(napkin, 3, "run")
    assert_follows(napkin.folder / "run", alone)


@pytest.mark.torture
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_a_rank_that_does_not_answer_ends_the_pipeline(napkin: Napkin, schedule: Any) -> None:
    write_recipe(napkin, ParallelismConfig(pipeline=3, schedule=schedule), rank_timeout=20.0)
    ranks = start_ranks(napkin, 3, "train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 5, ranks[0])
    ranks[1].send(signal.SIGSTOP)
    for rank in (ranks[0], ranks[2]):
        assert rank.wait() == 2
        assert "had no answer from it in 20 s" in rank.errors[0]
    ranks[1].send(signal.SIGKILL)
    ranks[1].wait()
