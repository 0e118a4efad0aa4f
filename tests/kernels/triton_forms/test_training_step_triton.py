"""A whole training step with Triton's kernels, in the interpreter, against the same step with torch's operators."""

from typing import Any

import pytest
import torch

from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layer", "feed_forward": "gelu_tanh", "positions": "learned", "biases": "all"},
    "llama": {"norm": "rms", "feed_forward": "swiglu", "n_kv_heads": 2, "attention_window": 5},
    "gemma": {
        "norm": "rms",
        "feed_forward": "swiglu",
        "block": "sandwich",
        "logit_softcap": 9.0,
        "tie_embeddings": True,
    },
    "post-norm": {"norm": "layer", "feed_forward": "swiglu", "block": "post", "qk_norm": "head"},
    "experts": {"norm": "rms", "feed_forward": "swiglu", "n_experts": 3, "z_weight": 1e-3},
}


TOKENS, TARGETS = (torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])


def state_of(model: str, kernels: Any, attention: Any, **training: Any) -> TrainState:
    config = ModelConfig(61, 12, d_model=32, n_layers=2, n_heads=4, attention=attention, **MODELS[model])
    settings = TrainingConfig(batch_size=2, kernels=kernels, loss_chunk_size=16, **training)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=0).resolved
    recipe = Recipe(model=config, optimizer=optimizer, training=settings)
    return build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")))


@pytest.mark.parametrize("model", MODELS)
def test_loss_and_gradients_of_packed_documents_are_those_of_plain_forms(model: str) -> None:
    plain, fused = state_of(model, "plain", "plain"), state_of(model, "triton", "flash")
    losses = [state.model.loss(TOKENS, TARGETS, DOCUMENTS) for state in (plain, fused)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    theirs = dict(plain.model.named_parameters())
    for name, parameter in fused.model.named_parameters():
        mine, expected = parameter.grad, theirs[name].grad
        assert mine is not None
        assert expected is not None
        assert (mine - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())), name


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_losses_and_gradient_norms_of_steps_are_those_of_plain_forms(recompute: str) -> None:
    plain, fused = state_of("llama", "plain", "plain"), state_of("llama", "triton", "flash", recompute=recompute)
    for number in range(2):
        expected, actual = (state.step(number, TOKENS, TARGETS, DOCUMENTS) for state in (plain, fused))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0.0)
