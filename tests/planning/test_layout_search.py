"""The search over layouts beside brute force, its bounds beside whole simulations, and the least hardware."""

import dataclasses
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from napkin.accounting.pipeline_simulation import StageSeconds
from napkin.errors import NapkinError
from napkin.hardware.device_file import find_device
from napkin.model.config import ModelConfig
from napkin.planning.fit import device_counts, least_hardware
from napkin.planning.layouts.costs import Choice, LayoutCosts
from napkin.planning.layouts.counted_parts import BlockKind
from napkin.planning.layouts.layout_plan import plan_layout, simulated
from napkin.planning.layouts.search import (
    candidates,
    longest_rank_seconds,
    pipeline_seconds,
    recipe_tables,
    refusal,
    search_layouts,
    tensor_sizes,
    why_slower,
)
from napkin.planning.layouts.stages import Sends, StageContent, StageTime
from napkin.planning.planner import resolve
from napkin.planning.step.machine import CatalogueMachine
from napkin.recipe.layout import Layout, layout_of
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe
from napkin.recipe.training_config import TrainingConfig

MODEL = ModelConfig(vocab_size=32000, context_length=2048, d_model=1024, n_layers=4, n_heads=8, n_kv_heads=2)


def costs_of(n_devices: int, model: ModelConfig = MODEL, **training: Any) -> LayoutCosts:
    device = find_device("H100")
    recipe = Recipe(model=model, training=TrainingConfig(**{"batch_size": 16, **training}))
    resolved = dataclasses.replace(resolve(recipe, CatalogueMachine(device)), world_size=n_devices)
    return LayoutCosts(resolved, CatalogueMachine(device, n_devices), tensor_sizes(resolved, n_devices))


@pytest.fixture(scope="module")
def costs() -> LayoutCosts:
    return costs_of(8)


def with_memory(costs: LayoutCosts, memory_bytes: float) -> LayoutCosts:
    less = costs.on(costs.machine)
    less.site = dataclasses.replace(costs.site, memory_bytes=int(memory_bytes))
    return less


def kind_of(layout: Layout) -> tuple[Any, ...]:
    return layout.tensor, layout.pipeline, layout.expert, layout.shard > 1


def test_the_search_finds_what_brute_force_finds_with_much_memory_and_with_little(costs: LayoutCosts) -> None:
    much = 80e9
    for memory_bytes in (much, 1.2e9):
        limited = with_memory(costs, memory_bytes)
        plans = [plan_layout(limited.resolved, limited.machine, each, costs=limited) for each in candidates(limited)]
        fastest: dict[tuple[Any, ...], float] = {}
        for plan in plans:
            if plan.peak_bytes <= 0.95 * memory_bytes:
                kind = kind_of(plan.layout)
                fastest[kind] = min(plan.seconds, fastest.get(kind, plan.seconds))
        found = search_layouts(limited, trains=False)
        assert found.considered == len(plans)
        expected = sorted(fastest.values())[: len(found.plans)]
        assert [plan.seconds for plan in found.plans] == pytest.approx(expected)
        assert all(plan.seconds < expected[0] for plan in found.too_large)
        assert bool(found.too_large) == (memory_bytes < much)


def test_every_candidate_is_a_layout_of_all_devices_and_divides_the_recipe(costs: LayoutCosts) -> None:
    for choice in candidates(costs):
        layout = choice.layout
        assert layout.world_size == 8
        assert costs.resolved.recipe.training.batch_size % (layout.batch_parts * choice.micro_batch_size) == 0
        assert sum(map(len, layout.blocks_of_stages(MODEL.n_layers))) == MODEL.n_layers


def random_stages(number: int, seed: int) -> list[StageTime]:
    draw = random.Random(seed)
    content = StageContent(((BlockKind("attention", None, False), 1),), first=False, last=False)
    return [
        StageTime(
            content,
            StageSeconds(
                draw.uniform(0.5, 2.0), draw.uniform(0.5, 2.0), draw.uniform(0.5, 2.0), draw.choice([0.0, 1.0])
            ),
            Sends(),
        )
        for _ in range(number)
    ]


PIPELINES = [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 3), ("zb-v", 2)]


