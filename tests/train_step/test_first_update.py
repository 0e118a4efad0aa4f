"""The ledger after an update of gradients that nobody computed is that after a whole step."""

import dataclasses
from typing import Any

import pytest

from napkin.hardware.target import CudaTarget
from napkin.model.config import ModelConfig
from napkin.optim.registry import OPTIMIZERS
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step import step_ledger
from napkin.train_step.step_ledger import count_step

EXPERTS = {"n_experts": 4, "experts_per_token": 2, "d_ff": 16}


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize(
    ("precision", "optimizer", "model", "training"),
    [
        *(("fp32", {"name": name}, {}, {}) for name in sorted(OPTIMIZERS)),
        ("bf16", {"name": "adamw", "average_decay": 0.9}, {"dropout": 0.1}, {"micro_batch_size": 2}),
        ("fp16", {"name": "adamw", "fused": True}, {"tie_embeddings": True}, {}),
        ("bf16-pure", {"name": "muon"}, {}, {"recompute": "full"}),
        ("int8", {"name": "adamw"}, {}, {"kernels": "compiled"}),
        ("bf16", {"name": "lion"}, EXPERTS, {}),
        ("fp32", {"name": "adamw"}, {}, {"offload_optimizer": True}),
    ],
)
def test_a_step_after_an_update_alone_is_counted_as_one_after_a_whole_step(
    precision: Any,
    optimizer: dict[str, Any],
    model: dict[str, Any],
    training: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = Recipe(
        model=ModelConfig(vocab_size=64, context_length=16, d_model=32, n_layers=2, n_heads=2, **model),
        optimizer=OptimizerConfig(**optimizer),
        training=TrainingConfig(batch_size=4, **training),
    )
    resolved = ResolvedRecipe(recipe, Precision(precision, "cpu"))
    after_update = count_step(resolved)
    monkeypatch.setattr(step_ledger, "warm_up_of", lambda *args, **options: 1)
    assert after_update == count_step(resolved)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_on_a_gpu_all_but_reserved_bytes_is_counted_after_an_update_alone(precision: Any) -> None:
    model = ModelConfig(vocab_size=64, context_length=16, d_model=32, n_layers=2, n_heads=2)
    recipe = Recipe(model=model, training=TrainingConfig(batch_size=4, micro_batch_size=2))
    resolved = ResolvedRecipe(recipe, Precision(precision, "cuda"), target=CudaTarget())
    whole = count_step(resolved)
    assert whole.reserved_bytes
    assert count_step(resolved, reserved=False) == dataclasses.replace(whole, reserved_bytes=None)
