import dataclasses

import pytest

from napkin.errors import NapkinError
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.device_file import find_device
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan as make_plan
from napkin.planning.planner import resolve, with_vocab_size
from napkin.planning.step import memory_savings
from napkin.planning.step.machine import CatalogueMachine, ThisMachine
from napkin.planning.step.memory_savings import largest_micro_batch, memory_options
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step import build_train_state
from napkin.train_step.step_ledger import count_step
from train_step.test_step import batch, make_recipe, weights

MODEL = ModelConfig(vocab_size=300, context_length=32, d_model=32, n_layers=1, n_heads=2)
FP32 = Precision("fp32", "cpu")


@pytest.fixture(autouse=True)
def soon_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes from which a peak is read off the line through two counts."""
    monkeypatch.setattr(memory_savings, "_PROBE_TOKENS", 128)


def recipe_of(**training) -> Recipe:
    return Recipe(model=MODEL, training=TrainingConfig(**training))


@pytest.mark.torture
def test_auto_is_the_largest_micro_batch_that_fits_by_count() -> None:
    peaks = {
        size: count_step(ResolvedRecipe(recipe_of(batch_size=12, micro_batch_size=size), FP32)).peak_bytes
        for size in (4, 6)
    }
    recipe = ResolvedRecipe(recipe_of(batch_size=12, micro_batch_size="auto"), FP32)
    assert largest_micro_batch(recipe, int(peaks[6] / 0.94)) == 6
    assert largest_micro_batch(recipe, int(peaks[6] / 0.96)) == 4
    assert largest_micro_batch(recipe, 10**12) == 12
    # The plan refuses it and says what helps.
    assert largest_micro_batch(recipe, 1) == 1


def test_a_resolved_recipe_says_what_auto_came_to() -> None:
    recipe = with_vocab_size(recipe_of(batch_size=12, micro_batch_size="auto"), 300)
    assert resolve(recipe, ThisMachine()).recipe.training.micro_batch_size == 12


@pytest.mark.thorough
def test_each_memory_option_is_the_count_of_the_recipe_with_it() -> None:
    device = find_device("H100-SXM-80GB")
    plan = make_plan(recipe_of(batch_size=4), CatalogueMachine(device))
    found = memory_options(plan, CatalogueCeilings(device), host_bandwidth=device.host_bandwidth)
    by_name = {next(iter(memory_option.fields)): memory_option for memory_option in found}
    assert by_name.keys() >= {"micro_batch_size", "recompute", "offload_optimizer"}
    for memory_option in found:
        training = dataclasses.replace(plan.recipe.training, **memory_option.fields)
        changed = dataclasses.replace(plan.recipe, training=training)
        resolved = ResolvedRecipe(changed, plan.resolved.precision, plan.resolved.target)
        assert memory_option.peak_bytes == count_step(resolved).peak_bytes
    full = next(
        memory_option for memory_option in found if memory_option.fields == {"recompute": "full", "recompute_every": 1}
    )
    assert full.hardware_flops > plan.ledger.hardware_flops
    assert full.seconds > plan.seconds_per_step
    assert by_name["offload_optimizer"].seconds > plan.seconds_per_step


def test_offloaded_state_trains_the_same_and_takes_none_of_the_devices_memory() -> None:
    kept, offloaded = make_recipe(), make_recipe(offload_optimizer=True)
    train_states = [build_train_state(ResolvedRecipe(recipe, FP32)) for recipe in (kept, offloaded)]
    for number in range(3):
        for train_state in train_states:
            train_state.step(number, *batch(number))
    assert weights(train_states[0]).equal(weights(train_states[1]))
    resident = [count_step(ResolvedRecipe(recipe, FP32, "cuda")).resident_bytes for recipe in (kept, offloaded)]
    state = sum(tensor.nbytes for one in train_states[0].optimizer.all_state().values() for tensor in one.values())
    # The allocator rounds each tensor up to 512 bytes.
    assert resident[0] - resident[1] == pytest.approx(state, rel=0.2)


def test_offloading_on_a_cpu_is_refused() -> None:
    with pytest.raises(NapkinError, match="in host memory anyway"):
        resolve(recipe_of(offload_optimizer=True, device="cpu"), ThisMachine(device="cpu"))
