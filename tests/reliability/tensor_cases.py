"""Cases of ranks that divide matrices, heads and vocabulary, alone and with ranks of every other kind."""

from reliability.rank_cases import Case

EXPERTS: Case = {"n_experts": 4, "d_expert": 16}
# Ranks with other tokens would balance each its own.
UNBALANCED: Case = {**EXPERTS, "balance_weight": 0.0}
LATENTS: Case = {
    "n_kv_heads": None, "kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}  # fmt: skip
DOCUMENTS: Case = {"data": {"separate_documents": True}}
TENSOR_2: Case = {"parallelism": {"tensor": 2}}
TWO: dict[str, Case] = {
    # The vocabulary of 61 is uneven.
    "tensor 2": {**TENSOR_2, "training": {"micro_batch_size": 1, "loss_chunk_size": 7}, "steps": 4},
    "tensor 2 with all biases": {
        **TENSOR_2,
        "model": {"tie_embeddings": False, "biases": "all", "norm": "layer", "z_weight": 1e-3, "positions": "learned"},
        "training": {"recompute": "full"},
        "steps": 4,
    },
    "tensor 2 with experts": {
        **TENSOR_2,
        "model": {**EXPERTS, "n_dense_layers": 1, "n_shared_experts": 1, "qk_norm": "all_heads"},
        "optimizer": {"name": "muon"},
        "steps": 4,
    },
    "tensor 2 with latents": {**TENSOR_2, "model": LATENTS, "training": {"recompute": "full"}, "steps": 4},
}
FOUR: dict[str, Case] = {
    "data 2 tensor 2": {
        "parallelism": {"data": 2, "tensor": 2},
        "optimizer": {"name": "adafactor"},
        "training": {"micro_batch_size": 1},
        "steps": 4,
    },
    "shard 2 tensor 2": {
        "parallelism": {"shard": 2, "tensor": 2},
        "optimizer": {"name": "muon", "average_decay": 0.9},
        "training": {"recompute": "selective"},
        "steps": 4,
    },
    "context 2 tensor 2": {
        "parallelism": {"context": 2, "tensor": 2},
        "model": {"positions": "learned"},
        "steps": 4,
    },
    "pipeline 2 tensor 2": {
        "parallelism": {"pipeline": 2, "tensor": 2},
        "training": {"batch_size": 8, "micro_batch_size": 2},
        "steps": 4,
    },
}
LONG_TWO: dict[str, Case] = {
    "tensor 2": TENSOR_2,
    "tensor 2 selective": {**TENSOR_2, "training": {"micro_batch_size": 2, "recompute": "selective"}},
    "tensor 2 alibi": {**TENSOR_2, "model": {"positions": "alibi", "feed_forward": "gelu", "biases": "qkv"}},
    "tensor 2 alibi window": {
        **TENSOR_2,
        "model": {"positions": "alibi", "attention_window": 4, "full_attention_every": 2, "logit_softcap": 2.0},
    },
    "tensor 2 parallel block": {**TENSOR_2, "model": {"qk_norm": "head", "block": "parallel"}},
    "tensor 2 post-norm window": {
        **TENSOR_2,
        "model": {"block": "post", "positions": "sinusoidal", "attention_window": 4},
    },
    "tensor 2 sandwich softcap": {**TENSOR_2, "model": {"block": "sandwich", "attention_softcap": 5.0}},
    "tensor 2 mup": {**TENSOR_2, "model": {"block": "reordered", "mup_base_d_model": 12}},
    "tensor 2 norms of all heads": {
        **TENSOR_2,
        "model": {"qk_norm": "all_heads", "norm": "layer", "biases": "all", "tie_embeddings": False},
    },
    "tensor 2 experts": {**TENSOR_2, "model": EXPERTS, "training": {"micro_batch_size": 1}},
    "tensor 2 muon": {**TENSOR_2, "optimizer": {"name": "muon"}, "training": {"recompute": "full"}},
    "tensor 2 adafactor": {**TENSOR_2, "optimizer": {"name": "adafactor"}},
    "tensor 2 latents": {**TENSOR_2, "model": {**LATENTS, "q_lora_rank": None}},
    "tensor 2 documents": {**TENSOR_2, **DOCUMENTS, "model": {"positions": "learned"}},
    "tensor 2 averaged": {**TENSOR_2, "optimizer": {"average_decay": 0.9}},
}
LONG_FOUR: dict[str, Case] = {
    "tensor 4": {"parallelism": {"tensor": 4}, "model": {"n_kv_heads": 4}},
    "tensor 4 untied muon": {
        "parallelism": {"tensor": 4},
        "model": {"n_kv_heads": 4, "tie_embeddings": False, "biases": "all"},
        "optimizer": {"name": "muon"},
    },
    "data 2 tensor 2": {"parallelism": {"data": 2, "tensor": 2}, "training": {"micro_batch_size": 1}},
    "data 2 tensor 2 experts": {
        "parallelism": {"data": 2, "tensor": 2},
        "model": UNBALANCED,
        "training": {"recompute": "full"},
    },
    "shard 2 tensor 2": {"parallelism": {"shard": 2, "tensor": 2}, "training": {"micro_batch_size": 1}},
    "shard 2 tensor 2 untied": {
        "parallelism": {"shard": 2, "tensor": 2},
        "model": {"tie_embeddings": False, "biases": "all", "z_weight": 1e-3},
        "optimizer": {"name": "adafactor", "average_decay": 0.9},
    },
    "shard 2 tensor 2 experts": {
        "parallelism": {"shard": 2, "tensor": 2},
        "model": UNBALANCED,
        "optimizer": {"name": "muon"},
    },
    "data 2 tensor 2 with divided state": {
        "parallelism": {"data": 2, "tensor": 2, "shard_optimizer": True},
        "optimizer": {"name": "muon", "average_decay": 0.9},
    },
    "context 2 tensor 2": {"parallelism": {"context": 2, "tensor": 2}, **DOCUMENTS},
    "context 2 tensor 2 latents": {"parallelism": {"context": 2, "tensor": 2}, "model": LATENTS},
    "context 2 tensor 2 alibi": {"parallelism": {"context": 2, "tensor": 2}, "model": {"positions": "alibi"}},
    **{
        f"pipeline 2 tensor 2 {schedule}": {
            "parallelism": {"pipeline": 2, "tensor": 2, "schedule": schedule},
            "model": {"n_layers": 4, "tie_embeddings": schedule != "zb-h1"},
            "training": {"batch_size": 8, "micro_batch_size": 2},
        }
        for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
    },
}
LONG_EIGHT: dict[str, Case] = {
    "data 2 shard 2 tensor 2": {"parallelism": {"data": 2, "shard": 2, "tensor": 2}},
    "data 2 context 2 tensor 2": {"parallelism": {"data": 2, "context": 2, "tensor": 2}},
    "pipeline 2 data 2 tensor 2": {
        "parallelism": {"pipeline": 2, "data": 2, "tensor": 2},
        "training": {"batch_size": 8, "micro_batch_size": 2},
    },
    "pipeline 2 shard 2 tensor 2": {
        "parallelism": {"pipeline": 2, "shard": 2, "tensor": 2},
        "training": {"batch_size": 8, "micro_batch_size": 2},
        "optimizer": {"name": "muon"},
    },
}
