"""Several ranks train the run that one trains, whatever becomes of one of them."""

import dataclasses
import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as load_with_torch

from napkin.checkpoint.folder import read_checkpoint
from napkin.checkpoint.restore import load_model
from napkin.model.transformer import Transformer
from napkin.recipe.toml_file import format_recipe
from napkin.recipe.training_config import ParallelismConfig, TrackingConfig
from napkin.runs.run_folder import RunFolder
from oracles.tiny_run import tiny_recipe
from reliability.conftest import Tally
from reliability.harness import Napkin, checkpoints, figures, lines_of_metrics, start_python, wait_until
from reliability.rank_runs import STEPS, assert_follows, kill_rank, start_and_stop, take_up, train_alone, write_recipe
from reliability.ranks import environment_of, free_port, run_ranks, start_ranks, start_torchrun


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, server: Any) -> Path:
    """The run of one process."""
    return train_alone(tmp_path_factory.mktemp("alone"), server)


@pytest.mark.parametrize(
    ("parallelism", "micro_batch_size"),
    [
        ("ddp", 1),
        # Both of them follow one when they are stopped and resumed, below.
        *(pytest.param(parallelism, None, marks=pytest.mark.torture) for parallelism in ("ddp", "fsdp")),
    ],
)
def test_two_ranks_follow_one(napkin: Napkin, alone: Path, parallelism: str, micro_batch_size: int | None) -> None:
    write_recipe(napkin, parallelism=parallelism, micro_batch_size=micro_batch_size)
    first, second = run_ranks(napkin, 2, "train", "recipe.toml", "--run", "run", refuse_pickles=True)
    print(parallelism, assert_follows(napkin.folder / "run", alone))
    # Rank 0 speaks for both.
    assert "trained 50 steps" in first.out.read_text()
    assert (second.out.read_text(), second.errors) == ("", [])


def test_experts_that_two_ranks_divide_are_planned_trained_and_reconciled(napkin: Napkin) -> None:
    # Without a capacity, how many tokens the ranks send each other is known only when a step runs.
    recipe = tiny_recipe(".", steps=6, precision="fp32", checkpoint_every=6, rank_timeout=300.0)
    recipe = dataclasses.replace(
        recipe,
        model=dataclasses.replace(recipe.model, n_experts=4),
        parallelism=ParallelismConfig(data=2, expert=2),
    )
    (napkin.folder / "recipe.toml").write_text(format_recipe(recipe))
    first, _ = run_ranks(napkin, 2, "train", "recipe.toml", "--run", "run", refuse_pickles=True)
    assert "distributed evenly" in first.out.read_text()
    assert [sum(layer) for line in lines_of(napkin) for layer in line["expert_tokens"]] == [
        2 * recipe.tokens_per_step
    ] * 6


