"""DeepSeek-V3's folders in and out, beside transformers; the layers beside NumPy: test_switches.py."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig, preset
from napkin.model.huggingface import load_huggingface, read_huggingface_config, save_huggingface
from napkin.model.transformer import Transformer
from oracles.model_switches import disturbed
from peers import peer

DEEPSEEK = ModelConfig(
    53, context_length=40, d_model=24, n_layers=3, n_heads=4, d_ff=40, norm_eps=1e-6, tie_embeddings=False,
    kv_lora_rank=10, q_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, rope_pairing="interleaved",
    n_experts=6, experts_per_token=2, n_shared_experts=2, d_expert=12, n_dense_layers=1, router="sigmoid",
    router_bias=True, n_expert_groups=3, expert_groups_per_token=2, expert_scale=2.5,
)  # fmt: skip
YARN: dict[str, Any] = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_context": 10, "rope_theta": 500.0}
CONFIGS = {
    "as published": DEEPSEEK,
    "yarn": dataclasses.replace(DEEPSEEK, **YARN, q_lora_rank=None, rope_length=0.9, attention_scale=0.4),
    "halves": dataclasses.replace(DEEPSEEK, **YARN, rope_pairing="halves", normalize_expert_weights=False),
}
EVERY_CONFIG = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def random_tokens() -> Tensor:
    return torch.randint(53, (2, 40), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def assert_same_logits(ours: Transformer, theirs: Any) -> None:
    expected, actual = theirs(random_tokens()).logits, ours(random_tokens())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@EVERY_CONFIG
def test_a_saved_deepseek_reads_back_bit_for_bit(tmp_path: Path, config: ModelConfig) -> None:
    ours = disturbed(config)
    save_huggingface(ours, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "deepseek_v3"
    again = load_huggingface(tmp_path / "model")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in ours.state_dict().items())
    assert torch.equal(again(random_tokens()), ours.eval()(random_tokens()))


@pytest.mark.peers
@EVERY_CONFIG
def test_a_deepseek_of_ours_gives_the_same_logits_in_transformers(tmp_path: Path, config: ModelConfig) -> None:
    transformers = peer("transformers")
    ours = disturbed(config)
    save_huggingface(ours, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert_same_logits(ours.eval(), theirs.eval())


@pytest.mark.peers
@pytest.mark.parametrize(
    ("rope", "more"),
    [
        ({"rope_type": "default"}, {}),
        ({"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0}, {"q_lora_rank": None}),
        ({"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.3}, {"rope_interleave": False}),
        ({"rope_type": "yarn"}, {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ],
)
def test_a_deepseek_of_transformers_gives_the_same_logits_here(
    tmp_path: Path, rope: dict[str, Any], more: dict[str, Any]
) -> None:
    transformers = peer("transformers")
    if rope["rope_type"] == "yarn":
        rope = {**rope, "factor": 4.0, "original_max_position_embeddings": 16}
    sizes = {
        "vocab_size": 53, "max_position_embeddings": 64, "hidden_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 40, "moe_intermediate_size": 12,
        "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2,
        "first_k_dense_replace": 1, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "v_head_dim": 5,
        "qk_rope_head_dim": 4, "num_mtp_layers": 0, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    config = transformers.DeepseekV3Config(**{**sizes, **more}, rope_parameters={**rope, "rope_theta": 500.0})
    theirs = transformers.DeepseekV3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *(each for name, each in theirs.named_buffers() if "bias" in name)):
            tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
    theirs.save_pretrained(tmp_path)
    assert_same_logits(load_huggingface(tmp_path), theirs)


def test_the_presets_are_what_the_published_config_says(tmp_path: Path) -> None:
    settings = {
        "model_type": "deepseek_v3", "vocab_size": 129280, "max_position_embeddings": 163840, "hidden_size": 7168,
        "num_hidden_layers": 61, "num_attention_heads": 128, "intermediate_size": 18432, "rope_theta": 10000,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    ours = preset("deepseek-v3")
    read = dataclasses.replace(read_huggingface_config(tmp_path), n_kv_heads=None, embedding_scale=None)
    assert dataclasses.replace(read, attention_scale=None) == dataclasses.replace(ours, attention_scale=None)
    assert read.attention_scale == pytest.approx(ours.attention_scale, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, and norms of latents have 1e-06"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"num_key_value_heads": 2}, "n_kv_heads is 2 and kv_lora_rank is 10"),
    ],
)
def test_settings_that_a_config_cannot_say_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    save_huggingface(Transformer(DEEPSEEK), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(NapkinError, match=told):
        load_huggingface(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"router": "softmax", "router_bias": False}, "none of .* has router 'softmax'"),
        ({"norm_eps": 1e-5}, "none of .* has kv_lora_rank 10"),
        ({"n_experts": 0, "n_shared_experts": 0, "d_expert": None, "n_dense_layers": 0, "router_bias": False,
          "n_expert_groups": 1, "expert_groups_per_token": 1}, "none of .* has kv_lora_rank 10"),
    ],
)  # fmt: skip
def test_a_model_that_is_no_deepseek_is_not_saved(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(NapkinError, match=told):
        save_huggingface(Transformer(dataclasses.replace(DEEPSEEK, **changes)), tmp_path / "model")