@pytest.mark.parametrize(("schedule", "per_rank"), PIPELINES)
def test_the_bound_and_the_extrapolation_of_a_pipeline_agree_with_its_whole_simulation(
    schedule: Any, per_rank: int
) -> None:
    for ranks, rounds, seed in itertools.product((2, 4), (1, 3, 9, 16), (0, 1)):
        layout = Layout(pipeline=ranks, schedule=schedule, stages_per_rank=per_rank)
        choice = Choice(layout=layout, micro_batch_size=1)
        stages = random_stages(ranks * per_rank, seed)
        for sending in (0.0, 0.3):
            whole = simulated(choice, stages, sending, ranks * rounds).seconds
            assert longest_rank_seconds(choice, stages, sending, ranks * rounds) <= whole * (1 + 1e-9)
            assert pipeline_seconds(choice, stages, sending, ranks * rounds) == pytest.approx(whole, rel=0.01)
    if schedule in ("gpipe", "1f1b"):
        stages, choice = random_stages(4, 2), Choice(layout=Layout(pipeline=4, schedule=schedule), micro_batch_size=1)
        whole = simulated(choice, stages, 0.1, 35).seconds
        assert pipeline_seconds(choice, stages, 0.1, 35) == pytest.approx(whole)


def test_the_printed_tables_are_a_recipe_of_the_same_layout(costs: LayoutCosts, tmp_path: Path) -> None:
    for plan in search_layouts(costs, trains=False).plans:
        (tmp_path / "recipe.toml").write_text(recipe_tables(plan), encoding="utf-8")
        recipe = read_recipe(tmp_path / "recipe.toml")
        layout = layout_of(recipe.parallelism, 8, otherwise=recipe.training.parallelism)
        assert str(layout) == str(plan.layout)
        assert recipe.training.micro_batch_size == plan.choice.micro_batch_size
        assert recipe.training.recompute == plan.choice.recompute


def test_a_slower_layout_says_what_takes_longer(costs: LayoutCosts) -> None:
    slow, fast = (
        plan_layout(
            costs.resolved,
            costs.machine,
            Choice(layout=Layout(pipeline=4, data=2, schedule=schedule, stages_per_rank=1), micro_batch_size=1),
            costs=costs,
        )
        for schedule in ("1f1b", "zb-h1")
    )
    assert "slower: the bubble of the pipeline (+" in why_slower(slow, fast)
    assert why_slower(fast, fast) == "as fast, within the accuracy of a plan"


def test_the_least_hardware_meets_the_deadline_and_less_does_not() -> None:
    costs = costs_of(1, steps=100_000)
    tried = least_hardware(costs, within_seconds=6 * 3600, trains=False, most=64)
    assert tried[-1].seconds <= 6 * 3600
    assert all(each.seconds > 6 * 3600 for each in tried[:-1])
    with pytest.raises(NapkinError, match=r"enough time.*64"):
        least_hardware(costs, within_seconds=60, trains=False, most=64)
    price = tried[-1].dollars
    assert price is not None
    with pytest.raises(NapkinError, match=r"later --within.*larger --for"):
        least_hardware(costs, within_seconds=6 * 3600, for_usd=price / 2, trains=False, most=64)


def test_device_counts_are_parts_of_a_node_then_nodes() -> None:
    assert list(device_counts(8, 100)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96]


def test_a_batch_that_divides_nowhere_and_a_model_that_fits_nowhere_are_refused_in_one_line() -> None:
    costs = costs_of(8)
    with pytest.raises(NapkinError, match=r"layout.*8 .* fits"):
        search_layouts(with_memory(costs, 1e6), trains=False)
    model = dataclasses.replace(MODEL, n_heads=5, n_kv_heads=5, d_model=640, context_length=999, n_layers=1)
    with pytest.raises(NapkinError, match=r"batch_size 5.*among 8 devices"):
        search_layouts(costs_of(8, model, batch_size=5), trains=False)


def test_what_is_proposed_is_what_napkin_trains(costs: LayoutCosts) -> None:
    for plan in search_layouts(costs).plans:
        assert refusal(costs.resolved.recipe, plan.choice) is None, plan.choice
