import dataclasses
import math
from typing import Any

import pytest
from napkin.planning.catalogue_plan import plan_elsewhere

from napkin.accounting.rules import all_reduce_seconds_rule
from napkin.errors import NapkinError
from napkin.hardware.catalogue import find_device
from napkin.model.config import ModelConfig
from napkin.planning.micro_batch import refuse_what_does_not_fit
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step_ledger import count_step

A100 = find_device("A100-80GB")


def recipe(batch_size: int = 16, micro_batch_size: int | None = None, **model: Any) -> Recipe:
    sizes = {"vocab_size": 300, "context_length": 64, "d_model": 32, "n_layers": 2, "n_heads": 2, **model}
    training = TrainingConfig(batch_size=batch_size, micro_batch_size=micro_batch_size)
    return Recipe(model=ModelConfig(**sizes), training=training)


def test_each_of_several_devices_steps_over_its_part_of_the_batch() -> None:
    share, precision, plan = plan_elsewhere(recipe(16), A100, 8)
    assert (share.training.batch_size, precision) == (2, Precision("bf16", "cuda"))
    alone = plan_elsewhere(recipe(2), A100, 1)[2]
    assert plan.ledger.flops == alone.ledger.flops
    assert plan.tokens_per_step == 8 * alone.tokens_per_step
    assert plan.price.seconds == alone.price.seconds


def test_dollars_and_energy_are_those_of_all_devices_for_all_steps() -> None:
    _, _, plan = plan_elsewhere(recipe(16), A100, 8)
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


def test_gradients_cost_time_where_the_backward_pass_does_not_hide_them() -> None:
    # One token a device, so that there is nothing to compute beside the exchange of 4 bytes per parameter.
    slow = dataclasses.replace(A100, link_bandwidth=1e9)
    _, _, plan = plan_elsewhere(recipe(8, context_length=1), slow, 8)
    exchange = 2 * 7 / 8 * 4 * plan.ledger.parameters / 1e9
    assert math.isclose(all_reduce_seconds_rule(4 * plan.ledger.parameters, 8, 1e9), exchange)
    assert math.isclose(plan.exchange_seconds, max(0.0, exchange - plan.price.by_phase["backward"].seconds))
    assert plan_elsewhere(recipe(8), A100, 1)[2].exchange_seconds == 0


def test_a_batch_that_does_not_divide_is_refused_with_the_next_that_does() -> None:
    with pytest.raises(NapkinError, match=r"batch_size 12 does not divide among 8 devices.*--training.batch-size 16"):
        plan_elsewhere(recipe(12), A100, 8)
    with pytest.raises(NapkinError, match=r"gets 6 sequences, which do not divide into micro-batches of 4"):
        plan_elsewhere(recipe(12, 4), A100, 2)


def test_a_device_without_bf16_trains_in_fp32_and_says_so_where_bf16_is_wanted() -> None:
    v100 = find_device("V100")
    assert plan_elsewhere(recipe(), v100, 1)[1].products == "fp32"
    with pytest.raises(NapkinError, match="no arithmetic in bf16"):
        plan_elsewhere(dataclasses.replace(recipe(), training=TrainingConfig(precision="bf16")), v100, 1)


def test_what_does_not_fit_is_told_its_ways_out() -> None:
    small = dataclasses.replace(A100, name="small", memory_bytes=600_000_000 + 30_000_000)
    share, precision, plan = plan_elsewhere(recipe(64, context_length=256), small, 4)
    assert (
        plan.ledger.peak_bytes
        == count_step(ResolvedRecipe(share, precision, plan.site.target)).peak_bytes
        > plan.site.memory_bytes
    )
    with pytest.raises(NapkinError) as refused:
        refuse_what_does_not_fit(share, precision, plan)
    line = str(refused.value)
    assert "micro-batch-size" in line
    assert "sharded over the 4 devices" in line
    assert "would fit a " in line
    assert "\n" not in line
