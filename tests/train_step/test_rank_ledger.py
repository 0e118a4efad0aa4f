"""A rank's step, counted on a fake process group; beside real ranks: tests/reliability/test_rank_bytes.py."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from napkin.accounting.communication import Communication
from napkin.accounting.ledger import Ledger
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.recipe.parallelism_config import ParallelismConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step import step_ledger
from napkin.train_step.step_ledger import count_step

CONFIG = ModelConfig(vocab_size=250, context_length=32, d_model=64, n_layers=3, n_heads=4)
BLOCK = sum(parameter.numel() for parameter in Transformer(CONFIG).blocks[0].parameters())
OUTSIDE = CONFIG.vocab_size * CONFIG.d_model + CONFIG.d_model


def ledger(world_size: int, *, micro_batches: int = 1, precision: str = "fp32", rank: int = 0, **layout: int) -> Ledger:
    training = TrainingConfig(batch_size=micro_batches * world_size, micro_batch_size=1, precision=precision)  # pyright: ignore[reportArgumentType]
    recipe = Recipe(model=CONFIG, training=training, parallelism=ParallelismConfig(**layout))  # pyright: ignore[reportArgumentType]
    return count_step(ResolvedRecipe(recipe, Precision(precision, "cpu"), world_size=world_size), rank)  # pyright: ignore[reportArgumentType]


def collectives(of: Ledger, least_bytes: int = 1000) -> Counter[tuple[str, str, int, int]]:
    calls = ((row.collective, row.phase) for row in of.rows if row.collective)
    return Counter(
        (call.operation, phase, call.data_bytes, call.group_size)
        for call, phase in calls
        if call.data_bytes > least_bytes
    )


def test_fsdp_gathers_and_scatters_each_block_for_every_micro_batch() -> None:
    # A parameter of 250 · 64 numbers divides among two ranks without padding.
    for precision, gathered in (("fp32", 4), ("bf16", 2)):
        assert collectives(ledger(2, micro_batches=5, precision=precision, shard=2)) == {
            ("all_gather", "forward", 4 * OUTSIDE, 2): 5,
            ("all_gather", "forward", gathered * BLOCK, 2): 15,
            ("all_gather", "backward", gathered * BLOCK, 2): 15,
            ("reduce_scatter", "backward", 4 * BLOCK, 2): 15,
            ("reduce_scatter", "backward", 4 * OUTSIDE, 2): 5,
        }


def test_ddp_sends_each_gradient_once_per_step() -> None:
    found = collectives(ledger(4, micro_batches=5))
    assert {name[:2] for name in found} == {("all_reduce", "backward")}
    assert sum(name[2] * times for name, times in found.items()) == 4 * (3 * BLOCK + OUTSIDE)


def test_replicas_of_shards_add_up_their_shards() -> None:
    found = collectives(ledger(4, data=2, shard=2))
    assert found["all_reduce", "backward", 4 * BLOCK // 2, 2] == found["reduce_scatter", "backward", 4 * BLOCK, 2] == 3
    communication = Communication.of(ledger(4, data=2, shard=2))
    strides = {
        collective.operation: collective.stride
        for collective in communication.collectives
        if collective.group_size == 2
    }
    assert strides == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


def test_state_is_divided_among_the_ranks_that_shard_it() -> None:
    alone, of_four = (ledger(size, shard=size).peak_by_category["optimizer state"] for size in (1, 4))
    # The table of 250 rows is divided as 63, 63, 63 and 61.
    assert of_four == pytest.approx(alone / 4, rel=0.01)


def test_micro_batches_that_are_not_traced_are_those_that_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [ledger(2, micro_batches=6, data=2), ledger(2, micro_batches=6, shard=2)]
    monkeypatch.setattr(step_ledger, "TRACED_MICRO_BATCHES", 6)
    all_of_them = [ledger(2, micro_batches=6, data=2), ledger(2, micro_batches=6, shard=2)]
    for one, other in zip(few, all_of_them, strict=True):
        assert (one.peak_bytes, one.flops, len(one.rows)) == (other.peak_bytes, other.flops, len(other.rows))
        assert collectives(one) == collectives(other)


def test_counting_leaves_the_process_groups_of_the_process_alone() -> None:
    alone = ledger(2, shard=2).peak_bytes
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert ledger(2, shard=2, rank=1).peak_bytes == pytest.approx(alone, rel=0.01)
        assert dist.group.WORLD is group
        total = torch.ones(3)
        dist.all_reduce(total)
        assert dist.get_world_size() == 1
        assert total.tolist() == [1.0] * 3
    finally:
        dist.destroy_process_group()
