"""Every rank has one place on the mesh, and what cannot be divided is refused with a way out."""

import dataclasses
import itertools
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.recipe.layout import Layout, layout_of, refuse_impossible_layout
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig


def test_what_is_left_open_takes_the_ranks_that_remain() -> None:
    assert layout_of(ParallelismConfig(), 8) == Layout(data=8)
    assert layout_of(ParallelismConfig(), 8, otherwise="fsdp") == Layout(shard=8)
    assert layout_of(ParallelismConfig(tensor=2, pipeline=2), 8) == Layout(data=2, tensor=2, pipeline=2)
    assert layout_of(ParallelismConfig(data=2), 8, otherwise="fsdp") == Layout(data=2, shard=4)
    assert layout_of(ParallelismConfig(data=2, shard=4), 8) == Layout(data=2, shard=4)
    assert layout_of(ParallelismConfig(tensor=4), 1) == Layout()


@pytest.mark.parametrize(
    ("sizes", "world_size"), [({"tensor": 3}, 8), ({"tensor": 16}, 8), ({"data": 2, "shard": 2}, 8), ({"data": 4}, 2)]
)
def test_sizes_that_do_not_make_the_ranks_are_refused(sizes: dict[str, int], world_size: int) -> None:
    with pytest.raises(NapkinError, match=f"there are {world_size}"):
        layout_of(ParallelismConfig(**sizes), world_size)  # pyright: ignore[reportArgumentType]


def test_every_rank_has_its_own_place_and_tensor_ranks_are_neighbours() -> None:
    layout = Layout(pipeline=2, data=2, shard=3, context=2, tensor=4)
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.world_size)]
    assert places == list(itertools.product(*(range(size) for size in layout.sizes.values())))


def test_the_parts_of_a_batch_are_all_of_it_and_tensor_context_and_pipeline_ranks_have_the_same() -> None:
    layout = Layout(pipeline=2, data=2, shard=2, context=2, tensor=2)
    rows = [layout.rows(rank, 8) for rank in range(layout.world_size)]
    for part in range(4):
        same = [rank for rank in range(32) if rows[rank] == slice(2 * part, 2 * part + 2)]
        assert len(same) == 8
        assert {layout.batch_part(rank) for rank in same} == {part}


@pytest.mark.parametrize("context", [1, 2, 4])
def test_context_ranks_have_all_columns_once_and_as_many_pairs_each(context: int) -> None:
    layout = Layout(data=2, context=context)
    owned = [
        [column for own in layout.columns(rank, 32) for column in range(32)[own]] for rank in range(layout.world_size)
    ]
    assert sorted(itertools.chain(*owned)) == sorted([*range(32)] * 2)
    # A token sees itself and those before it.
    assert {sum(column + 1 for column in columns) for columns in owned} == {32 * 33 // 2 // context}


def test_stages_have_all_blocks_in_order() -> None:
    assert Layout(pipeline=3).blocks_of_stages(7) == (range(3), range(3, 5), range(5, 7))
    uneven = Layout(pipeline=2, stages_per_rank=2, blocks_per_stage=(1, 2, 3, 1))
    assert uneven.blocks_of_stages(7) == (range(1), range(1, 3), range(3, 6), range(6, 7))


MODEL = ModelConfig(vocab_size=64, context_length=32, d_model=24, n_layers=4, n_heads=4, n_kv_heads=2)
RECIPE = Recipe(model=MODEL, training=TrainingConfig(batch_size=8, micro_batch_size=2))


@pytest.mark.parametrize(
    ("layout", "model", "message"),
    [
        (Layout(tensor=3), {}, "does not divide model.n_heads 4"),
        (Layout(tensor=4), {}, "does not divide model.n_kv_heads 2"),
        (Layout(tensor=2), {"d_ff": 33}, "does not divide model.d_ff 33"),
        (Layout(tensor=4), {"n_kv_heads": 4, "vocab_size": 5}, "a rank without any of model.vocab_size 5"),
        (Layout(tensor=2), {"n_experts": 4, "d_expert": 33}, "does not divide model.d_expert 33"),
        (Layout(tensor=2, data=2, expert=2), {"n_experts": 4}, "parallelism.tensor 2 and expert"),
        (Layout(pipeline=8), {}, "needs at least as many blocks, the model has 4"),
        (Layout(pipeline=2, blocks_per_stage=(1, 2)), {}, "adds up to 3 blocks, the model has 4"),
        (Layout(pipeline=4, data=2), {}, "needs at least as many micro-batches for 1f1b, there are 2"),
        (Layout(pipeline=2, schedule="zb-v", stages_per_rank=2, shard=2), {}, "--model.no-tie-embeddings"),
        (Layout(context=3), {}, "--model.context-length 36"),
        (Layout(data=3, expert=3), {"n_experts": 4}, "does not divide model.n_experts 4"),
        (Layout(data=2, expert=2), {}, "does not divide model.n_experts 0"),
    ],
)
def test_what_cannot_be_divided_is_refused(layout: Layout, model: dict[str, int], message: str) -> None:
    recipe = dataclasses.replace(RECIPE, model=dataclasses.replace(MODEL, **model))
    with pytest.raises(NapkinError, match=message):
        refuse_impossible_layout(recipe, layout)


@pytest.mark.parametrize(
    ("schedule", "training", "message"),
    [
        ("zb-h1", {"recompute": "full"}, "--parallelism.schedule 1f1b"),
        ("1f1b", {"precision": "bf16-pure"}, "--model.no-tie-embeddings"),
        ("interleaved-1f1b", {"batch_size": 10}, "use 4 or 6 micro-batches"),
    ],
)
def test_what_cannot_pass_through_stages_is_refused(schedule: Any, training: dict[str, Any], message: str) -> None:
    recipe = dataclasses.replace(RECIPE, training=dataclasses.replace(RECIPE.training, **training))
    refuse_impossible_layout(recipe, Layout())
    with pytest.raises(NapkinError, match=message):
        refuse_impossible_layout(recipe, Layout(pipeline=2, schedule=schedule))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor": 0}, "tensor is 0"),
        ({"stages_per_rank": 2}, "1f1b has 1 stage per rank"),
        ({"schedule": "zb-v", "stages_per_rank": 1}, "zb-v has 2"),
        ({"pipeline": 2, "blocks_per_stage": (4,)}, "there are 2 stages"),
        ({"pipeline": 3, "blocks_per_stage": (4, 0, 1)}, "stage 1 .* nothing to compute"),
        ({"pipeline": 2, "blocks_per_stage": (5, -1)}, "-1 blocks"),
    ],
)
def test_contradictions_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(NapkinError, match=message):
        ParallelismConfig(**settings)
