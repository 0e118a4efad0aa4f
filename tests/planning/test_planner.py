import dataclasses
import math
import re
from typing import Any

import pytest

from napkin.accounting.rules import all_reduce_seconds_rule
from napkin.distributed.ranks import RankInfo, Ranks
from napkin.errors import NapkinError
from napkin.hardware.ceilings import efficiency_of
from napkin.hardware.device import Device
from napkin.hardware.device_file import catalogue, find_device
from napkin.hardware.host import detect_host
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan as make_plan
from napkin.planning.planner import resolve
from napkin.planning.step import memory_savings
from napkin.planning.step.machine import CatalogueMachine, ThisMachine, machine_of
from napkin.planning.step.memory_savings import refuse_what_does_not_fit
from napkin.planning.step.run_plan import Plan
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step_ledger import count_step
from napkin.units import format_bytes

A100 = find_device("A100-80GB")


def recipe(batch_size: int = 16, micro_batch_size: int | None = None, **model: Any) -> Recipe:
    sizes = {"vocab_size": 300, "context_length": 64, "d_model": 32, "n_layers": 2, "n_heads": 2, **model}
    training = TrainingConfig(batch_size=batch_size, micro_batch_size=micro_batch_size)
    return Recipe(model=ModelConfig(**sizes), training=training)


def plan_on(recipe: Recipe, device: Device, n_devices: int) -> Plan:
    return make_plan(recipe, CatalogueMachine(device, n_devices))


def test_each_of_several_devices_steps_over_its_part_of_the_batch() -> None:
    plan = plan_on(recipe(16), A100, 8)
    resolved = plan.resolved
    assert (resolved.per_device.training.batch_size, resolved.precision) == (2, Precision("bf16", "cuda"))
    alone = plan_on(recipe(2), A100, 1)
    assert plan.ledger.flops == alone.ledger.flops
    assert plan.tokens_per_step == 8 * alone.tokens_per_step
    assert plan.price.seconds == pytest.approx(alone.price.seconds, rel=1e-3)


def test_dollars_and_energy_are_those_of_all_devices_for_all_steps() -> None:
    plan = plan_on(recipe(16), A100, 8)
    assert A100.price
    assert A100.watts
    hours = plan.steps * plan.seconds_per_step / 3600
    assert plan.dollars is not None
    assert plan.kilowatt_hours is not None
    assert math.isclose(plan.dollars, 8 * hours * A100.price.usd_per_hour)
    assert math.isclose(plan.kilowatt_hours, 8 * hours * A100.watts / 1000)
    changed = plan.at(usd_per_hour=1.0, watts=100.0)
    assert changed.dollars is not None
    assert math.isclose(changed.dollars, 8 * hours)
    assert changed.kilowatt_hours is not None
    assert math.isclose(changed.kilowatt_hours, 8 * hours / 10)


def test_a_plan_says_whose_price_it_uses_and_of_when() -> None:
    def note(plan: Plan) -> str:
        return next(row.note for row in plan.table() if row.quantity == "dollars")

    assert A100.price
    plan = plan_on(recipe(16), A100, 8)
    assert note(plan) == "price: $1.79 per hour, Lambda, on demand, 8 devices, 2025-06; $14.32 per hour in all"
    assert note(plan.at(watts=100.0)) == note(plan)
    assert note(plan.at(usd_per_hour=1.0)) == "the price that was given; $8.00 per hour in all"


SLOW_LINK = dataclasses.replace(A100, link_bandwidth=1e9)


def without_latency(device: Device, n_devices: int) -> CatalogueMachine:
    """A device whose collectives reach its link's bandwidth, start at once, and slow down no computation."""
    ideal = dataclasses.replace(
        efficiency_of(device), link_share=1.0, network_share=1.0, hop_factor=1e-9, slowdown=1e-9
    )
    return CatalogueMachine(device, n_devices, efficiency=ideal)


@pytest.mark.thorough
def test_gradients_cost_time_where_the_backward_pass_does_not_hide_them() -> None:
    # One token a device, so that there is nothing to compute beside the exchange of 4 bytes per parameter.
    planned = make_plan(recipe(8, context_length=1), on=without_latency(SLOW_LINK, 8))
    exchange = 2 * 7 / 8 * 4 * planned.ledger.parameters / 1e9
    assert math.isclose(all_reduce_seconds_rule(4 * planned.ledger.parameters, 8, 1e9), exchange)
    # Besides, each device sends its loss.
    assert math.isclose(planned.communication_seconds, exchange, rel_tol=1e-4)
    exposed = max(0.0, exchange - planned.price.by_phase["backward"].seconds)
    assert planned.exposed_seconds == pytest.approx(exposed, rel=1e-4, abs=1e-8)
    assert plan_on(recipe(8), A100, 1).communication_seconds == 0


def test_a_batch_that_does_not_divide_is_refused_with_the_next_that_does() -> None:
    with pytest.raises(NapkinError, match=r"batch_size 12.*8 devices.*--training.batch-size 16"):
        plan_on(recipe(12), A100, 8)
    with pytest.raises(NapkinError, match=r"gets 6 sequences.*micro-batches.*4"):
        plan_on(recipe(12, 4), A100, 2)


def test_a_device_without_bf16_trains_in_fp32_and_says_so_where_bf16_is_wanted() -> None:
    v100 = find_device("V100")
    assert plan_on(recipe(), v100, 1).resolved.precision.products == "fp32"
    with pytest.raises(NapkinError, match="support bf16 arithmetic"):
        plan_on(dataclasses.replace(recipe(), training=TrainingConfig(precision="bf16")), v100, 1)


