"""The plan of a layout beside counts of whole models, closed forms, and itself under changes that can only help."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from napkin.accounting.pipeline_simulation import simulate_pipeline
from napkin.accounting.pricing import price
from napkin.accounting.rank_seconds import Communication
from napkin.hardware.device_file import find_device
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning.layouts.costs import Choice, LayoutCosts
from napkin.planning.layouts.counted_parts import Size
from napkin.planning.layouts.layout_plan import LayoutPlan, plan_layout
from napkin.planning.layouts.stages import groups, schedule_of
from napkin.planning.planner import resolve
from napkin.planning.step.machine import CatalogueMachine
from napkin.recipe.layout import Layout, layout_of
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig
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


def planned(n_devices: int, *, loss_chunk_size: int = 1024, **sizes: Any) -> LayoutPlan:
    costs = costs_on(n_devices)
    layout = layout_of(ParallelismConfig(**sizes), n_devices)
    choice = Choice(layout=layout, micro_batch_size=1, loss_chunk_size=loss_chunk_size)
    return plan_layout(costs.resolved, costs.machine, choice, costs=costs)


@pytest.mark.thorough
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


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_ring_sends_keys_and_values_past_all_other_ranks_and_their_gradients_with_them(tensor: int) -> None:
    plan, link = planned(4 * tensor, context=4, tensor=tensor), costs_on(4 * tensor).interconnect
    # Of a quarter of 1024 tokens, keys and values of 8 heads of 64 numbers in bf16.
    sent = 2 * 256 * (8 // tensor) * 64 * 2
    there_and_back = 3 * sent / link.link_bandwidth + 2 * link.link_hop_seconds
    expected = 32 * MODEL.n_layers * 3 * there_and_back
    assert plan.by_kind["context exposed"] + plan.hidden["context"] == pytest.approx(expected)


def test_a_ring_adds_up_the_outputs_of_each_turn_in_fp32() -> None:
    costs, plan = costs_on(4), planned(4, context=4)
    size = plan.choice.size
    of_blocks = costs.seconds(costs.blocks[0][0], size, "none", False) * MODEL.n_layers
    rest = costs.seconds("embedding", size, "none", False) + costs.head_seconds(size, 1024, "none")
    merging = plan.stages[0].compute.forward - of_blocks.forward - rest.forward
    # 256 tokens of 16 heads of 64 numbers: read and rescaled beside the sum so far, which is read and written.
    touched = 4 * 4 * 256 * 16 * 64
    each = touched / costs.ceilings.bandwidth(touched) + 6 * costs.ceilings.seconds_per_operator
    assert merging == pytest.approx(MODEL.n_layers * 3 * each)


def test_fsdp_has_a_block_and_the_next_one_gathered_in_bf16_and_what_is_outside_in_fp32() -> None:
    plan = planned(4, shard=4, loss_chunk_size=64)
    block, outside = parameters_of(MODEL)
    # Two blocks, the gradient of one, embedding and head, and their gradients.
    assert plan.ranks[0].gathered == 2 * 2 * block + 4 * block + 4 * outside + 4 * outside
    # In a pipeline a rank gathers its 2 blocks once per step, and adds up their gradients whole.
    first = planned(8, shard=2, pipeline=4, loss_chunk_size=64).ranks[1]
    assert first.gathered == 2 * 2 * block + 4 * 2 * block


@pytest.mark.parametrize(("sizes", "parts"), [({"data": 4}, 1), ({"shard": 4}, 4)], ids=str)
def test_gradients_of_all_micro_batches_but_one_are_added_up(sizes: dict[str, int], parts: int) -> None:
    costs, plan = costs_on(4), planned(4, **sizes)
    size, gathered = plan.choice.size, "shard" in sizes
    of_blocks = costs.seconds(costs.blocks[0][0], size, "none", gathered) * MODEL.n_layers
    rest = costs.seconds("embedding", size, "none", False) + costs.head_seconds(size, 1024, "none")
    added = plan.stages[0].compute.backward_weight - of_blocks.backward_weight - rest.backward_weight
    block, outside = parameters_of(MODEL)
    # fp32: the sum so far and the gradient are read, the sum is written, 7 times for 8 micro-batches.
    touched = 3 * 4 * (MODEL.n_layers * block + outside) / parts
    assert plan.micro_batches == 8
    assert 8 * added == pytest.approx(7 * touched / costs.ceilings.bandwidth(touched))


def parameters_of(model: ModelConfig) -> tuple[int, int]:
    """Of a block, and of all that is outside of blocks."""
    with torch.device("meta"):
        built = Transformer(model)
    block = sum(parameter.numel() for parameter in built.blocks[0].parameters())
    return block, sum(parameter.numel() for parameter in built.parameters()) - model.n_layers * block


SMALL = ModelConfig(vocab_size=256, context_length=64, d_model=64, n_layers=2, n_heads=4)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        # Fewer experts than ranks, as many, more: along the first dimension if it divides evenly, else another.
        ({"n_experts": 6, "d_expert": 32}, {"shard": 4}),
        *(pytest.param({"n_experts": n, "d_expert": 32}, {"shard": 4}, marks=pytest.mark.torture) for n in (2, 4)),
        # No dimension divides: 5 experts are padded to 8.
        ({"n_experts": 5, "d_model": 66, "head_dim": 16, "d_expert": 33}, {"shard": 4}),
        ({"n_experts": 6, "d_expert": 32}, {"shard": 4, "expert": 2}),
        pytest.param({}, {"shard": 4}, marks=pytest.mark.torture),
        pytest.param({"n_experts": 2, "d_expert": 32}, {"shard": 2, "data": 2}, marks=pytest.mark.torture),
    ],
    ids=str,
)
def test_shards_are_as_many_bytes_and_take_as_long_as_fsdp_s_own(
    changes: dict[str, Any], sizes: dict[str, Any]
) -> None:
    model = dataclasses.replace(SMALL, **changes)
    resolved, machine = resolved_on(4, model, batch_size=8, micro_batch_size=1, loss_chunk_size=64)
    resolved = dataclasses.replace(
        resolved, recipe=dataclasses.replace(resolved.recipe, parallelism=ParallelismConfig(**sizes))
    )
    plan = plan_layout(resolved, machine)
    counted = count_step(resolved, reserved=False)
    link = LayoutCosts(resolved, machine, (1,)).interconnect
    communication = Communication.of(counted)
    of_shards = sum(communication.only(name).seconds(link) for name in ("all_gather", "reduce_scatter"))
    # What is hidden and what is exposed are all of it.
    planned = plan.by_kind["shard exposed"] + plan.hidden["shard"]
    assert planned == pytest.approx(of_shards, rel=1e-6)
    # Blocks of the allocator are multiples of 512 bytes.
    assert plan.ranks[0].optimizer_state == pytest.approx(counted.peak_by_category["optimizer state"], rel=0.05)


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


def test_shards_of_experts_are_as_far_apart_as_the_ranks_that_divide_the_experts() -> None:
    # 16 ranks divide 8 experts: those that have the same expert are 0 and 8, in two nodes.
    interconnect = costs_on(16).interconnect
    layout = layout_of(ParallelismConfig(shard=16, expert=8), 16)
    found = groups(interconnect, layout)["shard of experts"]
    assert (found.per_node, found.nodes) == (1, 2)


def test_ranks_of_tensor_gather_a_blocks_input_and_its_gradient() -> None:
    costs, size = costs_on(2), Size(1.0, 2, 1)
    ((kind, _),) = costs.blocks
    whole = MODEL.context_length * MODEL.d_model * 2
    assert costs.working_bytes(kind, size, "none") == costs.parts("none").working_bytes(kind, size) + 2 * whole


@pytest.mark.thorough
def test_stages_hold_what_a_count_of_their_rank_finds_also_without_blocks() -> None:
    model = ModelConfig(4096, 256, d_model=256, n_layers=2, n_heads=4, tie_embeddings=False)
    resolved, machine = resolved_on(3, model, batch_size=4, loss_chunk_size=256)
    parallelism = ParallelismConfig(pipeline=3, blocks_per_stage=(0, 2, 0))
    resolved = dataclasses.replace(resolved, recipe=dataclasses.replace(resolved.recipe, parallelism=parallelism))
    plan = plan_layout(resolved, machine)
    for rank in range(3):
        # Workspaces of cuBLAS are half of the bytes of such a small model: one too few or too many is seen.
        counted = count_step(resolved, rank, reserved=False)
        assert plan.ranks[rank].total == pytest.approx(counted.peak_bytes, rel=0.02)
