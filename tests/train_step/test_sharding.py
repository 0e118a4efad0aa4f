"""Sharding by its formulas; beside real ranks: tests/reliability/test_sharded_training.py."""

import pytest

from napkin.accounting.communication import Communication
from napkin.accounting.ledger import Ledger
from napkin.accounting.sharding import Sharding, ShardingUnits, fsdp_peak_bytes
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step_ledger import count_step, sharding_of

CONFIG = ModelConfig(vocab_size=256, context_length=32, d_model=64, n_layers=3, n_heads=2)
UNITS = ShardingUnits.of(Transformer(CONFIG))


def resolved(products: str, world_size: int = 1, **training) -> ResolvedRecipe:
    recipe = Recipe(model=CONFIG, training=TrainingConfig(batch_size=2 * world_size, **training))
    return ResolvedRecipe(recipe, Precision(products, "cpu"), world_size=world_size)  # pyright: ignore[reportArgumentType]


def ledger(products: str) -> Ledger:
    return count_step(resolved(products))


def test_units_are_the_parameters_of_each_block_and_of_what_lies_outside() -> None:
    model = Transformer(CONFIG)
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
    assert list(UNITS.blocks) == blocks
    assert UNITS.outside == CONFIG.vocab_size * CONFIG.d_model + CONFIG.d_model
    assert UNITS.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert sharding_of(resolved("fp32", 2)).units == UNITS


def test_one_device_has_the_whole_ledger() -> None:
    whole = ledger("bf16")
    assert Sharding("none", 1, UNITS).device_ledger(whole) is whole


def test_what_stays_however_many_devices_there_are_is_neither_state_nor_its_copies() -> None:
    whole = ledger("fp32")
    rest = max(moment.bytes_alive - moment.state_bytes - moment.weight_copy_bytes for moment in whole.timeline)

    def peak(world_size: int) -> int:
        return fsdp_peak_bytes(whole, UNITS, world_size, gather_bytes=4, reduce_bytes=4)

    gathered = Sharding("fsdp", 8, UNITS).gathered_bytes
    assert rest < peak(10**9) <= rest + gathered + 4 * UNITS.parameters
    assert peak(10**9) < peak(8) < peak(4) < peak(2)


def test_a_device_of_ddp_keeps_all_gradients_in_their_own_format() -> None:
    for products, size in (("fp32", 4), ("bf16", 4), ("bf16-pure", 2)):
        alone, one_of_two = ledger(products), count_step(resolved(products, 2, parallelism="ddp"))
        kept = size * alone.parameters
        assert one_of_two.peak_by_category["gradients"] == kept
        assert alone.peak_bytes <= one_of_two.peak_bytes <= alone.peak_bytes + kept
        assert sum(one_of_two.peak_by_category.values()) == one_of_two.peak_bytes
        assert one_of_two.flops == alone.flops


def test_what_fsdp_gathers_is_in_the_format_that_the_recipe_names() -> None:
    def gathered(products: str, **training: str) -> int:
        return sharding_of(resolved(products, 4, parallelism="fsdp", **training)).gathered_bytes

    outside, pair = 4 * UNITS.outside, sum(UNITS.blocks[:2])
    assert gathered("fp32") == gathered("bf16", gather_format="fp32") == outside + 4 * pair
    assert gathered("bf16") == gathered("fp32", gather_format="bf16") == outside + 2 * pair


def test_every_device_sends_in_a_ring_what_it_has_of_each_unit() -> None:
    blocks, outside = sum(UNITS.blocks), UNITS.outside
    assert Sharding("none", 1, UNITS).communication(4) == Communication()
    assert sum(each.times for each in Sharding("fsdp", 4, UNITS).communication(3).collectives) == 3 * (
        3 * len(UNITS.blocks) + 2
    )
    ddp = Sharding("ddp", 4, UNITS).communication(3)
    assert ddp.bytes_in("forward") == 0
    assert ddp.bytes_in("backward") == pytest.approx(2 * 3 / 4 * 4 * (blocks + outside))
    fsdp = Sharding("fsdp", 4, UNITS, gather_bytes=2).communication(3)
    assert fsdp.bytes_in("forward") == pytest.approx(3 * 3 / 4 * (2 * blocks + 4 * outside))
    assert fsdp.bytes_in("backward") == pytest.approx(3 * 3 / 4 * (2 * blocks + 4 * blocks + 4 * outside))


def test_autocast_keeps_a_narrow_copy_of_each_matrix_and_fp32_keeps_none() -> None:
    matrices = ledger("fp32").parameters - (2 * CONFIG.n_layers + 1) * CONFIG.d_model
    assert max(moment.weight_copy_bytes for moment in ledger("bf16").timeline) == 2 * matrices
    assert max(moment.weight_copy_bytes for moment in ledger("fp32").timeline) == 0