@pytest.mark.thorough
def test_what_does_not_fit_is_told_its_ways_out() -> None:
    small = dataclasses.replace(A100, name="small", memory_bytes=600_000_000 + 30_000_000)
    plan = plan_on(recipe(64, context_length=256), small, 4)
    assert plan.ledger.peak_bytes == count_step(plan.resolved).peak_bytes > plan.site.memory_bytes
    with pytest.raises(NapkinError) as refused:
        refuse_what_does_not_fit(plan)
    line = str(refused.value)
    assert "micro-batch-size" in line
    assert "with --training.parallelism fsdp" in line
    assert "would fit a " in line
    assert "\n" not in line


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(("name", "n_devices"), [("H100", 1), ("H100", 8), ("A100", 1), ("MI300X", 8), ("L4", 4)])
def test_a_device_that_is_advised_holds_the_step_and_could_replace_the_planned_ones(
    name: str, n_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other ways out are counted once for all of these bytes.
    counts: dict[str, int] = {}
    peak_bytes = memory_savings._peak_bytes
    monkeypatch.setattr(
        memory_savings,
        "_peak_bytes",
        lambda resolved: counts.get(repr(resolved)) or counts.setdefault(repr(resolved), peak_bytes(resolved)),
    )
    planned = find_device(name)
    counted = plan_on(recipe(8), planned, n_devices)
    for gigabytes in (100, 144, 160, 400, 1000):
        needed = gigabytes * 10**9
        plan = dataclasses.replace(counted, ledger=dataclasses.replace(counted.ledger, peak_bytes=needed))
        able = [
            device
            for device in catalogue()
            if device.vendor == planned.vendor
            and 0.95 * device.usable_bytes >= needed
            and (n_devices == 1 or device.link_bandwidth)
        ]
        if plan.fits:
            continue
        with pytest.raises(NapkinError) as refused:
            refuse_what_does_not_fit(plan)
        advised = re.search(r"would fit a (\S+), which has ([\d.]+) GB", str(refused.value))
        assert (advised is None) is (not able)
        if advised is not None:
            device = find_device(advised[1])
            assert device in able
            assert device.memory_bytes == min(each.memory_bytes for each in able)
            assert float(advised[2]) >= gigabytes


GRID = [
    {"parallelism": parallelism, "precision": precision, **training}
    for parallelism in ("ddp", "fsdp")
    for precision in ("fp32", "bf16")
    for training in ({}, {"micro_batch_size": 2}, {"recompute": "full"}, {"gather_format": "fp32"})
]


def as_ranks(world_size: int) -> Ranks:
    return Ranks(RankInfo(world_size=world_size, local_world_size=world_size))


def test_this_machine_and_the_same_machine_described_as_a_device_are_planned_with_the_same_bytes() -> None:
    host = detect_host()
    described = Device(
        name=host.cpu_name,
        vendor="a processor's",
        source=None,
        peaks={"fp32": 1e12, "bf16": 1e12},
        memory_bytes=host.memory_bytes,
        advertised_bytes=host.memory_bytes,
        memory_bandwidth=1e10,
        torch_device="cpu",
    )
    for n_devices in (1, 4):
        here = ThisMachine(as_ranks(n_devices), device="cpu")
        there = CatalogueMachine(described, n_devices)
        # Each setting of the grid once; alone, nothing is sharded, and one says as much.
        for training in GRID[::5] if n_devices > 1 else GRID[5:6]:
            wanted = recipe(8)
            wanted = dataclasses.replace(wanted, training=dataclasses.replace(wanted.training, **training))
            ours, theirs = (count_step(resolve(wanted, machine)) for machine in (here, there))
            assert ours.peak_bytes == theirs.peak_bytes, training
            assert ours.peak_by_category == theirs.peak_by_category, training
            assert ours.flops == theirs.flops, training


@pytest.mark.thorough
def test_a_plan_that_does_not_fit_whole_fits_sharded_where_the_recipe_says_fsdp() -> None:
    small = dataclasses.replace(A100, memory_bytes=600_000_000 + 45_000_000)
    large = recipe(8, d_model=256, n_layers=3, vocab_size=1000)
    whole = plan_on(large, small, 8)
    assert not whole.fits
    sharded = plan_on(dataclasses.replace(large, training=TrainingConfig(batch_size=8, parallelism="fsdp")), small, 8)
    assert sharded.fits
    with pytest.raises(NapkinError, match=f"fits.*{re.escape(format_bytes(sharded.ledger.peak_bytes))}"):
        refuse_what_does_not_fit(whole)


def test_fsdp_on_a_slow_link_exposes_what_it_sends() -> None:
    slow = dataclasses.replace(A100, link_bandwidth=1e6)
    sharded = dataclasses.replace(recipe(8), training=TrainingConfig(batch_size=8, parallelism="fsdp"))
    planned = make_plan(sharded, on=without_latency(slow, 8))
    assert planned.communication.bytes > 0
    assert planned.communication_seconds == pytest.approx(planned.communication.bytes / 1e6, rel=0.01)
    assert 0 < planned.exposed_seconds < planned.communication_seconds
    assert planned.seconds_per_step == pytest.approx(planned.price.seconds + planned.exposed_seconds)


@pytest.mark.thorough
def test_beyond_a_node_the_network_bounds_what_devices_send() -> None:
    def communication_seconds(on: str) -> float:
        return make_plan(recipe(64, d_model=512, vocab_size=8192, n_layers=1), on=on).communication_seconds

    in_a_node, among_nodes = communication_seconds("8xA100-40GB"), communication_seconds("16xA100-40GB")
    assert in_a_node < among_nodes < communication_seconds("2xp4d.24xlarge") < communication_seconds("16x1xA100-40GB")
    assert machine_of("2xp4d.24xlarge", device="auto").n_devices == 16
