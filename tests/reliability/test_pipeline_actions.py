"""What the ranks of a pipeline really do, one after the other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.accounting.pipeline_schedules import pipeline_schedule
from napkin.distributed.ranks import ALONE
from reliability.conftest import TrainOnRanks
from reliability.pipeline_cases import EXPERTS, pipeline
from reliability.rank_cases import Case, train_state_of

RANKS = 3
CASES: dict[str, Case] = {
    name: pipeline(name, RANKS, blocks=blocks, training={"batch_size": rows}, parallelism=more, model=EXPERTS)
    for name, blocks, rows, more in [
        ("gpipe", 3, 2, {}),
        ("1f1b", 4, 5, {}),
        ("interleaved-1f1b", 9, 6, {"stages_per_rank": 3}),
        ("zb-h1", 6, 8, {"stages_per_rank": 2}),
        ("zb-v", 6, 4, {}),
    ]
}


@pytest.mark.torture
def test_ranks_act_in_the_order_of_the_schedule_and_count_all_layers(
    tmp_path: Path, train_on_ranks: TrainOnRanks
) -> None:
    train_on_ranks(RANKS, CASES, "pipeline_actions.py")
    for name, case in CASES.items():
        left: list[dict[str, Any]] = [
            json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(RANKS)
        ]
        per_rank = case["parallelism"].get("stages_per_rank", 2 if name == "zb-v" else 1)
        schedule = pipeline_schedule(name, RANKS, case["training"]["batch_size"], stages_per_rank=per_rank)
        for rank, actions in enumerate(schedule.actions):
            assert [tuple(action) for action in left[rank]["trained"]] == list(actions), (name, rank)
            stages = [stage for stage, _, _ in left[rank]["evaluated"]]
            assert left[rank]["evaluated"] == [[stage, "forward", 0] for stage in schedule.stages_of(rank)], (
                name,
                stages,
            )
        alone = train_state_of(case, ALONE)
        tokens = torch.arange(case["training"]["batch_size"] * 16).view(-1, 16) % 61
        alone.step(0, tokens, tokens)
        assert [each["experts"] for each in left] == [[*alone.expert_tokens()]] * RANKS, name
        alone.model.eval()
        with torch.no_grad():
            nats = alone.parallel_model.evaluation_nats(tokens[:3], tokens[:3])
        # Only the last stage has a loss.
        assert abs(sum(each["nats"] for each in left) - nats) < 1e-3
        assert sum(each["nats"] != 0 for each in left) == 1
