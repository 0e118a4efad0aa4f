import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from napkin.accounting.failures import FailureModel
from napkin.checkpoint.folder import checkpoint_bytes
from napkin.hardware.device_file import find_device
from napkin.json_files import read_json, write_json
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan as make_plan
from napkin.planning.step.machine import CatalogueMachine
from napkin.planning.step.plan_file import plan_file_of, planned_failures, whole_checkpoint_bytes
from napkin.planning.step.run_plan import Plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig
from napkin.runs.accounting_files import PlanFile

A100 = find_device("A100-80GB")


def planned(n_devices: int, **training: Any) -> Plan:
    config = ModelConfig(vocab_size=300, context_length=64, d_model=32, n_layers=2, n_heads=2)
    recipe = Recipe(model=config, training=TrainingConfig(batch_size=16, **training))
    return make_plan(recipe, CatalogueMachine(A100, n_devices))


@pytest.mark.thorough
def test_replicas_write_one_checkpoint_and_shards_write_their_own() -> None:
    assert A100.host_bandwidth
    ddp, fsdp = planned(16), planned(16, parallelism="fsdp")
    for plan, written, nodes in (
        (ddp, checkpoint_bytes(ddp.ledger), 1),
        (fsdp, whole_checkpoint_bytes(fsdp), 2),
    ):
        found = planned_failures(plan)
        assert found.pause_seconds == pytest.approx(checkpoint_bytes(plan.ledger) / A100.host_bandwidth)
        assert found.write_seconds == pytest.approx(written / 1e9 / nodes)
    waiting = planned_failures(planned(16, checkpoint_writing="wait"))
    assert (waiting.pause_seconds, waiting.write_seconds) == (planned_failures(ddp).write_seconds, 0)


@pytest.mark.parametrize(
    ("sizes", "model", "nodes"),
    [
        ({"data": 64}, {}, 1),
        ({"shard": 64}, {}, 8),
        # Of replicas, the first is written.
        ({"data": 4, "shard": 16}, {}, 2),
        ({"data": 16, "shard": 4}, {}, 1),
        ({"data": 2, "pipeline": 2, "tensor": 16}, {"n_heads": 16}, 4),
        ({"data": 64, "shard_optimizer": True}, {}, 8),
        # Experts of the first 8 ranks, and of the first 32, are all that there are.
        ({"data": 64, "expert": 8}, {"n_experts": 8}, 1),
        ({"data": 8, "shard": 8, "expert": 32}, {"n_experts": 32}, 4),
        ({"data": 2, "shard": 32, "expert": 8}, {"n_experts": 8}, 4),
        # Ranks of context have the same parameters, which FSDP2 alone divides among them.
        ({"context": 16, "tensor": 4}, {}, 1),
        ({"context": 8, "shard": 8}, {}, 8),
    ],
    ids=str,
)
def test_as_many_nodes_write_a_checkpoint_as_have_different_parts_of_it(
    sizes: dict[str, Any], model: dict[str, int], nodes: int
) -> None:
    # 8 nodes of 8: only layout and machine decide, whatever a step takes.
    plan, machine = planned_alone(), CatalogueMachine(A100, 64)
    recipe = dataclasses.replace(
        plan.recipe,
        model=dataclasses.replace(plan.recipe.model, **model),
        parallelism=ParallelismConfig(**sizes),
    )
    resolved = dataclasses.replace(plan.resolved, recipe=recipe, world_size=64)
    site = machine.site(resolved.precision, machine.ceilings(resolved.precision))
    plan = dataclasses.replace(plan, resolved=resolved, site=site)
    written = planned_failures(plan).write_seconds * nodes * 1e9
    assert written == pytest.approx(whole_checkpoint_bytes(plan))


@functools.cache
def planned_alone() -> Plan:
    return planned(1)


def test_time_and_dollars_with_failures_follow_from_the_interval_of_the_recipe() -> None:
    plan = planned(8, steps=10**9, checkpoint_every=10**7).at(mtbf_hours=2.0, restart_minutes=30.0, usd_per_hour=1.0)
    found = planned_failures(plan)
    model = FailureModel(7200.0, found.pause_seconds, found.write_seconds, 1800.0)
    assert found.interval_seconds == pytest.approx(10**7 * plan.seconds_per_step)
    assert found.seconds == pytest.approx(model.expected_seconds(plan.seconds, found.interval_seconds))
    assert found.seconds is not None
    assert found.best_interval_steps is not None
    assert found.longest_interval_steps is not None
    assert found.seconds > plan.seconds
    assert found.goodput == pytest.approx(plan.seconds / found.seconds)
    assert found.interruptions == pytest.approx(found.seconds / 7200)
    assert found.dollars == pytest.approx(8 * found.seconds / 3600)
    assert found.best_interval_steps == round(found.best_interval_seconds / plan.seconds_per_step)
    assert 1 <= found.best_interval_steps < found.longest_interval_steps < 10**7
    assert found.best_goodput > 1.01 * found.goodput
    best = dataclasses.replace(
        plan.recipe, training=dataclasses.replace(plan.recipe.training, checkpoint_every=found.best_interval_steps)
    )
    again = planned_failures(
        make_plan(best, CatalogueMachine(A100, 8)).at(mtbf_hours=2.0, restart_minutes=30.0, usd_per_hour=1.0)
    )
    assert again.goodput == pytest.approx(found.best_goodput, rel=1e-3)


def test_a_checkpoint_is_written_at_the_end_of_a_run_shorter_than_the_interval() -> None:
    plan = planned(8, steps=10, checkpoint_every=1000)
    found = planned_failures(plan)
    assert found.interval_seconds == pytest.approx(10 * plan.seconds_per_step)
    assert found.best_interval_seconds <= plan.seconds


def test_a_run_that_would_not_end_has_no_time_and_no_dollars(tmp_path: Path) -> None:
    plan = planned(8).at(mtbf_hours=1e-6, usd_per_hour=1.0)
    found = planned_failures(plan)
    assert (found.seconds, found.interruptions, found.dollars, found.goodput) == (None, None, None, 0)
    written = plan_file_of(plan)
    write_json(tmp_path / "plan.json", written)
    assert read_json(tmp_path / "plan.json", PlanFile) == written


def test_plan_json_has_the_failures_and_may_be_without(tmp_path: Path) -> None:
    plan, path = planned(8), tmp_path / "plan.json"
    write_json(path, plan_file_of(plan))
    read = read_json(path, PlanFile)
    assert read is not None
    assert read.failures == planned_failures(plan)
    older = {name: each for name, each in json.loads(path.read_text()).items() if name not in ("failures", "crc32")}
    path.write_text(json.dumps(older))
    read = read_json(path, PlanFile)
    assert read is not None
    assert read.failures is None
