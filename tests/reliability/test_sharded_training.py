"""What a rank of FSDP2 does with its rows, whatever the recipe asks for, is what one process does with all of them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from napkin.checkpoint.folder import checkpoint_path, read_checkpoint
from napkin.checkpoint.restore import load_train_state
from reliability.conftest import TrainOnRanks
from reliability.harness import Napkin
from reliability.rank_cases import Case, Figure, losses, steps_of, train_state_of
from reliability.rank_runs import TOLERANCE, assert_follows, start_and_stop, take_up, write_recipe


def case(**tables: Any) -> Case:
    return {**tables, "training": {"parallelism": "fsdp", **tables.get("training", {})}}


EXPERTS = {"n_experts": 4, "d_expert": 16, "balance_weight": 0.0}
SHORT: dict[str, Case] = {
    "every second block computed again": case(
        training={"recompute": "full", "recompute_every": 2, "micro_batch_size": 1}, steps=6
    ),
    "muon averaged offloaded": case(
        optimizer={"name": "muon", "average_decay": 0.9},
        training={"offload_optimizer": True, "recompute": "selective"},
        steps=6,
    ),
    "adafactor": case(optimizer={"name": "adafactor"}, model=EXPERTS, training={"offload_optimizer": True}, steps=6),
    # One process with the ranks' rows rounds as they do.
    "fp16": case(training={"precision": "fp16", "micro_batch_size": 2}, steps=6),
}
LONG: dict[str, Case] = {
    "selective": case(training={"recompute": "selective", "micro_batch_size": 1}),
    "full": case(training={"recompute": "full"}),
    "every second": case(training={"recompute": "full", "recompute_every": 2, "micro_batch_size": 1}),
    "dropless experts": case(training={"recompute": "full"}, model=EXPERTS),
    "average": case(optimizer={"average_decay": 0.9}),
    "offload": case(training={"offload_optimizer": True}),
    "muon": case(optimizer={"name": "muon"}),
    "muon and experts": case(optimizer={"name": "muon"}, model=EXPERTS),
    "adafactor": case(optimizer={"name": "adafactor", "average_decay": 0.9}),
    "adafactor and experts": case(optimizer={"name": "adafactor"}, model=EXPERTS),
    "all": case(
        optimizer={"name": "muon", "average_decay": 0.9}, training={"offload_optimizer": True, "recompute": "full"}
    ),
}


NORM_TOLERANCE = 5e-5


def assert_one_follows(folder: Path, name: str, case: Case) -> None:
    """One process has the losses of the ranks, and of what they have saved it makes the same as they do."""
    there = json.loads((folder / f"{name}.json").read_text())
    here = losses(train_state_of(case), range(steps_of(case)))
    assert_alike(name, there, here)
    if not case.get("saves", True):
        return
    train_state, half = train_state_of(case), steps_of(case) // 2
    load_train_state(read_checkpoint(checkpoint_path(folder / name, half)), train_state)
    later = losses(train_state, range(half, steps_of(case)))
    assert_alike(name, there[-len(later) :], later)


def assert_alike(name: str, there: list[Figure], here: list[Figure]) -> None:
    """Losses are equal to fp32's rounding; norms of gradients sum squares in another order, and are so relatively."""
    print(name, max(abs(a[1] - b[1]) for a, b in zip(there, here, strict=True)))
    assert [what for what, _ in there] == [what for what, _ in here]
    # What differs in fp32's last bit is rounded to fp16 one way or the other.
    tolerance = 1e-3 if name == "fp16" else TOLERANCE
    for norms in (False, True):
        found, expected = ([each for what, each in of if (what == "norm") == norms] for of in (there, here))
        assert found == pytest.approx(expected, abs=tolerance, rel=NORM_TOLERANCE if norms else 0)


@pytest.mark.thorough
def test_two_ranks_with_parts_of_the_model_follow_one(tmp_path: Path, train_on_ranks: TrainOnRanks) -> None:
    train_on_ranks(2, SHORT)
    for name, each in SHORT.items():
        assert_one_follows(tmp_path, name, each)
    figures = json.loads((tmp_path / "fp16.json").read_text())
    assert ["norm", 0.0] in figures, "no step overflowed"


@pytest.mark.torture
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_parts_of_the_model_follow_one_for_long(
    tmp_path: Path, train_on_ranks: TrainOnRanks, size: int
) -> None:
    train_on_ranks(size, LONG)
    for name, each in LONG.items():
        assert_one_follows(tmp_path, name, each)


@pytest.mark.torture
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_whole_run_on_parts_of_the_model_is_that_of_one_process(napkin: Napkin, precision: str) -> None:
    optimizer = {"name": "muon", "learning_rate": 1e-3, "average_decay": 0.9}
    training = {"precision": precision, "recompute": "full", "micro_batch_size": 2}
    write_recipe(napkin, optimizer=optimizer, **training)
    assert napkin.run("train", "recipe.toml", "--run", "alone").wait() == 0
    write_recipe(napkin, optimizer=optimizer, parallelism="fsdp", **training)
    start_and_stop(napkin, 2, whom=1)
    shutil.copytree(napkin.folder / "run", napkin.folder / "on-1")
    tolerance = TOLERANCE if precision == "fp32" else 0.02
    for size, run in ((2, "run"), (1, "on-1")):
        take_up(napkin, size, run)
        print(precision, size, assert_follows(napkin.folder / run, napkin.folder / "alone", tolerance))
    losses = [line.split()[-1] for line in evaluated(napkin, "run", "alone")]
    assert len(losses) == 2


def evaluated(napkin: Napkin, *runs: str) -> list[str]:
    """The last line of `napkin evaluate` of each."""
    commands = [napkin.run("evaluate", run, refuse_pickles=True) for run in runs]
    assert [command.status for command in commands] == [0] * len(runs), [command.errors for command in commands]
    return [command.out.read_text().splitlines()[-1] for command in commands]
