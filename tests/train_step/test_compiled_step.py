"""A training step whose operators between products are compiled: the numbers, counts and bytes of the plain form."""

from typing import Any, Literal

import pytest
import torch

from napkin.accounting.metering import meter_step
from napkin.model.block import Block
from napkin.model.config import ModelConfig
from napkin.model.kernel_forms import use_compiled_kernels
from napkin.model.transformer import Transformer
from napkin.planning.step.kernel_choice import choose_kernels
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import build_train_state
from napkin.train_step.step_ledger import count_step

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layer", "feed_forward": "gelu_tanh", "positions": "learned", "biases": "all"},
    "llama": {"norm": "rms", "feed_forward": "swiglu", "n_kv_heads": 2},
    "gemma": {"norm": "rms", "feed_forward": "geglu_tanh", "block": "sandwich", "logit_softcap": 20.0},
    "post-norm": {"norm": "layer", "feed_forward": "swiglu", "block": "post", "qk_norm": "head"},
    "parallel": {"norm": "layer", "feed_forward": "gelu_tanh", "block": "parallel"},
    "experts": {"norm": "rms", "feed_forward": "swiglu", "n_experts": 4, "z_weight": 1e-3},
}


def resolved(model: str, kernels: str, products: Literal["fp32", "bf16"], **training: Any) -> ResolvedRecipe:
    config = ModelConfig(301, 32, d_model=64, n_layers=2, n_heads=4, **MODELS[model])
    settings = TrainingConfig(batch_size=4, kernels=kernels, loss_chunk_size=64, **training)  # pyright: ignore[reportArgumentType]
    recipe = Recipe(model=config, optimizer=OptimizerConfig(learning_rate=1e-3), training=settings)
    precision = Precision(products, "cpu")
    return ResolvedRecipe(choose_kernels(recipe, precision), precision)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(301, (4, 33), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("model", MODELS)
def test_twenty_losses_are_those_of_the_plain_form(model: str) -> None:
    losses = []
    for kernels in ("plain", "compiled"):
        state = build_train_state(resolved(model, kernels, "fp32"))
        losses.append([float(state.step(number, *batch(number))[0]) for number in range(20)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("products", ["fp32", "bf16"])
@pytest.mark.parametrize("model", MODELS)
def test_the_count_has_the_flops_of_the_plain_form_and_the_bytes_of_a_real_step(
    model: str, products: Literal["fp32", "bf16"]
) -> None:
    plain, compiled = (count_step(resolved(model, kernels, products)) for kernels in ("plain", "compiled"))
    assert compiled.flops == plain.flops
    assert not compiled.unknown_operators
    state = build_train_state(resolved(model, "compiled", products))
    numbers = iter(range(10))
    state.step(next(numbers), *batch(0))
    metered = meter_step(state.model, lambda: state.step(next(numbers), *batch(0)))
    assert metered.peak_bytes == pytest.approx(compiled.peak_bytes, rel=1e-3)
    assert compiled.peak_bytes <= plain.peak_bytes


def test_recomputation_changes_no_number() -> None:
    kept = build_train_state(resolved("llama", "compiled", "fp32"))
    again = build_train_state(resolved("llama", "compiled", "fp32", recompute="full"))
    selective = build_train_state(resolved("llama", "compiled", "fp32", recompute="selective"))
    for number in range(3):
        expected = kept.step(number, *batch(number))
        assert again.step(number, *batch(number)) == expected
        assert selective.step(number, *batch(number)) == expected


def test_a_norm_that_a_router_reads_stays_wide() -> None:
    model = Transformer(resolved("experts", "compiled", "bf16").recipe.model)
    use_compiled_kernels(model)
    block = model.blocks[0]
    assert isinstance(block, Block)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(1, 4, 64)
        assert block.attention_norm(x).dtype == torch.bfloat16
        assert block.feed_forward_norm(x).dtype == torch.float32
