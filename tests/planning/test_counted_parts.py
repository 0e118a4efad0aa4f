"""The calls of a block at any size, beside a count of a model of one block at that size."""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from napkin.accounting.ledger import Row
from napkin.hardware.device_file import find_device
from napkin.model.config import ModelConfig
from napkin.planning.layouts.counted_parts import Size, block_kinds, count_parts, one_of_each, with_tensor
from napkin.planning.planner import resolve
from napkin.planning.step.machine import CatalogueMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step_ledger import count_step

MODEL = ModelConfig(vocab_size=256, context_length=32, d_model=32, n_layers=2, n_heads=4, n_kv_heads=4)
PLAIN: dict[str, Any] = {"attention": "plain"}
LATENTS: dict[str, Any] = {"n_kv_heads": None, "kv_lora_rank": 24, "qk_rope_head_dim": 4, "v_head_dim": 6}
# Of one sequence, and of one head, plain attention's products are of views where others are of copies.
SOME: list[dict[str, Any]] = [PLAIN, {"attention_softcap": 50.0, "n_kv_heads": 2}]
OTHERS: list[dict[str, Any]] = [
    {},
    {"attention": "flex"},
    {"attention": "flash"},
    {"attention": "compiled"},
    *({"positions": kind, **more} for kind in ("learned", "sinusoidal", "alibi", "none") for more in ({}, PLAIN)),
    *({"qk_norm": kind, **more} for kind in ("head", "all_heads") for more in ({}, PLAIN)),
    *({"norm": kind, "biases": "all"} for kind in ("rms", "layer", "none")),
    *({"block": kind} for kind in ("post", "sandwich", "reordered", "parallel")),
    {"attention_window": 8},
    {"attention_window": 8, **PLAIN},
    {"n_kv_heads": 1},
    {"n_kv_heads": 1, **PLAIN},
    {"feed_forward": "gelu", "dropout": 0.1},
    {**LATENTS, "q_lora_rank": 20},
    {**LATENTS, **PLAIN},
    {"n_experts": 4, **PLAIN},
    {"n_experts": 4, "expert_capacity": 1.0},
    {"rope_pairing": "interleaved", "mup_base_d_model": 16},
]


# (sequences, ranks of tensor): one and several of either, and of heads.
SIZES = [(1, 1), (1, 4), (2, 2), (3, 1), (3, 4)]
ALL_SIZES = [(sequences, tensor) for sequences in (1, 2, 3) for tensor in (1, 2, 4)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        *((each, SIZES) for each in SOME),
        *(pytest.param(each, ALL_SIZES, marks=pytest.mark.torture) for each in (*SOME, *OTHERS)),
    ],
    ids=str,
)
def test_a_block_s_calls_at_each_size_are_those_of_a_count_at_that_size(
    changes: dict[str, Any], sizes: list[tuple[int, int]]
) -> None:
    model = dataclasses.replace(MODEL, **changes)
    recipe = Recipe(model=model, training=TrainingConfig(batch_size=4, micro_batch_size=1, loss_chunk_size=32))
    resolved = resolve(recipe, CatalogueMachine(find_device("H100")))
    tensors = [size for size in (1, 2, 4) if model.resolved_n_kv_heads % size == 0]
    parts = count_parts(resolved, "none", tensors)
    (kind,) = set(block_kinds(model))
    for sequences, tensor in sizes:
        if tensor not in tensors:
            continue
        size = Size(float(sequences), tensor)
        counted = [row for row in rows_at(resolved, sequences, tensor) if row.bytes_read + row.bytes_written]
        operators = parts.operators(kind, size)
        # A count of one device has whole sequences where the ranks of tensor split them.
        whole = dataclasses.replace(operators, split_sequence=operators.split_sequence & False)
        assert figures(whole.at(size)) == figures(counted), size


@pytest.mark.parametrize(
    ("changes", "counted_layers"),
    [
        ({"n_layers": 7, "attention_window": 8, "full_attention_every": 3}, 2),
        ({"n_layers": 7, "kv_sharing": 3}, 4),
        ({"n_layers": 6, "mixers": "mamba2*2,attention", "state_size": 8, "state_head_dim": 8, "state_heads": 2}, 2),
        ({"n_layers": 5, "n_experts": 4, "n_dense_layers": 2, "attention_window": 8, "full_attention_every": 2}, 4),
    ],
    ids=str,
)
def test_the_blocks_of_all_kinds_are_those_of_the_whole_model(changes: dict[str, Any], counted_layers: int) -> None:
    model = dataclasses.replace(MODEL, **changes)
    assert one_of_each(model).n_layers == counted_layers
    resolved = resolve(
        Recipe(model=model, training=TrainingConfig(batch_size=1, micro_batch_size=1, loss_chunk_size=32)),
        CatalogueMachine(find_device("H100")),
    )
    parts = count_parts(resolved, "none", [1])
    expected = figures(
        row
        for row in count_step(resolved, reserved=False).rows
        if row.module.startswith("blocks.") and row.phase != "optimizer" and row.bytes_read + row.bytes_written
    )
    found: Counter[tuple[Any, ...]] = Counter()
    for kind, number in Counter(block_kinds(model)).items():
        for each, times in figures(parts.operators(kind, Size(1.0)).at(Size(1.0))).items():
            found[each] += number * times
    assert found == expected


def rows_at(resolved: ResolvedRecipe, sequences: int, tensor: int) -> Iterable[Row]:
    """Of a block of one device with the matrices of a rank of tensor."""
    local = with_tensor(resolved, tensor).with_model(n_layers=1)
    local = local.with_training(batch_size=sequences, micro_batch_size=sequences, loss_chunk_size=32 * sequences)
    rows = count_step(local, reserved=False).rows
    return (row for row in rows if row.module.startswith("blocks.") and row.phase != "optimizer")


def figures(rows: Iterable[Row]) -> Counter[tuple[Any, ...]]:
    return Counter((row.operator, row.phase, row.flops, row.bytes_read, row.bytes_written) for row in rows)
