"""A run of several ranks is killed, and goes on in another layout, on another number of ranks, or in one process."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from napkin.recipe.training_config import ParallelismConfig
from napkin.runs.run_folder import RunFolder
from reliability.harness import Napkin, checkpoints, figures, lines_of_metrics, wait_until
from reliability.rank_runs import assert_follows, train_alone, write_recipe
from reliability.ranks import run_ranks, start_ranks

STEPS = 24
RECIPE: dict[str, Any] = {"steps": STEPS, "checkpoint_every": 8, "micro_batch_size": 1, "n_layers": 2}
Sizes = dict[str, Any]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, server: Any) -> Path:
    """The run of one process."""
    return train_alone(tmp_path_factory.mktemp("alone"), server, **RECIPE)


def options(sizes: Sizes) -> list[str]:
    named = {f"--parallelism.{name.replace('_', '-')}": size for name, size in sizes.items()}
    return [word for name, size in named.items() for word in ([name] if size is True else [name, str(size)])]


def kill_a_rank(napkin: Napkin, sizes: Sizes, size: int, *, whom: int, at: int) -> None:
    """Train until a rank is killed, after some steps."""
    write_recipe(napkin, sizes=sizes, **RECIPE)
    ranks = start_ranks(napkin, size, "train", "recipe.toml", "--run", "run", refuse_pickles=True)
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= at, ranks[0])
    ranks[whom].send(signal.SIGKILL)
    statuses = [rank.wait() for rank in ranks]
    assert statuses[whom] == -signal.SIGKILL, [rank.errors for rank in ranks]
    assert set(statuses[:whom] + statuses[whom + 1 :]) == ({2} if size > 1 else set())
    assert checkpoints(napkin.folder / "run")[-1] in range(at // 8 * 8 - 8, STEPS)


def resume(napkin: Napkin, size: int, sizes: Sizes, run: str = "run") -> list[str]:
    """Continue on so many ranks to the end. Returns what rank 0 says on its standard error."""
    if size == 1:
        resumed = napkin.run("resume", run, *options(sizes), refuse_pickles=True)
        assert resumed.status == 0, resumed.errors
        return resumed.errors
    ranks = run_ranks(napkin, size, "resume", run, *options(sizes), refuse_pickles=True)
    assert [rank.errors for rank in ranks[1:]] == [[]] * (size - 1)
    return ranks[0].errors


@pytest.mark.torture
def test_four_ranks_killed_as_a_pipeline_of_tensor_ranks_go_on_as_four_shards(napkin: Napkin, alone: Path) -> None:
    kill_a_rank(napkin, {"tensor": 2, "pipeline": 2}, 4, whom=3, at=10)
    run = napkin.folder / "run"
    shutil.copytree(run, napkin.folder / "on-1")
    [message] = resume(napkin, 4, {"shard": 4})
    assert "the recipe has changed since" in message
    assert "parallelism.shard is 4, was None" in message
    assert "parallelism.tensor is 1, was 2, parallelism.pipeline is 1, was 2" in message
    print(assert_follows(run, alone))
    assert RunFolder.open(run).recipe.parallelism == ParallelismConfig(shard=4)
    assert not RunFolder.open(run).recipe_was_changed
    # A single process has only one layout.
    assert resume(napkin, 1, {}, "on-1") == []
    assert_follows(napkin.folder / "on-1", alone)
    for command in (["evaluate"], ["generate", "--tokens", "5"]):
        used = napkin.run(command[0], "run", *command[1:], refuse_pickles=True)
        assert (used.status, used.errors) == (0, [])


LAYOUTS: dict[int, list[Sizes]] = {
    1: [{}],
    2: [{"shard": 2}, {"tensor": 2}, {"pipeline": 2}, {"data": 2, "shard_optimizer": True}],
    4: [
        {"shard": 4},
        {"tensor": 2, "pipeline": 2},
        {"data": 2, "shard": 2},
        {"pipeline": 2, "data": 2},
        {"pipeline": 2, "shard": 2},
        {"tensor": 2, "shard": 2},
        {"tensor": 2, "data": 2},
        {"data": 4, "shard_optimizer": True},
    ],
}
ALL = [(size, sizes) for size, layouts in LAYOUTS.items() for sizes in layouts]


@pytest.mark.torture
@pytest.mark.parametrize("number", range(len(ALL)))
def test_a_run_goes_through_three_layouts_and_is_killed_in_each(napkin: Napkin, alone: Path, number: int) -> None:
    first, second, third = (ALL[(number + step) % len(ALL)] for step in (0, 5, 9))
    kill_a_rank(napkin, first[1], first[0], whom=number % first[0], at=10)
    run = napkin.folder / "run"
    ranks = start_ranks(napkin, second[0], "resume", "run", *options(second[1]), refuse_pickles=True)
    wait_until(lambda: [line["step"] for line in figures(run)][-1:] >= [18], ranks[0])
    ranks[number % second[0]].send(signal.SIGKILL)
    assert {rank.wait() for rank in ranks} <= {-signal.SIGKILL, 2}
    resume(napkin, *third)
    print(first, second, third, assert_follows(run, alone))
