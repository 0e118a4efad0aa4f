"""Ranks with compiled kernels, and with those that are Triton's on a GPU, train as one process with them does."""

from pathlib import Path

import pytest

from reliability import context_cases, pipeline_cases, tensor_cases
from reliability.conftest import TrainOnRanks
from reliability.rank_cases import Case
from reliability.test_sharded_training import assert_one_follows


def with_kernels(kernels: str, cases: dict[str, Case]) -> dict[str, Case]:
    return {
        name: {**case, "training": {**case.get("training", {}), "kernels": kernels}} for name, case in cases.items()
    }


BATCHES: dict[str, Case] = {
    "data 2": {"parallelism": {"data": 2}, "steps": 4},
    "shard 2": {"parallelism": {"shard": 2}, "steps": 4},
}


@pytest.mark.torture
@pytest.mark.parametrize("kernels", ["compiled", "triton"])
@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, BATCHES),
        (2, {**tensor_cases.TWO, **context_cases.TWO, **pipeline_cases.TWO}),
        (4, {**tensor_cases.FOUR, **pipeline_cases.FOUR}),
    ],
    ids=["batches", "2 ranks", "4 ranks"],
)
def test_ranks_with_other_kernels_follow_one_process(
    tmp_path: Path, train_on_ranks: TrainOnRanks, size: int, cases: dict[str, Case], kernels: str
) -> None:
    cases = with_kernels(kernels, cases)
    train_on_ranks(size, cases)
    for name, case in cases.items():
        assert_one_follows(tmp_path, name, case)
