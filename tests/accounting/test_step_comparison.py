"""Two steps beside each other: their differences beside closed forms, and sums of parts beside the whole."""

import functools
from dataclasses import replace

import pytest

from napkin.accounting.comparison import Limit, StepDifference, compare_steps, step_figures
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan
from napkin.planning.step.run_plan import Plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig

MODEL = ModelConfig(vocab_size=128, context_length=32, d_model=32, n_layers=2, n_heads=2, feed_forward="gelu", d_ff=96)
RECIPE = Recipe(model=MODEL, training=TrainingConfig(batch_size=4, micro_batch_size=4))


@functools.cache
def planned(recipe: Recipe) -> Plan:
    return plan(recipe, "H100")


def difference(before: Recipe, after: Recipe, by: str = "module") -> StepDifference:
    plans = [planned(recipe) for recipe in (before, after)]
    return compare_steps(*(step_figures(each.ledger, by=by, price=each.price) for each in plans))  # pyright: ignore[reportArgumentType]


def with_layers(n_layers: int) -> Recipe:
    return replace(RECIPE, model=replace(MODEL, n_layers=n_layers))


def test_a_step_does_not_differ_from_itself() -> None:
    found = difference(RECIPE, RECIPE)
    assert found.equal
    assert found.as_values()["equal"] is True
    assert "equal" in repr(found)


def test_a_further_layer_adds_its_parameters_and_its_products() -> None:
    found = difference(RECIPE, with_layers(3))
    totals = {change.name: change.difference for change in found.totals}
    width, inner, tokens, context = 32, 96, 4 * 32, 32
    matrices = 4 * width * width + 2 * width * inner
    assert totals["parameters"] == matrices + 2 * width
    # Three products per weight and token, each a multiply and an add; scores and values forward, four times backward.
    assert totals["flops"] == 6 * matrices * tokens + 12 * tokens * context * width
    assert totals["peak_bytes"] > 0
    assert not difference(with_layers(3), with_layers(3)).totals
    back = difference(with_layers(3), RECIPE)
    assert [change.difference for change in back.totals] == [-change.difference for change in found.totals]


@pytest.mark.parametrize("by", ["module", "operator", "phase", "component"])
def test_the_parts_add_up_to_the_whole(by: str) -> None:
    found = difference(RECIPE, replace(RECIPE, model=replace(MODEL, d_ff=128, d_model=48)), by)
    totals = {change.name: change.difference for change in found.totals}
    for total, part in {"flops": "flops", "calls": "calls", "kept_bytes": "bytes_kept"}.items():
        parts = (each.difference for changes in found.parts.values() for each in changes if each.name == part)
        assert sum(parts) == totals.get(total, 0)
    if by != "component":
        seconds = (each.difference for changes in found.parts.values() for each in changes if each.name == "seconds")
        assert sum(seconds) == pytest.approx(totals["seconds"])
    assert sum(change.difference for change in found.peak) == totals["peak_bytes"]


def test_modules_that_are_in_one_alone_are_named_with_their_figures() -> None:
    gated = replace(RECIPE, model=replace(MODEL, feed_forward="swiglu"))
    parts = difference(RECIPE, gated).parts
    (gone,) = [change for change in parts["blocks.*.feed_forward.up"] if change.name == "flops"]
    assert gone.after is None
    assert gone.difference == -2 * 6 * 32 * 96 * 4 * 32
    assert gone.share == -1


@pytest.mark.thorough
def test_collectives_are_compared_by_operation_and_ranks() -> None:
    sharded = replace(RECIPE, parallelism=replace(RECIPE.parallelism, shard=2))
    two = [step_figures(plan(recipe, "2xH100").ledger) for recipe in (RECIPE, sharded)]
    changed = compare_steps(*two).collectives
    gathered = [changes for name, changes in changed.items() if name.startswith("all_gather over 2")]
    assert gathered
    (whole,) = [change.difference for change in compare_steps(*two).totals if change.name == "collective_bytes"]
    sums = sum(each.difference for changes in changed.values() for each in changes if each.name == "bytes")
    assert sums == whole


@pytest.mark.parametrize(
    ("text", "exceeded"),
    [
        ("parameters=0", True),
        ("parameters=50%", False),
        ("parameters=1M", False),
        ("parameters=1", True),
        ("peak_bytes=1GB", False),
        ("peak-bytes=0.001 %", True),
        ("seconds=0%", True),
    ],
)
def test_a_limit_is_exceeded_by_what_grew_by_more(text: str, exceeded: bool) -> None:
    found = difference(RECIPE, with_layers(3))
    assert Limit.parse(text).is_exceeded(found) is exceeded
    assert not Limit.parse(text).is_exceeded(difference(with_layers(3), RECIPE))


@pytest.mark.parametrize("text", ["", "peek_bytes=2%", "flops", "flops=", "flops=many", "seconds=2", "flops=-1%"])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(NapkinError):
        Limit.parse(text)


def test_steps_with_other_parts_are_refused() -> None:
    ledger = planned(RECIPE).ledger
    with pytest.raises(NapkinError, match="summed by module, the other by operator"):
        compare_steps(step_figures(ledger, by="module"), step_figures(ledger, by="operator"))
    with pytest.raises(NapkinError, match="no figure seconds"):
        Limit.parse("seconds=1%").is_exceeded(compare_steps(step_figures(ledger), step_figures(ledger)))
