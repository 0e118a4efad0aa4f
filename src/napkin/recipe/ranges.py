"""The smallest and the largest value of each number in a recipe: values outside are typing errors, or overflow the
sizes of tensors."""

from typing import Any

from napkin.errors import NapkinError

_MOST = 10**12
MOST_TOKENS_PER_STEP = 2**34
_LARGEST_SEED = 2**63 - 1

MODEL_RANGES: dict[str, tuple[float, float]] = {
    "vocab_size": (0, 2**24),
    "context_length": (1, 2**30),
    "d_model": (1, 2**20),
    "n_layers": (1, 4096),
    "n_heads": (1, 2**20),
    "n_kv_heads": (1, 2**20),
    "d_ff": (1, 2**22),
    "head_dim": (1, 2**20),
    "rope_theta": (1, 10**12),
    "norm_eps": (1e-30, 1),
    "embedding_scale": (1e-6, 10**6),
    "rope_factor": (1, 10**6),
    "rope_original_context": (1, 2**30),
    "attention_window": (1, 2**30),
    "attention_softcap": (1e-3, 10**6),
    "full_attention_every": (2, 4096),
    "logit_softcap": (1e-3, 10**6),
    "attention_scale": (1e-6, 10**6),
    "dropout": (0, 0.99),
    "n_experts": (0, 2**16),
    "experts_per_token": (1, 2**16),
    "n_shared_experts": (0, 2**10),
    "d_expert": (1, 2**22),
    "n_dense_layers": (0, 4096),
    "expert_capacity": (1e-3, 10**6),
    "balance_weight": (0, 1000),
    "router_z_weight": (0, 1000),
    "z_weight": (0, 1000),
    "init_std": (1e-6, 1000),
    "mup_base_d_model": (1, 2**20),
}
OPTIMIZER_RANGES: dict[str, tuple[float, float]] = {
    "learning_rate": (0, 10),
    "warmup_steps": (0, _MOST),
    "decay_steps": (0, _MOST),
    "final_fraction": (0, 1),
    "momentum": (0, 0.999999),
    "beta1": (0, 0.999999),
    "beta2": (0, 0.999999),
    "eps": (1e-30, 1),
    "weight_decay": (0, 100),
    "clip_norm": (1e-12, 10**12),
    "average_decay": (0, 0.999999),
}
TRAINING_RANGES: dict[str, tuple[float, float]] = {
    "steps": (1, _MOST),
    "batch_size": (1, MOST_TOKENS_PER_STEP),
    "resolved_micro_batch_size": (1, MOST_TOKENS_PER_STEP),
    "recompute_every": (1, 4096),
    "loss_chunk_size": (1, MOST_TOKENS_PER_STEP),
    "threads": (1, 1024),
    "init_seed": (0, _LARGEST_SEED),
    "data_seed": (0, _LARGEST_SEED),
    "dropout_seed": (0, _LARGEST_SEED),
    "rounding_seed": (0, _LARGEST_SEED),
    "log_every": (1, _MOST),
    "checkpoint_every": (1, _MOST),
    "keep_checkpoints": (1, _MOST),
    "evaluate_every": (1, _MOST),
    "evaluation_tokens": (1, _MOST),
    "rank_timeout": (1, 10**6),
    "most_skipped": (0, _MOST),
}
_MOST_RANKS = 2**20
PARALLELISM_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("data", "shard", "tensor", "pipeline", "context", "expert"), (1, _MOST_RANKS)),
    "stages_per_rank": (1, 1024),
}


def refuse_outside(table: str, values: Any, ranges: dict[str, tuple[float, float]]) -> None:
    """Raise NapkinError for a field of `values`, the recipe's `table`, that is outside its range; None is allowed."""
    for name, (least, most) in ranges.items():
        value = getattr(values, name)
        # A negated comparison catches NaN too.
        if value is not None and not least <= value <= most:
            name = name.removeprefix("resolved_")
            raise NapkinError(f"{table}.{name} is {value}: use {least} to {most}")
