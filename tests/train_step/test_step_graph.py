"""Steps that replay a recorded micro-batch, on a tape of operators in place of a CUDA graph, equal plain steps."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from napkin.accounting.recording import record
from napkin.errors import NapkinError
from napkin.hardware.target import CudaTarget
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan
from napkin.planning.step.kernel_choice import refuse_impossible_graph
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.train_step.step import build_train_state
from napkin.train_step.step_graph import PLAIN_STEPS, graph_obstacle
from oracles.graph_tape import TapeRecorder


def recipe(*, training: dict[str, Any] | None = None, **model: Any) -> Recipe:
    config = ModelConfig(61, context_length=12, d_model=16, n_layers=2, n_heads=2, **model)
    settings = TrainingConfig(**{"batch_size": 6, "micro_batch_size": 2, **(training or {})})
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0).resolved
    return Recipe(model=config, optimizer=optimizer, training=settings)


def batch(number: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(61, (rows, 13), generator=generator)
    documents = (torch.rand(rows, 12, generator=generator) < 0.2).cumsum(1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), documents


CASES: dict[str, dict[str, Any]] = {
    "llama": {"norm": "rms", "feed_forward": "swiglu", "n_kv_heads": 1},
    "gpt2 dropout": {"norm": "layer", "feed_forward": "gelu_tanh", "positions": "learned", "dropout": 0.2},
    "one micro-batch, recomputed": {"training": {"micro_batch_size": None, "recompute": "full"}},
    "triton's operators": {"training": {"kernels": "triton"}, "tie_embeddings": True},
}


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("case", CASES)
def test_twenty_replayed_steps_are_plain_steps_bit_for_bit(case: str) -> None:
    resolved, recorder = ResolvedRecipe(recipe(**CASES[case]), Precision("fp32", "cpu")), TapeRecorder()
    plain, graphed = build_train_state(resolved), build_train_state(resolved, recorder=recorder)
    micro_batches = 1 if "one" in case else 3
    for number in range(20):
        tensors = batch(number)
        # Weights change from step to step, as those of ranks do.
        weights = None if number % 2 else [torch.tensor(0.1 * (number + 1 + n)) for n in range(micro_batches)]
        expected, actual = (state.step(number, *tensors, weights=weights) for state in (plain, graphed))
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])
    assert recorder.replays == (20 - PLAIN_STEPS) * micro_batches
    for mine, theirs in zip(graphed.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_metered_step_and_one_of_another_shape_are_computed_without_the_graph() -> None:
    resolved, recorder = ResolvedRecipe(recipe(), Precision("fp32", "cpu")), TapeRecorder()
    plain, graphed = build_train_state(resolved), build_train_state(resolved, recorder=recorder)
    for number in range(8):
        tensors = batch(number, rows=5 if number == 5 else 6)
        if number == 5:
            tensors = tuple(each[:, :8].contiguous() for each in batch(number))
        expected = plain.step(number, *tensors)
        before, actual = recorder.replays, []
        if number == 6:
            record(graphed.model, lambda t=tensors, a=actual: a.extend(graphed.step(6, *t)))
        else:
            actual.extend(graphed.step(number, *tensors))
        assert torch.equal(actual[0], expected[0])
        assert recorder.replays - before == (3 if number in (3, 4, 7) else 0)


def test_a_skipped_update_leaves_no_gradient_behind() -> None:
    resolved = ResolvedRecipe(recipe(), Precision("fp32", "cpu"))
    plain, graphed = build_train_state(resolved), build_train_state(resolved, recorder=TapeRecorder())
    for number in range(7):
        results = [
            state.step(number, *batch(number), is_fit=lambda loss, norm, n=number: n != 5) for state in (plain, graphed)
        ]
        assert torch.equal(*(loss for loss, _ in results))


GPU = ResolvedRecipe(recipe(), Precision("bf16", "cuda"), CudaTarget())
OBSTACLES = {
    "on a CPU": ResolvedRecipe(recipe(), Precision("fp32", "cpu")),
    "ranks exchange": replace(GPU, world_size=2),
    "per expert": replace(GPU, recipe=recipe(n_experts=4)),
    "loss scale": replace(GPU, precision=Precision("fp16", "cuda")),
    "host memory": replace(GPU, recipe=recipe(training={"offload_optimizer": True})),
    "generator of dropout": replace(GPU, recipe=recipe(training={"recompute": "full"}, dropout=0.1)),
    "differ in length": replace(GPU, recipe=TuningRecipe()),
}


@pytest.mark.parametrize("why", OBSTACLES)
def test_a_graph_that_cannot_be_is_refused_with_its_reason_and_the_way_out(why: str) -> None:
    assert why in (graph_obstacle(OBSTACLES[why]) or "")
    refuse_impossible_graph(OBSTACLES[why])
    with pytest.raises(NapkinError, match=r"cuda_graphs is 'on', but .*--training.cuda-graphs off"):
        refuse_impossible_graph(OBSTACLES[why].with_training(cuda_graphs="on"))
    assert graph_obstacle(GPU) is None


def test_a_plan_for_a_gpu_counts_the_pool_beside_the_step() -> None:
    plans = {choice: plan(recipe(training={"cuda_graphs": choice}), on="H100-SXM-80GB") for choice in ("off", "on")}
    off, on = plans["off"], plans["on"]
    assert off.graph_bytes == 0
    assert on.graph_bytes == on.memory.peak_bytes - on.memory.resident_bytes > 0
    assert on.peak_bytes == off.peak_bytes
    # Memory for the step and not for the pool.
    tight = replace(on.site, memory_bytes=int((on.peak_bytes + on.graph_bytes / 2) / 0.95))
    assert replace(off, site=tight).fits
    assert not replace(on, site=tight).fits
    assert "bytes of the graph" in {row.quantity for row in on.table()}
