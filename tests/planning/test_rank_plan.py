"""Seconds of ranks that compute different stages beside the closed form of GPipe, and searched layouts by count."""

import dataclasses
import functools

import pytest

from napkin.accounting.ledger import Ledger
from napkin.accounting.pricing import Price, price
from napkin.errors import NapkinError
from napkin.hardware.cluster import Interconnect
from napkin.hardware.device_file import find_device
from napkin.model.config import ModelConfig
from napkin.planning.layouts.costs import LayoutCosts
from napkin.planning.layouts.search import search_layouts, with_best_counted
from napkin.planning.planner import plan, planned_ranks, resolve
from napkin.planning.step.machine import CatalogueMachine
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig
from napkin.train_step.step_ledger import count_step

MODEL = ModelConfig(vocab_size=4096, context_length=64, d_model=64, n_layers=4, n_heads=2)
H100 = CatalogueMachine(find_device("H100"))
CEILINGS = H100.ceilings(Precision("bf16", "cuda"))


@functools.cache
def pipeline_of(micro_batches: int) -> tuple[ResolvedRecipe, dict[int, Ledger]]:
    """Two stages of two blocks, the second with the head, and the ledger of each."""
    recipe = Recipe(
        model=MODEL,
        training=TrainingConfig(batch_size=micro_batches, micro_batch_size=1, precision="bf16"),
        parallelism=ParallelismConfig(pipeline=2, schedule="gpipe"),
    )
    resolved = ResolvedRecipe(recipe, Precision("bf16", "cuda"), world_size=2)
    return resolved, {rank: count_step(resolved, rank) for rank in (0, 1)}


def prices(ledgers: object) -> list[Price]:
    return [price(ledger, CEILINGS) for ledger in ledgers]  # pyright: ignore[reportGeneralTypeIssues]


@pytest.mark.thorough
def test_a_pipeline_of_uneven_stages_takes_what_the_closed_form_of_gpipe_says() -> None:
    micro_batches = 6
    resolved, ledgers = pipeline_of(micro_batches)
    # Links so fast that sends and collectives take nothing.
    link = Interconnect(1e30, 1e30, 2, 0.0, 0.0, 0.0)
    site = dataclasses.replace(H100.site(resolved.precision, CEILINGS), n_devices=2, interconnect=link)
    planned = planned_ranks(resolved, ledgers, prices, site)
    passes: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
    for ledger in ledgers.values():
        for name, seconds in passes.items():
            seconds.append(price(ledger, CEILINGS).by_phase[name].seconds)
    # The first micro-batch passes through both stages, all others follow at the pace of the slower one.
    expected = max(passes["optimizer"])
    for name in ("forward", "backward"):
        one, other = (seconds / micro_batches for seconds in passes[name])
        expected += one + other + (micro_batches - 1) * max(one, other)
    assert planned.seconds_per_step == pytest.approx(expected, rel=1e-9)
    assert passes["forward"][1] > 1.2 * passes["forward"][0]


def test_each_rank_of_a_pipeline_has_bytes_of_its_own_and_the_largest_decides() -> None:
    resolved, ledgers = pipeline_of(6)
    site = dataclasses.replace(H100.site(resolved.precision, CEILINGS), n_devices=2, interconnect=None)
    planned = planned_ranks(resolved, ledgers, prices, site)
    assert planned.pipeline_peak_bytes == tuple(count_step(resolved, rank).peak_bytes for rank in (0, 1))
    assert planned.peak_bytes == max(planned.pipeline_peak_bytes) > min(planned.pipeline_peak_bytes)
    less = dataclasses.replace(planned, site=dataclasses.replace(site, memory_bytes=int(planned.peak_bytes / 0.95) - 1))
    assert planned.fits
    assert not less.fits


@pytest.mark.thorough
def test_the_best_layout_of_a_search_fits_by_the_count_of_its_real_step() -> None:
    recipe = Recipe(model=MODEL, training=TrainingConfig(batch_size=8))
    machine = CatalogueMachine(find_device("H100"), 4)
    resolved = dataclasses.replace(resolve(recipe, H100), world_size=4)
    costs = LayoutCosts(resolved, machine, (1, 2))
    found = search_layouts(costs)
    best = with_best_counted(found).plans[0]
    assert best.counted_bytes is not None
    assert best.peak_bytes == best.counted_bytes == pytest.approx(found.plans[0].peak_bytes, rel=0.3)
    memory = dataclasses.replace(costs.site, memory_bytes=int(best.counted_bytes / 0.95) - 1)
    alone = dataclasses.replace(found, plans=[dataclasses.replace(found.plans[0], site=memory)])
    with pytest.raises(NapkinError, match=r"layout .* fits"):
        with_best_counted(alone)


@pytest.mark.thorough
def test_seconds_by_operator_are_the_counted_ones_scaled_to_the_sum_of_parts_and_the_plan_has_both() -> None:
    recipe = Recipe(model=MODEL, training=TrainingConfig(batch_size=8, parallelism="fsdp"))
    machine = CatalogueMachine(find_device("H100"), 4)
    planned = plan(recipe, machine)
    alone = price(planned.ledger, machine.ceilings(planned.resolved.precision))
    computing, layout = planned.computing, planned.layout
    assert computing is not None
    assert computing.counted is not None
    assert computing.counted == pytest.approx(alone.seconds)
    assert computing.sum == pytest.approx(planned.seconds_per_step - planned.exposed_seconds - planned.bubble_seconds)
    shown = sum(spent.seconds for spent in planned.price.by_operator.values())
    assert shown == pytest.approx(alone.seconds * computing.sum / computing.counted)
    assert layout is not None
    peak = layout.bytes_of_largest
    assert peak.count_over_sum is not None
    assert peak.counted == layout.peak_bytes == planned.ledger.peak_bytes
    assert peak.sum == pytest.approx(layout.ranks[layout.largest_rank].total)
    assert (1 + peak.count_over_sum) * peak.sum == pytest.approx(peak.counted)