def lines_of(napkin: Napkin) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (napkin.folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.torture
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_four_ranks_follow_one(napkin: Napkin, alone: Path, parallelism: str, micro_batch_size: int) -> None:
    write_recipe(napkin, parallelism=parallelism, micro_batch_size=micro_batch_size)
    run_ranks(napkin, 4, "train", "recipe.toml", "--run", "run", refuse_pickles=True)
    print(parallelism, assert_follows(napkin.folder / "run", alone))


@pytest.mark.torture
# torch tells that its reader is alone.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_four_ranks_saved_is_taken_up_by_one_and_by_two(napkin: Napkin, alone: Path) -> None:
    write_recipe(napkin, parallelism="fsdp")
    stopped_at = start_and_stop(napkin, 4, whom=2)
    saved = napkin.folder / "run" / "checkpoints" / f"step-{stopped_at:08d}"
    assert len(list(saved.glob("model-*-of-00004.safetensors"))) == 4
    assert_torch_reads_the_same(saved)
    evaluated = napkin.run("evaluate", "run", refuse_pickles=True)
    assert evaluated.status == 0, evaluated.errors
    for size in (1, 2):
        shutil.copytree(napkin.folder / "run", napkin.folder / f"on-{size}")
        if size == 2:
            # The one before it was saved right after an evaluation.
            shutil.rmtree(napkin.folder / f"on-{size}" / "checkpoints" / saved.name)
        take_up(napkin, size, f"on-{size}")
        assert_follows(napkin.folder / f"on-{size}", alone)


def assert_torch_reads_the_same(checkpoint: Path) -> None:
    """torch.distributed.checkpoint's reader of safetensors, and napkin's."""
    recipe = RunFolder.open(checkpoint.parent.parent).recipe
    model = Transformer(recipe.model)
    load_model(read_checkpoint(checkpoint), model)
    theirs = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    load_with_torch(theirs, storage_reader=HuggingFaceStorageReader(str(checkpoint)), no_dist=True)
    for name, parameter in model.named_parameters():
        assert torch.equal(theirs[name], parameter), name


@pytest.mark.thorough
def test_what_one_saved_is_taken_up_by_two(napkin: Napkin, alone: Path) -> None:
    write_recipe(napkin, parallelism="fsdp")
    start_and_stop(napkin, 1, whom=0)
    take_up(napkin, 2, "run")
    assert_follows(napkin.folder / "run", alone)


@pytest.mark.thorough
def test_a_killed_rank_ends_the_others_with_a_line_and_the_run_goes_on(napkin: Napkin, alone: Path) -> None:
    write_recipe(napkin)
    ranks = start_ranks(napkin, 2, "train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 12, ranks[0])
    ranks[1].send(signal.SIGKILL)
    assert ranks[0].wait() == 2
    assert len(ranks[0].errors) == 1
    assert "has lost another rank" in ranks[0].errors[0]
    take_up(napkin, 2, "run")
    assert_follows(napkin.folder / "run", alone)


@pytest.mark.thorough
def test_a_signal_to_one_rank_stops_all_with_a_checkpoint(napkin: Napkin, alone: Path) -> None:
    write_recipe(napkin)
    ranks = start_ranks(napkin, 2, "train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 12, ranks[0])
    ranks[1].send(signal.SIGUSR1)
    assert [rank.wait() for rank in ranks] == [128 + signal.SIGUSR1] * 2
    assert [rank.errors for rank in ranks[1:]] == [[]]
    assert "SIGUSR1: checkpoint saved" in ranks[0].errors[0]
    take_up(napkin, 2, "run")
    assert_follows(napkin.folder / "run", alone)


@pytest.mark.torture
@pytest.mark.parametrize("what", [signal.SIGUSR1, signal.SIGKILL])
def test_ranks_that_torchrun_has_left_behind_stop_with_a_checkpoint(
    napkin: Napkin, alone: Path, what: signal.Signals
) -> None:
    write_recipe(napkin, steps=2000, checkpoint_every=2000)
    job = start_torchrun(napkin.folder, 2, "train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 12, job)
    ranks = psutil.Process(job.pid).children()
    # torchrun does not handle this signal.
    job.send(what)
    assert job.wait() == -what
    assert psutil.wait_procs(ranks, timeout=300)[1] == []
    saved = checkpoints(napkin.folder / "run")
    assert saved == [figures(napkin.folder / "run")[-1]["step"]]
    assert saved[0] < 2000
    assert [line for line in job.errors if "checkpoint saved" in line]


@pytest.mark.torture
def test_the_launcher_tells_of_a_lost_rank_in_a_line(napkin: Napkin, alone: Path) -> None:
    write_recipe(napkin)
    launch = ["-m", "napkin.distributed.cluster_job", "--nproc-per-node", "2", "--master-port", str(free_port())]
    run = napkin.folder / "run"
    lost = start_python(napkin.folder, *launch, "-m", "--", "napkin", "train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(run) >= 12, lost)
    kill_rank(lost, 1)
    assert lost.wait() == 128 + signal.SIGKILL
    assert len(lost.errors) <= 2, lost.errors
    assert "rank 1" in lost.errors[-1]
    assert "SIGKILL" in lost.errors[-1]
    take_up(napkin, 2, "run")
    assert_follows(run, alone)


@pytest.mark.torture
def test_torchrun_restarts_the_job_where_it_was(napkin: Napkin, alone: Path) -> None:
    write_recipe(napkin)
    # One for the kill, and one for gloo, which aborts where a caller is gone before it is asked who it was
    # (pytorch/gloo#514); the long form below allows no more than its kills.
    job = start_torchrun(napkin.folder, 2, "train", "recipe.toml", "--run", "run", restarts=2)
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 12, job)
    kill_rank(job, 1)
    assert job.wait() == 0, "\n".join(job.errors)
    assert_follows(napkin.folder / "run", alone)


@pytest.mark.torture
def test_ranks_end_without_taking_the_interpreter_down(napkin: Napkin) -> None:
    write_recipe(napkin, steps=2)
    port = free_port()
    # Threads of gloo abort an interpreter's end now and then: here that end aborts always.
    program = "import atexit, os, sys; atexit.register(os.abort); from napkin.cli import main; sys.exit(main())"
    ranks = [
        start_python(
            napkin.folder,
            *("-c", program, "train", "recipe.toml", "--run", "run"),
            environment=environment_of(rank, 2, port),
        )
        for rank in range(2)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.errors for rank in ranks]
    assert "trained 2 steps" in ranks[0].out.read_text()


TRACKIO = """
import os

def init(project, name, **settings):
    return Run()

def finish():
    pass

class Run:
    def log(self, figures, step):
        with open("told-by-" + os.environ["RANK"], "a") as file:
            print(step, figures["loss"], figures["mfu"], file=file)
"""


@pytest.mark.thorough
def test_rank_zero_alone_tells_the_trackers(napkin: Napkin) -> None:
    # Found before an installed one.
    (napkin.folder / "trackio.py").write_text(TRACKIO)
    recipe = tiny_recipe(".", steps=3, rank_timeout=300.0)
    recipe = dataclasses.replace(recipe, tracking=TrackingConfig(("trackio",)))
    (napkin.folder / "recipe.toml").write_text(format_recipe(recipe))
    run_ranks(napkin, 2, "train", "recipe.toml", "--run", "run")
    lines = lines_of(napkin)
    told = [f"{line['step']} {line['loss']} {line['mfu']}" for line in lines]
    assert (napkin.folder / "told-by-0").read_text().splitlines() == told
    assert not (napkin.folder / "told-by-1").exists()


@pytest.mark.torture
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
@pytest.mark.parametrize("whom", [0, 1, 2, 3])
def test_torchrun_restarts_the_job_whoever_was_lost(napkin: Napkin, alone: Path, parallelism: str, whom: int) -> None:
    write_recipe(napkin, parallelism=parallelism)
    job = start_torchrun(napkin.folder, 4, "train", "recipe.toml", "--run", "run", restarts=3)
    for lines in (4, 23, 38):
        wait_until(lambda lines=lines: lines_of_metrics(napkin.folder / "run") >= lines, job)
        kill_rank(job, whom)
        time.sleep(1.0)
    assert job.wait() == 0, "\n".join(job.errors)
    assert_follows(napkin.folder / "run", alone)


@pytest.mark.torture
def test_a_rank_that_does_not_answer_ends_the_others(napkin: Napkin) -> None:
    write_recipe(napkin, rank_timeout=20.0)
    ranks = start_ranks(napkin, 2, "train", "recipe.toml", "--run", "run")
    wait_until(lambda: lines_of_metrics(napkin.folder / "run") >= 5, ranks[0])
    ranks[1].send(signal.SIGSTOP)
    assert ranks[0].wait() == 2
    assert "had no answer from it in 20 s" in ranks[0].errors[0]
    ranks[1].send(signal.SIGKILL)
    ranks[1].wait()


def test_what_cannot_be_is_said_once(napkin: Napkin) -> None:
    write_recipe(napkin)
    first, *others = start_ranks(napkin, 3, "train", "recipe.toml", "--run", "run")
    assert [first.wait(), *(other.wait() for other in others)] == [2, 2, 2]
    assert len(first.errors) == 1
    assert "training.batch_size 4 does not divide among 3 devices: use a multiple" in first.errors[0]
    assert [other.errors for other in others] == [[], []]
    assert not (napkin.folder / "run").exists()


@pytest.mark.torture
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_sigterm_to_torchrun_saves_and_stops(napkin: Napkin, alone: Path, parallelism: str) -> None:
    write_recipe(napkin, parallelism=parallelism)
    run = napkin.folder / "run"
    job = start_torchrun(napkin.folder, 2, "train", "recipe.toml", "--run", "run", restarts=3)
    wait_until(lambda: lines_of_metrics(run) >= 12, job)
    job.send(signal.SIGTERM)
    assert job.wait() != 0
    assert checkpoints(run)[-1] == figures(run)[-1]["step"] < STEPS
    take_up(napkin, 2, "run")
    assert_follows(run, alone)


@pytest.mark.torture
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
@pytest.mark.parametrize("whom", [0, 1])
@pytest.mark.parametrize("number", [1, 3, 6, 9, 12, 15, 18])
def test_a_kill_inside_a_checkpoint_loses_nothing(
    napkin: Napkin, alone: Path, parallelism: str, whom: int, number: int, tally: Tally
) -> None:
    write_recipe(napkin, parallelism=parallelism)
    port = free_port()
    ranks = [
        napkin.start(
            *("train", "recipe.toml", "--run", "run"),
            environment=environment_of(rank, 2, port),
            signal_at=number if rank == whom else None,
            near=".step-00000020.",
        )
        for rank in range(2)
    ]
    statuses = [rank.wait() for rank in ranks]
    if statuses != [0, 0]:
        # This rank has no such operation, or was killed and the other one noticed.
        assert statuses[whom] == -signal.SIGKILL
        assert statuses[1 - whom] == 2
        # The last of these operations remove it, once that of step 40 is there.
        assert checkpoints(napkin.folder / "run")[-1] in (10, 20, 40)
        take_up(napkin, 2, "run")
    assert_follows(napkin.folder / "run", alone)
    tally(f"{parallelism}: kill -9 of one rank of two in a write", inside=int(statuses != [0, 0]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "numbers",
    [(6, 3)] + [pytest.param(each, marks=pytest.mark.torture) for each in [(1, 1), (3, 6), (8, 8), (12, 4), (20, 6)]],
)
def test_a_kill_of_all_ranks_inside_a_sharded_checkpoint_loses_nothing(
    napkin: Napkin, alone: Path, numbers: tuple[int, int], tally: Tally
) -> None:
    write_recipe(napkin, parallelism="fsdp", checkpoint_writing="background")
    port = free_port()
    ranks = [
        napkin.start(
            *("train", "recipe.toml", "--run", "run"),
            environment=environment_of(rank, 2, port),
            signal_at=number,
            near=".step-00000020.",
        )
        for rank, number in enumerate(numbers)
    ]
    statuses = [rank.wait() for rank in ranks]
    # Whoever was not killed has lost the other.
    assert -signal.SIGKILL in statuses
    assert set(statuses) <= {-signal.SIGKILL, 2}
    assert checkpoints(napkin.folder / "run") in ([10], [10, 20])
    take_up(napkin, 2, "run")
    assert_follows(napkin.folder / "run", alone)
    tally("fsdp: kill -9 of all ranks in a write", inside=1)


@pytest.mark.torture
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
@pytest.mark.parametrize("whom", [0, 1])
def test_a_full_disk_ends_all_with_one_reason(napkin: Napkin, parallelism: str, whom: int) -> None:
    write_recipe(napkin, parallelism=parallelism)
    port = free_port()
    ranks = [
        napkin.start(
            *("train", "recipe.toml", "--run", "run"),
            environment=environment_of(rank, 2, port),
            largest_file=30_000 if rank == whom else None,
        )
        for rank in range(2)
    ]
    if parallelism == "ddp" and whom == 1:
        # This one writes nothing.
        assert [rank.wait() for rank in ranks] == [0, 0]
        return
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert "cannot be written" in ranks[whom].errors[-1]
    assert checkpoints(napkin.folder / "run") == []
    assert not list((napkin.folder / "run" / "checkpoints").glob(".*"))
