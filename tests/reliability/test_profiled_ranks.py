"""Ranks that profile their steps together: each its own, and rank 0 tells of all."""

import json

import pytest

from reliability.harness import Napkin
from reliability.ranks import run_ranks

RECIPE = (
    "--model.vocab-size 64 --model.context-length 16 --model.d-model 16 --model.n-layers 1 --model.n-heads 2 "
    "--training.batch-size 4"
)


@pytest.mark.torture
@pytest.mark.parametrize("parallelism", ["", "--parallelism.shard 2", "--parallelism.tensor 2"])
def test_ranks_profile_their_steps_in_their_layout(napkin: Napkin, parallelism: str) -> None:
    ranks = run_ranks(napkin, 2, "profile", *f"{RECIPE} --steps 2 --json {parallelism}".split())
    told = json.loads(ranks[0].out.read_text())
    assert ranks[1].out.read_text() == ""
    assert len(told["ranks"]) == 2
    for rank in told["ranks"]:
        assert rank["seconds"] == pytest.approx(rank["operators"] + rank["collectives"] + rank["outside"])
        assert rank["collectives"] > 0
    # What the other rank has told is not this rank's.
    assert told["ranks"][0] != told["ranks"][1]
    assert told["seconds"] == pytest.approx(told["ranks"][0]["seconds"])
