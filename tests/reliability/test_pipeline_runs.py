"""Whole runs whose layers are on several ranks: they end well whatever becomes of a rank, and go on elsewhere."""

import signal
from typing import Any

import pytest

from reliability.harness import Napkin, lines_of_metrics, wait_until
from reliability.rank_runs import assert_follows, take_up, train_alone, write_recipe
from reliability.ranks import start_ranks

RECIPE: dict[str, Any] = {"steps": 24, "checkpoint_every": 8, "micro_batch_size": 1, "n_layers": 6}


@pytest.mark.torture
def test_a_lost_rank_ends_the_pipeline_with_a_line_and_the_run_goes_on(
    napkin: Napkin, tmp_path_factory: pytest.TempPathFactory, server: Any
) -> None:
    alone = train_alone(tmp_path_factory.mktemp("alone"), server, **RECIPE)
    write_recipe(napkin, sizes={"pipeline": 3, "schedule": "zb-v"}, **RECIPE)
    ranks = start_ranks(napkin, 3, "train", "recipe.toml", "--run", "run", refuse_pickles=True)
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 10, ranks[0])
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
    write_recipe(napkin, sizes={"pipeline": 3, "schedule": schedule}, **RECIPE, rank_timeout=20.0)
    ranks = start_ranks(napkin, 3, "train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 5, ranks[0])
    ranks[1].send(signal.SIGSTOP)
    for rank in (ranks[0], ranks[2]):
        assert rank.wait() == 2
        assert "had no answer from it in 20 s" in rank.errors[0]
    ranks[1].send(signal.SIGKILL)
    ranks[1].wait()
