import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.errors import NapkinError
from napkin.model.config import preset, presets
from napkin.model.transformer import Transformer
from peers import peer


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", presets())
def test_a_preset_has_the_published_number_of_parameters_to_the_unit(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(presets()[name].model)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted + presets()[name].beyond == presets()[name].parameters


def test_what_a_config_does_not_say_of_gpt_oss_is_what_its_layers_hold() -> None:
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        found = presets()[name]
        model, experts = found.model, found.model.n_experts
        # Biases of the output, of the router and of both matrices of each expert, and a sink per head.
        each = model.d_model + experts + experts * (2 * model.resolved_d_ff + model.d_model) + model.n_heads
        assert found.beyond == model.n_layers * each


def test_gemma_with_its_vision_tower_has_the_parameters_of_its_files() -> None:
    # SigLIP of 27 layers of width 1,152 on patches of 14 · 14: patches and 64 · 64 positions, layers, the last norm.
    width, inner = 1152, 4304
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    tower = 3 * 14 * 14 * width + width + 64 * 64 * width + 27 * layer + 2 * width
    for name, whole in (("4b", 4_300_079_472), ("12b", 12_187_325_040), ("27b", 27_432_406_640)):
        text = presets()[f"gemma-3-{name}"]
        assert text.parameters + tower + width * (text.model.d_model + 1) == whole


@pytest.mark.peers
@pytest.mark.parametrize(
    "name", ["gemma-3-270m", "gemma-3-4b", "gemma-3-27b", "gpt-oss-20b", "qwen3-30b-a3b", "mamba2-130m", "mamba2-2.7b"]
)
def test_a_preset_has_the_parameters_of_the_same_config_in_transformers(name: str) -> None:
    transformers = peer("transformers")
    found = presets()[name]
    model = found.model
    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": model.n_heads,
        "num_key_value_heads": model.resolved_n_kv_heads,
        "head_dim": model.resolved_head_dim,
        "intermediate_size": model.resolved_d_ff,
    }
    if name.startswith("gemma"):
        kind, config = transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**sizes)
    elif name.startswith("mamba2"):
        config = transformers.Mamba2Config(
            vocab_size=model.vocab_size,
            hidden_size=model.d_model,
            num_hidden_layers=model.n_layers,
            num_heads=model.resolved_state_heads,
            n_groups=model.state_groups,
            tie_word_embeddings=True,
        )
        kind = transformers.Mamba2ForCausalLM
    elif name.startswith("gpt"):
        config = transformers.GptOssConfig(**sizes, num_local_experts=model.n_experts)
        kind = transformers.GptOssForCausalLM
    else:
        config = transformers.Qwen3MoeConfig(
            **sizes, num_experts=model.n_experts, moe_intermediate_size=model.resolved_d_expert
        )
        kind = transformers.Qwen3MoeForCausalLM
    with torch.device("meta"):
        built = kind(config)
    assert sum(parameter.numel() for parameter in built.parameters()) == found.parameters


def test_the_families_that_people_ask_for_are_there() -> None:
    wanted = (
        "gpt2 gpt2-medium gpt2-large gpt2-xl llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3-405b"
    )
    wanted += " qwen3-0.6b qwen3-8b olmo-2-7b mixtral-8x7b deepseek-moe-16b"
    wanted += " llama-3.1-8b llama-3.1-70b llama-3.2-1b llama-3.2-3b mistral-7b qwen3-1.7b qwen3-4b qwen3-14b qwen3-32b"
    wanted += " qwen3-30b-a3b qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2.5-72b"
    wanted += " llama-3.3-70b qwen3-235b-a22b qwen3-coder-480b-a35b gemma-3-270m gemma-3-1b"
    wanted += " gemma-3-4b gemma-3-12b gemma-3-27b gpt-oss-20b gpt-oss-120b deepseek-v2-lite deepseek-v3"
    wanted += " mamba2-130m mamba2-370m mamba2-780m mamba2-1.3b mamba2-2.7b"
    assert set(wanted.split()) == set(presets())
    assert all(found.source.count("/") == 1 for found in presets().values())


def test_a_preset_can_be_changed() -> None:
    small = preset("llama-3-8b", n_layers=2, context_length=128)
    assert (small.n_layers, small.context_length, small.rope_theta) == (2, 128, 500000.0)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("name", ["deepseek-moe-16b", "olmo-2-7b", "qwen3-8b", "gpt2-xl"])
def test_a_preset_trains_on_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        model = Transformer(preset(name, n_layers=2))
        tokens = torch.zeros(1, 16, dtype=torch.int64)
        model.loss(tokens, tokens).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_wrong_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(NapkinError, match=r"'lama-3-8b'.*preset: did.*'llama-3-8b'"):
        preset("lama-3-8b")
    with pytest.raises(NapkinError, match="gpt2, gpt2-medium"):
        preset("xyz")
