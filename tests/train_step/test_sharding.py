from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step_ledger import count_step

CONFIG = ModelConfig(vocab_size=256, context_length=32, d_model=64, n_layers=3, n_heads=2)


def ledger(products):
    return count_step(
        ResolvedRecipe(Recipe(model=CONFIG, training=TrainingConfig(batch_size=2)), Precision(products, "cpu"))
    )


def test_one_device_has_the_whole_peak() -> None:
    assert ledger("bf16").sharded_peak_bytes(1) == ledger("bf16").peak_bytes


def test_what_stays_however_many_devices_there_are_is_neither_state_nor_its_copies() -> None:
    whole = ledger("bf16")
    rest = max(moment.bytes_alive - moment.state_bytes - moment.weight_copy_bytes for moment in whole.timeline)
    assert rest <= whole.sharded_peak_bytes(10**9) <= rest + 1
    assert rest < whole.sharded_peak_bytes(8) < whole.sharded_peak_bytes(4) < whole.peak_bytes


def test_autocast_keeps_a_narrow_copy_of_each_matrix_and_fp32_keeps_none() -> None:
    matrices = ledger("fp32").parameters - (2 * CONFIG.n_layers + 1) * CONFIG.d_model
    assert max(moment.weight_copy_bytes for moment in ledger("bf16").timeline) == 2 * matrices
    assert max(moment.weight_copy_bytes for moment in ledger("fp32").timeline) == 0
