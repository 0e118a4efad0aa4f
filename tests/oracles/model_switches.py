"""Every switch of the model, each on a model of two layers: what the tests of all of them run over."""

import dataclasses
from typing import Any, get_args

import torch
from torch import Tensor

from napkin.model import config as names
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer

BASE = ModelConfig(vocab_size=61, context_length=16, d_model=24, n_layers=2, n_heads=4, d_ff=32)

LATENT: dict[str, Any] = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}

SWITCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "untied": {"tie_embeddings": False},
    "embedding_scale": {"embedding_scale": 3.0},
    "grouped": {"n_kv_heads": 2},
    "multi_query": {"n_kv_heads": 1},
    "head_dim": {"head_dim": 10},
    **{f"positions_{kind}": {"positions": kind} for kind in get_args(names.Positions)},
    "alibi_six_heads": {"positions": "alibi", "n_heads": 6},
    "interleaved": {"rope_pairing": "interleaved"},
    **{
        f"rope_{kind}": {"rope_scaling": kind, "rope_factor": 4.0, "rope_original_context": 7, "rope_theta": 100.0}
        for kind in get_args(names.RopeScaling)
        if kind != "none"
    },
    **{f"attention_{form}": {"attention": form, "n_kv_heads": 2} for form in get_args(names.AttentionImplementation)},
    "attention_latent": {**LATENT},
    "attention_latent_queries": {**LATENT, "q_lora_rank": 14, "rope_pairing": "interleaved", "attention": "plain"},
    "kv_sharing": {"kv_sharing": 2, "n_kv_heads": 2},
    "kv_sharing_plain": {"kv_sharing": 2, "n_layers": 5, "attention": "plain", "attention_window": 3, "biases": "qkv"},
    **{f"kv_sharing_{kind}": {"kv_sharing": 3, "qk_norm": kind, "n_layers": 4} for kind in ("head", "all_heads")},
    "window": {"attention_window": 3},
    "window_plain": {"attention_window": 3, "attention": "plain"},
    "window_every_other": {"attention_window": 3, "full_attention_every": 2},
    "window_every_other_alibi": {"attention_window": 3, "full_attention_every": 2, "positions": "alibi"},
    "softcap": {"attention_softcap": 2.0, "attention": "plain"},
    "logit_softcap": {"logit_softcap": 0.7, "z_weight": 0.01},
    "alibi_plain": {"positions": "alibi", "attention": "plain", "n_kv_heads": 2},
    "attention_scale": {"attention_scale": 0.7},
    **{f"qk_norm_{kind}": {"qk_norm": kind, "n_kv_heads": 2} for kind in get_args(names.QKNorm)},
    **{f"feed_forward_{kind}": {"feed_forward": kind} for kind in get_args(names.FeedForwardKind) if kind != "none"},
    **{f"norm_{kind}": {"norm": kind} for kind in get_args(names.NormKind)},
    **{f"block_{kind}": {"block": kind} for kind in get_args(names.BlockKind)},
    **{f"biases_{kind}": {"biases": kind, "norm": "layer"} for kind in get_args(names.Biases)},
    "dropout": {"dropout": 0.1},
    "experts": {"n_experts": 4},
    "experts_gelu": {"n_experts": 4, "feed_forward": "gelu", "experts_per_token": 1},
    "experts_shared": {"n_experts": 4, "n_shared_experts": 2, "d_expert": 12, "n_dense_layers": 1},
    "experts_weights_as_they_are": {"n_experts": 4, "normalize_expert_weights": False},
    "experts_sigmoid": {
        "n_experts": 6,
        "router": "sigmoid",
        "n_expert_groups": 3,
        "expert_groups_per_token": 2,
        "expert_scale": 2.5,
        "n_shared_experts": 1,
        "d_expert": 12,
        "router_bias": True,
    },
    "experts_groups": {"n_experts": 6, "n_expert_groups": 3, "expert_groups_per_token": 2},
    "rope_length": {"rope_length": 1.3},
    "experts_capacity": {"n_experts": 4, "expert_capacity": 1.0},
    "z_weight": {"z_weight": 0.01},
    **{f"init_{kind}": {"init": kind} for kind in get_args(names.InitialStd)},
    "not_depth_scaled": {"depth_scaled": False},
    "mup": {"mup_base_d_model": 8},
    "mup_untied_biases": {"mup_base_d_model": 8, "tie_embeddings": False, "biases": "all", "norm": "layer"},
}


def config_of(switch: str, **changes: Any) -> ModelConfig:
    return dataclasses.replace(BASE, **{**SWITCHES[switch], **changes})


def random_tokens(config: ModelConfig, batch_size: int = 2, length: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(config.vocab_size, (batch_size, length), generator=torch.Generator().manual_seed(seed))


def disturbed(config: ModelConfig) -> Transformer:
    """A model whose gains are not 1 and biases not 0, large enough for a wrong factor anywhere to show."""
    model = Transformer(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model
