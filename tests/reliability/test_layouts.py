"""Ranks that divide the batch, the matrices, the layers, the sequences or the experts train as one process does."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from napkin.checkpoint.folder import checkpoint_path
from reliability import context_cases, pipeline_cases, state_cases, tensor_cases
from reliability.conftest import TrainOnRanks
from reliability.rank_cases import Case, steps_of
from reliability.test_sharded_training import assert_alike, assert_one_follows

# A router's losses are those of a micro-batch: one process has the same with the micro-batches of the ranks.
ROUTED: Case = {"n_experts": 4, "balance_weight": 0.1, "router_z_weight": 0.1}
EACH_OF_TWO: dict[str, Case] = {
    "tensor": {"parallelism": {"tensor": 2}, "model": {**ROUTED, "n_dense_layers": 1}},
    "pipeline": {"parallelism": {"pipeline": 2}, "model": ROUTED, "training": {"micro_batch_size": 1}},
    "context": {"parallelism": {"context": 2}},
    "expert": {"parallelism": {"data": 2, "expert": 2}, "model": ROUTED, "training": {"micro_batch_size": 2}},
    "expert apart from shards": {
        "parallelism": {"shard": 2, "expert": 2},
        "model": ROUTED,
        "training": {"micro_batch_size": 2},
    },
    # 3 experts would be padded to 4: they are divided along another dimension.
    "shard": {
        "parallelism": {"shard": 2},
        "model": {**ROUTED, "n_experts": 3},
        "training": {"micro_batch_size": 2},
        "saves": True,
    },
}
EACH_OF_FOUR: dict[str, Case] = {
    name: {"parallelism": parallelism, "model": ROUTED, "training": {"micro_batch_size": 1}}
    for name, parallelism in {
        "experts in replicas": {"data": 4, "expert": 2},
        "sharded experts": {"shard": 4, "expert": 2},
        "experts in a stage": {"pipeline": 2, "data": 2, "expert": 2},
    }.items()
}
SUBJECTS = (tensor_cases, context_cases, pipeline_cases, state_cases)
TWO, FOUR, LONG_TWO, LONG_FOUR = (
    {name: case for subject in SUBJECTS for name, case in getattr(subject, which).items()}
    for which in ("TWO", "FOUR", "LONG_TWO", "LONG_FOUR")
)


@pytest.mark.thorough
@pytest.mark.parametrize(("size", "cases"), [(2, EACH_OF_TWO), (4, EACH_OF_FOUR)], ids=["2 ranks", "4 ranks"])
def test_each_way_to_divide_a_model_trains_as_one_process_does(
    tmp_path: Path, train_on_ranks: TrainOnRanks, size: int, cases: dict[str, Case]
) -> None:
    cases = {name: {"steps": 4, "saves": False, **case} for name, case in cases.items()}
    train_on_ranks(size, cases)
    for name, case in cases.items():
        assert_one_follows(tmp_path, name, case)


@pytest.mark.torture
@pytest.mark.parametrize(("size", "cases"), [(2, TWO), (4, FOUR)], ids=["2 ranks", "4 ranks"])
def test_ranks_in_a_layout_follow_one_process(
    tmp_path: Path, train_on_ranks: TrainOnRanks, size: int, cases: dict[str, Case]
) -> None:
    train_on_ranks(size, cases)
    for name, case in cases.items():
        assert_one_follows(tmp_path, name, case)
        if case["parallelism"].get("shard_optimizer"):
            assert_ranks_keep_different_state(checkpoint_path(tmp_path / name, steps_of(case) // 2), size)


def assert_ranks_keep_different_state(checkpoint: Path, size: int) -> None:
    """Each parameter's state is written by the one rank that keeps it, and no rank keeps much more than its part."""
    files = [load_file(checkpoint / f"optimizer-{rank + 1:05d}-of-{size:05d}.safetensors") for rank in range(size)]
    kept = [{name: each for name, each in file.items() if not name.startswith("average.")} for file in files]
    names = [name for file in kept for name in {name.partition(".")[2] for name in file}]
    assert len(names) == len(set(names))
    numbers = [sum(each.numel() for each in file.values()) for file in kept]
    assert max(numbers) < 1.5 * sum(numbers) / size


@pytest.mark.torture
@pytest.mark.parametrize(
    ("size", "cases"),
    [(2, LONG_TWO), (4, LONG_FOUR), (8, tensor_cases.LONG_EIGHT)],
    ids=["2 ranks", "4 ranks", "8 ranks"],
)
def test_ranks_in_a_layout_follow_one_process_for_long(
    tmp_path: Path, train_on_ranks: TrainOnRanks, size: int, cases: dict[str, Case]
) -> None:
    train_on_ranks(size, cases)
    for name, case in cases.items():
        assert_one_follows(tmp_path, name, case)


@pytest.mark.torture
def test_ranks_that_divide_experts_train_as_those_that_have_all(tmp_path: Path, train_on_ranks: TrainOnRanks) -> None:
    # The losses that keep experts evenly used, and what an expert has room for, are those of a rank's own tokens: one
    # process, with the tokens of all ranks, has others.
    cases: dict[str, Case] = {}
    for name, more in {"balanced": {}, "with room for some": {"expert_capacity": 1.0}}.items():
        model = {**context_cases.EXPERTS, "balance_weight": 0.1, "router_z_weight": 0.01, **more}
        for how, expert in {"whole": 1, "divided": 2}.items():
            parallelism = {"data": 2, "expert": expert}
            cases[f"{how} {name}"] = {"parallelism": parallelism, "model": model, "saves": False, "steps": 6}
    train_on_ranks(2, cases)
    for name in ("balanced", "with room for some"):
        whole, divided = (json.loads((tmp_path / f"{how} {name}.json").read_text()) for how in ("whole", "divided"))
        assert_alike(name, divided, whole)
