"""A rank's step, counted on a fake process group; beside real ranks: tests/reliability/test_rank_bytes.py."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from napkin.accounting.ledger import Ledger
from napkin.accounting.rank_seconds import Communication
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig
from napkin.train_step import step_ledger
from napkin.train_step.step_ledger import count_step

CONFIG = ModelConfig(vocab_size=250, context_length=32, d_model=64, n_layers=2, n_heads=4)
LAYERS = CONFIG.n_layers
BLOCK = sum(parameter.numel() for parameter in Transformer(CONFIG).blocks[0].parameters())
OUTSIDE = CONFIG.vocab_size * CONFIG.d_model + CONFIG.d_model


def ledger(
    world_size: int,
    *,
    model: ModelConfig = CONFIG,
    micro_batches: int = 1,
    precision: str = "fp32",
    rank: int = 0,
    **layout: int,
) -> Ledger:
    training = TrainingConfig(batch_size=micro_batches * world_size, micro_batch_size=1, precision=precision)  # pyright: ignore[reportArgumentType]
    recipe = Recipe(model=model, training=training, parallelism=ParallelismConfig(**layout))  # pyright: ignore[reportArgumentType]
    return count_step(ResolvedRecipe(recipe, Precision(precision, "cpu"), world_size=world_size), rank)  # pyright: ignore[reportArgumentType]


def collectives(of: Ledger, least_bytes: int = 1000) -> Counter[tuple[str, str, int, int]]:
    calls = ((row.collective, row.phase) for row in of.rows if row.collective)
    return Counter(
        (call.operation, phase, call.data_bytes, call.group_size)
        for call, phase in calls
        if call.data_bytes > least_bytes
    )


@pytest.mark.thorough
def test_fsdp_gathers_and_scatters_each_block_for_every_micro_batch() -> None:
    # A parameter of 250 · 64 numbers divides among two ranks without padding.
    for precision, gathered in (("fp32", 4), ("bf16", 2)):
        assert collectives(ledger(2, micro_batches=4, precision=precision, shard=2)) == {
            ("all_gather", "forward", 4 * OUTSIDE, 2): 4,
            ("all_gather", "forward", gathered * BLOCK, 2): 4 * LAYERS,
            ("all_gather", "backward", gathered * BLOCK, 2): 4 * LAYERS,
            ("reduce_scatter", "backward", 4 * BLOCK, 2): 4 * LAYERS,
            ("reduce_scatter", "backward", 4 * OUTSIDE, 2): 4,
        }


def test_experts_that_are_fewer_than_the_ranks_are_gathered_without_padding() -> None:
    model = dataclasses.replace(CONFIG, n_experts=2, d_expert=32)
    block = sum(parameter.numel() for parameter in Transformer(model).blocks[0].parameters())
    # The router alone has 2 rows, which are padded to 4.
    gathered = 4 * (block + 2 * model.d_model)
    assert collectives(ledger(4, model=model, shard=4))["all_gather", "forward", gathered, 4] == model.n_layers


def test_ddp_sends_each_gradient_once_per_step() -> None:
    found = collectives(ledger(4, micro_batches=4))
    assert {name[:2] for name in found} == {("all_reduce", "backward")}
    assert sum(name[2] * times for name, times in found.items()) == 4 * (LAYERS * BLOCK + OUTSIDE)


def test_replicas_of_shards_add_up_their_shards() -> None:
    found = collectives(ledger(4, data=2, shard=2))
    assert (
        found["all_reduce", "backward", 4 * BLOCK // 2, 2]
        == found["reduce_scatter", "backward", 4 * BLOCK, 2]
        == LAYERS
    )
    communication = Communication.of(ledger(4, data=2, shard=2))
    strides = {
        collective.operation: collective.stride
        for collective in communication.collectives
        if collective.group_size == 2
    }
    assert strides == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@pytest.mark.thorough
@pytest.mark.parametrize("experts_per_token", [1, 2])
def test_routed_tokens_are_counted_as_sent_evenly_to_the_ranks_of_their_experts(experts_per_token: int) -> None:
    # 30 tokens are not a multiple of 4 ranks: with one expert for each, ranks get 7 or 8 of them.
    model = dataclasses.replace(CONFIG, context_length=30, n_experts=12, experts_per_token=experts_per_token)
    found = ledger(4, model=model, data=4, expert=4)
    rows = 4 * 30 * experts_per_token * CONFIG.d_model
    sent = {name: times for name, times in collectives(found).items() if name[0] == "all_to_all"}
    assert sent == {("all_to_all", "forward", rows, 4): 2 * LAYERS, ("all_to_all", "backward", rows, 4): 2 * LAYERS}
    alone = ledger(1, model=model)
    assert found.flops == alone.flops
    assert "evenly" in found.assumption
    assert not alone.assumption


def test_a_rank_waits_for_the_tensor_that_it_has() -> None:
    model = dataclasses.replace(CONFIG, n_experts=2)
    rows = [row for row in ledger(2, model=model, data=2, expert=2).rows if row.operator == "wait_tensor"]
    assert rows
    assert not sum(row.bytes_allocated for row in rows)


@pytest.mark.thorough
def test_tokens_are_sent_to_experts_within_the_stages_of_a_pipeline() -> None:
    model = dataclasses.replace(CONFIG, n_experts=4)
    whole = ledger(2, micro_batches=2, model=model, data=2, expert=2)
    stages = [ledger(4, micro_batches=1, model=model, pipeline=2, data=2, expert=2, rank=rank) for rank in (0, 2)]
    assert sum(stage.flops for stage in stages) == whole.flops
    forward = 4 * 32 * 2 * CONFIG.d_model
    for stage in stages:
        assert collectives(stage)["all_to_all", "forward", forward, 2] == 2 * 2


def test_state_is_divided_among_the_ranks_that_shard_it() -> None:
    alone, of_four = (ledger(size, shard=size).peak_by_category["optimizer state"] for size in (1, 4))
    # The table of 250 rows is divided as 63, 63, 63 and 61.
    assert of_four == pytest.approx(alone / 4, rel=0.01)


@pytest.mark.thorough
def test_micro_batches_that_are_not_traced_are_those_that_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [ledger(2, micro_batches=5, data=2), ledger(2, micro_batches=5, shard=2)]
    monkeypatch.setattr(step_ledger, "TRACED_MICRO_BATCHES", 5)
    all_of_them = [ledger(2, micro_batches=5, data=2), ledger(2, micro_batches=5, shard=2)]
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
