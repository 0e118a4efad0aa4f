"""The plan of a layout beside counts of whole models, closed forms, and itself under changes that can only help."""

import dataclasses
import functools
from typing import Any

import pytest

from napkin.accounting.pipeline_simulation import simulate_pipeline
from napkin.accounting.pricing import price
from napkin.hardware.accelerators import find_device
from napkin.model.config import ModelConfig
from napkin.planning.layout_costs import Choice, LayoutCosts
from napkin.planning.layout_memory import schedule_of
from napkin.planning.layout_plan import LayoutPlan, plan_layout
from napkin.planning.machine import CatalogueMachine
from napkin.planning.resolve import resolve
from napkin.recipe.layout import Layout, layout_of
from napkin.recipe.parallelism_config import ParallelismConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step_ledger import count_step

MODEL = ModelConfig(vocab_size=32000, context_length=1024, d_model=1024, n_layers=8, n_heads=16, n_kv_heads=8)
EXPERTS = dataclasses.replace(MODEL, n_experts=8, d_expert=512, n_dense_layers=1, n_layers=4)


def resolved_on(n_devices: int, model: ModelConfig = MODEL, **training: Any) -> tuple[ResolvedRecipe, CatalogueMachine]:
    """A recipe for so many H100, whatever layouts it trains in."""
    device = find_device("H100")
    settings = {"batch_size": 32, "micro_batch_size": 1, "loss_chunk_size": 1024, **training}
    recipe = Recipe(model=model, training=TrainingConfig(**settings))
    resolved = resolve(recipe, CatalogueMachine(device))
    return dataclasses.replace(resolved, world_size=n_devices), CatalogueMachine(device, n_devices)


@functools.cache
def costs_on(n_devices: int) -> LayoutCosts:
    resolved, machine = resolved_on(n_devices)
    return LayoutCosts(resolved, machine, (1, 2, 4, 8))


def planned(n_devices: int, **sizes: Any) -> LayoutPlan:
    costs = costs_on(n_devices)
    layout = layout_of(ParallelismConfig(**sizes), n_devices)
    choice = Choice(layout=layout, micro_batch_size=1, loss_chunk_size=1024)
    return plan_layout(costs.resolved, costs.machine, choice, costs=costs)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("model", "size", "chunk", "recompute", "tolerance"),
    [
        (MODEL, 1, 1024, "none", 2e-3),
        (MODEL, 3, 1000, "selective", 2e-3),
        (MODEL, 3, 512, "full", 2e-3),
        # Losses of routers are outside of blocks, some short calls for each.
        (EXPERTS, 2, 512, "none", 2e-2),
    ],
    ids=["none", "selective", "full", "experts"],
)
def test_the_parts_of_one_device_add_up_to_the_count_of_its_whole_step(
    model: ModelConfig, size: int, chunk: int, recompute: str, tolerance: float
) -> None:
    training: dict[str, Any] = {
        "batch_size": size,
        "micro_batch_size": size,
        "loss_chunk_size": chunk,
        "recompute": recompute,
    }
    resolved, machine = resolved_on(1, model, **training)
    composed = plan_layout(resolved, machine)
    ledger = count_step(resolved)
    whole = price(ledger, machine.ceilings(resolved.precision)).seconds
    assert composed.model_flops == ledger.flops
    assert composed.seconds == pytest.approx(whole, rel=tolerance)


def test_the_bubble_of_even_stages_is_that_of_the_closed_form() -> None:
    plan = planned(4, pipeline=4)
    for schedule in ("gpipe", "1f1b"):
        timeline = simulate_pipeline(schedule_of(schedule, 4, 1, plan.micro_batches), [plan.stages[1].seconds] * 4)
        assert timeline.bubble_fraction == pytest.approx(3 / plan.micro_batches)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 8},
        {"shard": 8},
        {"data": 8},
        {"pipeline": 4, "tensor": 2},
        {"pipeline": 2, "shard": 2, "context": 2, "schedule": "zb-v"},
        {"pipeline": 2, "shard": 2, "data": 2, "schedule": "interleaved-1f1b"},
    ],
    ids=str,
)
def test_seconds_by_kind_add_up_to_those_of_the_step(sizes: dict[str, Any]) -> None:
    plan = planned(8, **sizes)
    assert sum(plan.by_kind.values()) == pytest.approx(plan.seconds)
    assert all(seconds > 0 for seconds in plan.by_kind.values())
    assert plan.interval[0] < plan.seconds < plan.interval[1]


def test_a_faster_link_is_never_slower() -> None:
    costs = costs_on(8)
    for layout in (Layout(tensor=4, pipeline=2), Layout(shard=8), Layout(context=2, shard=4), Layout(data=8)):
        choice = Choice(layout=layout, micro_batch_size=1, loss_chunk_size=1024)
        seconds: list[float] = []
        for factor in (1, 2, 8):
            faster = costs.on(costs.machine)
            link = costs.interconnect
            faster.interconnect = dataclasses.replace(
                link, link_bandwidth=factor * link.link_bandwidth, network_bandwidth=factor * link.network_bandwidth
            )
            seconds.append(plan_layout(costs.resolved, costs.machine, choice, costs=faster).seconds)
        assert seconds[0] >= seconds[1] >= seconds[2]
