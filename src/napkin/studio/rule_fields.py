"""The numbers of a recipe that `step_rule` takes, by its names: a page computes with them while controls move."""

from typing import Any

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.optim.registry import optimizer_entry
from napkin.recipe.training_config import OptimizerName


def model_fields(model: ModelConfig) -> dict[str, Any]:
    """The sizes of a model. Raises NapkinError for one whose layers carry a state, for which there is no rule here."""
    if model.has_states:
        raise NapkinError("a model with states has no rule of a step: plan it by count, with `napkin plan`")
    fields = {
        "vocab_size": model.vocab_size,
        "context_length": model.context_length,
        "d_model": model.d_model,
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "n_kv_heads": model.resolved_n_kv_heads,
        "head_dim": model.resolved_head_dim,
        "v_head_dim": model.resolved_v_head_dim,
        "d_ff": model.resolved_d_ff,
        "tied": model.tie_embeddings,
        "gated": model.gated,
        "learned_positions": model.positions == "learned",
    }
    if model.kv_sharing > 1:
        fields["n_sharing_layers"] = model.n_attention_layers - model.n_kv_layers
    if model.n_experts:
        fields |= {
            "n_experts": model.n_experts,
            "experts_per_token": model.experts_per_token,
            "n_shared_experts": model.n_shared_experts,
            "d_expert": model.resolved_d_expert,
            "n_dense_layers": model.n_dense_layers,
        }
    if model.kv_lora_rank is not None:
        fields |= {
            "kv_lora_rank": model.kv_lora_rank,
            "q_lora_rank": model.q_lora_rank,
            "qk_nope_head_dim": model.resolved_qk_nope_head_dim,
            "qk_rope_head_dim": model.resolved_qk_rope_head_dim,
        }
    return fields


FORMAT_BYTES = {
    "fp32": {"weight_bytes": 4, "gradient_bytes": 4, "product_bytes": 4},
    "bf16": {"weight_bytes": 4, "gradient_bytes": 4, "product_bytes": 2},
    "fp16": {"weight_bytes": 4, "gradient_bytes": 4, "product_bytes": 2},
    "fp8": {"weight_bytes": 4, "gradient_bytes": 4, "product_bytes": 2},
    "bf16-pure": {"weight_bytes": 2, "gradient_bytes": 2, "product_bytes": 2},
}
"""Bytes of a weight, of its gradient and of what products read and write, by the name of a precision."""


def optimizer_bytes(name: OptimizerName) -> int:
    """Bytes of an optimizer's state per parameter."""
    return optimizer_entry(name).state_bytes
