"""Mamba-2 and Granite 4's hybrid beside transformers: the same logits of the same folder, both ways."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.huggingface import load_huggingface, save_huggingface
from napkin.model.transformer import Transformer
from peers import peer

MAMBA = ModelConfig(
    vocab_size=53,
    context_length=200,
    d_model=24,
    n_layers=2,
    mixers="mamba2",
    feed_forward="none",
    positions="none",
    state_size=6,
    state_head_dim=8,
    state_groups=2,
    embedding_scale=1.0,
)
HYBRID = replace(MAMBA, mixers="mamba2,attention,mamba2", n_layers=3, feed_forward="swiglu", n_kv_heads=2, d_ff=40)
MODELS = {"mamba2": MAMBA, "granitemoehybrid": HYBRID}


def disturbed(model: Any) -> Any:
    """Let every parameter differ from its initial value."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def tokens() -> torch.Tensor:
    return torch.randint(0, 53, (2, 150), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_states_is_saved_and_loaded_again(tmp_path: Path, name: str) -> None:
    ours = disturbed(Transformer(MODELS[name]))
    save_huggingface(ours, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == name
    again = load_huggingface(tmp_path / "model")
    assert again.config.layer_mixers == ours.config.layer_mixers
    torch.testing.assert_close(again(tokens()), ours(tokens()), rtol=0, atol=0)


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_gives_the_same_logits_in_transformers(tmp_path: Path, name: str) -> None:
    transformers = peer("transformers")
    ours = disturbed(Transformer(MODELS[name]))
    save_huggingface(ours, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.peers
def test_a_mamba2_of_transformers_gives_the_same_logits_here(tmp_path: Path) -> None:
    transformers = peer("transformers")
    config = transformers.Mamba2Config(
        vocab_size=53, hidden_size=24, num_heads=6, head_dim=8, state_size=6, n_groups=2, num_hidden_layers=2,
        chunk_size=32, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = disturbed(transformers.Mamba2ForCausalLM(config))
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(load_huggingface(tmp_path)(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.peers
def test_a_granite_hybrid_of_transformers_gives_the_same_logits_here(tmp_path: Path) -> None:
    transformers = peer("transformers")
    config = transformers.GraniteMoeHybridConfig(
        vocab_size=53, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=200, num_local_experts=0, shared_intermediate_size=40, mamba_n_heads=6, mamba_d_state=6,
        mamba_d_head=8, mamba_n_groups=3, layer_types=["mamba", "attention", "mamba"], embedding_multiplier=3.0,
        attention_multiplier=0.3, residual_multiplier=0.5, logits_scaling=2.0, position_embedding_type="rope",
    )  # fmt: skip
    theirs = disturbed(transformers.GraniteMoeHybridForCausalLM(config))
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(load_huggingface(tmp_path)(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "mamba2", "use_bias": True}, "use_bias"),
        ({"model_type": "mamba2", "use_conv_bias": False}, "bias"),
        ({"model_type": "mamba2", "time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ({"model_type": "granitemoehybrid", "num_local_experts": 8}, "num_local_experts"),
        ({"model_type": "granitemoehybrid", "num_local_experts": 0, "layer_types": ["mamba"]}, "layer_types"),
    ],
)
def test_a_variant_that_is_not_supported_is_named(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    sizes = {"vocab_size": 53, "max_position_embeddings": 64, "hidden_size": 24, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 40, "num_heads": 6, "head_dim": 8, "mamba_n_heads": 6}
    (tmp_path / "config.json").write_text(json.dumps(sizes | settings))
    with pytest.raises(NapkinError, match=named):
        load_huggingface(tmp_path)


def test_a_hybrid_that_no_family_has_is_refused_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match="qk_norm 'head'"):
        save_huggingface(Transformer(replace(HYBRID, qk_norm="head")), tmp_path / "model")
