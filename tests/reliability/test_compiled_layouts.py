"""Ranks whose kernels are compiled train as one process does whose kernels are compiled."""

from pathlib import Path

import pytest

from reliability import context_cases, pipeline_cases, tensor_cases
from reliability.rank_cases import Case
from reliability.test_sharded_training import assert_one_follows, train_on_ranks


def compiled(cases: dict[str, Case]) -> dict[str, Case]:
    return {
        name: {**case, "training": {**case.get("training", {}), "kernels": "compiled"}} for name, case in cases.items()
    }


BATCHES: dict[str, Case] = {
    "data 2": {"parallelism": {"data": 2}, "steps": 4},
    "shard 2": {"parallelism": {"shard": 2}, "steps": 4},
}


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (2, BATCHES),
        pytest.param(2, {**tensor_cases.TWO, **context_cases.TWO, **pipeline_cases.TWO}, marks=pytest.mark.torture),
        pytest.param(4, {**tensor_cases.FOUR, **pipeline_cases.FOUR}, marks=pytest.mark.torture),
    ],
    ids=["batches", "2 ranks", "4 ranks"],
)
def test_ranks_with_compiled_kernels_follow_one_process(tmp_path: Path, size: int, cases: dict[str, Case]) -> None:
    cases = compiled(cases)
    train_on_ranks(tmp_path, size, cases)
    for name, case in cases.items():
        assert_one_follows(tmp_path, name, case)
