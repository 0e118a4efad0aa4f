"""The rules of a plan are the best that can be done by hand for its architecture: each preset's beside its count."""

from dataclasses import replace

import pytest

from napkin.hardware.target import CudaTarget
from napkin.model.config import ModelConfig, preset, presets
from napkin.planning.planner import resolve
from napkin.planning.rules import multiplying_parameters_by_rule, parameters_by_rule, step_flops_by_rule
from napkin.planning.step.machine import ThisMachine
from napkin.recipe import Recipe, TrainingConfig
from napkin.train_step.step_ledger import count_step


@pytest.mark.parametrize("name", presets())
def test_the_parameters_of_a_preset_by_rule_are_within_two_percent_of_its_weight_files(name: str) -> None:
    assert parameters_by_rule(preset(name)) == pytest.approx(presets()[name].parameters, rel=0.02)


# As their makers say, embeddings included: 12.9 B of Mixtral's 46.7 B, 2.8 B of DeepSeekMoE's 16.4 B, 37 B of the 671 B
# of DeepSeek-V3. The 2.4 B of DeepSeek-V2-Lite are without the embedding.
@pytest.mark.parametrize(
    ("name", "active"),
    [("mixtral-8x7b", 12.9e9), ("deepseek-moe-16b", 2.8e9), ("deepseek-v2-lite", 2.61e9), ("deepseek-v3", 37e9)],
)
def test_the_parameters_that_a_token_uses_by_rule_are_those_that_are_published(name: str, active: float) -> None:
    model = preset(name)
    looked_up = model.vocab_size * model.d_model
    assert multiplying_parameters_by_rule(model) + looked_up == pytest.approx(active, rel=0.02)


WIDE = ModelConfig(vocab_size=512, d_model=64, n_layers=2, n_heads=4, head_dim=32, n_kv_heads=2, context_length=64)
SHAPES = {
    "wide heads": WIDE,
    "window": replace(WIDE, attention_window=16, full_attention_every=2),
    "no gate": replace(WIDE, feed_forward="gelu", biases="all", positions="learned", norm="layer"),
    "untied": replace(WIDE, tie_embeddings=False, d_ff=96),
    "latents": replace(WIDE, head_dim=None, n_kv_heads=None, kv_lora_rank=24, qk_nope_head_dim=16, v_head_dim=20),
    "shared keys": replace(WIDE, kv_sharing=2),
    "states": replace(WIDE, mixers="mamba2", feed_forward="none", positions="none", context_length=128),
    "hybrid": replace(WIDE, mixers="mamba2,attention", state_size=32, state_head_dim=32, state_groups=2, n_layers=3),
    "experts": replace(WIDE, n_experts=8, experts_per_token=2, d_expert=48),
    "shared experts": replace(
        WIDE, n_experts=8, experts_per_token=3, n_shared_experts=1, d_expert=48, n_dense_layers=1
    ),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "model",
    [
        *SHAPES.values(),
        *(
            pytest.param(
                replace(preset(name), n_layers=max(2, preset(name).n_dense_layers + 1), context_length=512),
                marks=pytest.mark.torture,
            )
            for name in presets()
        ),
    ],
    ids=[*SHAPES, *presets()],
)
def test_flops_and_parameters_of_an_architecture_by_rule_are_those_of_its_count(model: ModelConfig) -> None:
    model = replace(model, attention=model.resolved_attention)
    training = TrainingConfig(batch_size=2, device="cpu", precision="bf16")
    resolved = resolve(Recipe(model=model, training=training), ThisMachine(device="cpu"))
    ledger = count_step(replace(resolved, target=CudaTarget((9, 0))))
    tokens = 2 * model.context_length
    assert step_flops_by_rule(model, tokens) == pytest.approx(ledger.flops, rel=0.01)
    assert parameters_by_rule(model) == pytest.approx(ledger.parameters, rel=0.02)
