"""Cases of `rank_cases` for ranks that divide sequences, or experts."""

from reliability.rank_cases import Case

CONTEXT_2 = {"parallelism": {"context": 2}}
DOCUMENTS = {"data": {"separate_documents": True}}
EXPERTS = {"n_experts": 4, "d_expert": 16, "balance_weight": 0.0}
TWO: dict[str, Case] = {
    "context 2": {**CONTEXT_2, "training": {"micro_batch_size": 2, "recompute": "selective"}, "steps": 4},
    "context 2 with documents": {
        **CONTEXT_2,
        **DOCUMENTS,
        "model": {"positions": "learned"},
        "training": {"micro_batch_size": 1},
        "steps": 4,
    },
    "expert 2": {"parallelism": {"data": 2, "expert": 2}, "model": EXPERTS, "optimizer": {"name": "muon"}, "steps": 4},
    "expert 2 sharded": {
        "parallelism": {"shard": 2, "expert": 2},
        "model": {**EXPERTS, "n_shared_experts": 1, "n_dense_layers": 1},
        "training": {"micro_batch_size": 1, "recompute": "selective"},
        "steps": 4,
    },
}
FOUR: dict[str, Case] = {
    "context 2 shard 2": {"parallelism": {"context": 2, "shard": 2}, "steps": 4},
    "expert 2 in 2 replicas": {"parallelism": {"data": 4, "expert": 2}, "model": EXPERTS, "steps": 4},
    "expert 2 shard 4": {"parallelism": {"shard": 4, "expert": 2}, "model": EXPERTS, "steps": 4},
    "experts in a stage": {
        "parallelism": {"pipeline": 2, "data": 2, "expert": 2},
        "model": {**EXPERTS, "n_dense_layers": 2},
        "training": {"micro_batch_size": 1},
        "steps": 4,
    },
}
LONG_TWO: dict[str, Case] = {
    "context 2": CONTEXT_2,
    "context 2 accumulated": {**CONTEXT_2, "training": {"micro_batch_size": 1}},
    "context 2 one kv head": {**CONTEXT_2, "model": {"n_kv_heads": 1, "qk_norm": "all_heads"}},
    "context 2 learned": {**CONTEXT_2, "model": {"positions": "learned"}},
    "context 2 sinusoidal": {**CONTEXT_2, "model": {"positions": "sinusoidal", "rope_pairing": "interleaved"}},
    "context 2 window": {
        **CONTEXT_2,
        "model": {"positions": "alibi", "attention_window": 5, "full_attention_every": 2},
    },
    "context 2 softcap": {**CONTEXT_2, "model": {"attention_softcap": 2.0}},
    "context 2 documents": {**CONTEXT_2, **DOCUMENTS, "training": {"recompute": "full"}},
    "context 2 experts": {**CONTEXT_2, "model": EXPERTS},
    "expert 2": {"parallelism": {"data": 2, "expert": 2}, "model": EXPERTS, "training": {"recompute": "full"}},
    "expert 2 adafactor": {
        "parallelism": {"data": 2, "expert": 2},
        "model": EXPERTS,
        "optimizer": {"name": "adafactor", "average_decay": 0.9},
        "training": {"micro_batch_size": 1},
    },
}
LONG_FOUR: dict[str, Case] = {
    "context 4": {"parallelism": {"context": 4}},
    "context 4 documents": {"parallelism": {"context": 4}, **DOCUMENTS},
    "context 2 data 2": {
        "parallelism": {"context": 2, "data": 2},
        "training": {"micro_batch_size": 1, "recompute": "full"},
    },
    "context 2 shard 2": {
        "parallelism": {"context": 2, "shard": 2},
        "optimizer": {"name": "muon", "average_decay": 0.9},
    },
    "expert 4": {"parallelism": {"data": 4, "expert": 4}, "model": EXPERTS},
    "expert 2 in 2 replicas": {"parallelism": {"data": 4, "expert": 2}, "model": EXPERTS},
    "expert 2 context 2": {
        "parallelism": {"data": 2, "context": 2, "expert": 2},
        "model": EXPERTS,
        "training": {"micro_batch_size": 1, "recompute": "full"},
    },
    "expert 2 shard 4": {"parallelism": {"shard": 4, "expert": 2}, "model": EXPERTS},
    "expert 4 data 2 shard 2": {"parallelism": {"data": 2, "shard": 2, "expert": 4}, "model": EXPERTS},
}
