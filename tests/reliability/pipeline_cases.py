"""Cases of `rank_cases` for pipelines."""

from typing import Any

from reliability.rank_cases import Case


def pipeline(schedule: str, ranks: int = 2, *, blocks: int = 3, **tables: Any) -> Case:
    """A case of a pipeline with 4 micro-batches of one row."""
    parallelism = {"pipeline": ranks, "schedule": schedule, **tables.pop("parallelism", {})}
    rows = 4 * parallelism.get("data", 1) * parallelism.get("shard", 1)
    return {
        "parallelism": parallelism,
        "model": {"n_layers": blocks, **tables.pop("model", {})},
        "training": {"batch_size": rows, "micro_batch_size": 1, **tables.pop("training", {})},
        **tables,
    }


UNTIED = {"tie_embeddings": False}
DOCUMENTS = {"separate_documents": True}
BIASED = {"biases": "all", "norm": "layer", "positions": "learned", "z_weight": 1e-3}
EXPERTS = {"n_experts": 4, "d_expert": 16, "balance_weight": 0.1, "router_z_weight": 0.01}
TWICE = {"stages_per_rank": 2}
LONG_TWO: dict[str, Case] = {
    "gpipe": pipeline("gpipe"),
    "1f1b": pipeline("1f1b"),
    "interleaved-1f1b": pipeline("interleaved-1f1b", blocks=4),
    "zb-h1": pipeline("zb-h1"),
    "zb-v": pipeline("zb-v", blocks=4),
    "1f1b untied uneven": pipeline("1f1b", blocks=5, model=UNTIED, parallelism={"blocks_per_stage": (4, 1)}),
    "1f1b ends without blocks": pipeline(
        "interleaved-1f1b", blocks=2, model=BIASED, parallelism={**TWICE, "blocks_per_stage": (0, 1, 1, 0)}
    ),
    "zb-h1 embedding alone": pipeline("zb-h1", blocks=4, parallelism={"blocks_per_stage": (0, 4)}),
    "1f1b head alone": pipeline("1f1b", model={**UNTIED, **EXPERTS}, parallelism={"blocks_per_stage": (3, 0)}),
    "zb-h1 untied with documents": pipeline(
        "zb-h1", blocks=4, parallelism=TWICE, data=DOCUMENTS, model={**UNTIED, **BIASED}
    ),
    "1f1b with documents": pipeline("1f1b", data=DOCUMENTS, training={"micro_batch_size": 2, "batch_size": 8}),
    "muon averaged": pipeline("1f1b", optimizer={"name": "muon", "average_decay": 0.9}),
    "adafactor": pipeline("zb-v", blocks=5, optimizer={"name": "adafactor"}, model={**UNTIED, "block": "post"}),
    "recomputed": pipeline("interleaved-1f1b", blocks=4, training={"recompute": "full", "recompute_every": 2}),
    "selective": pipeline("gpipe", training={"recompute": "selective"}, model={"block": "parallel"}),
    "experts": pipeline("1f1b", model=EXPERTS),
    "some experts": pipeline(
        "interleaved-1f1b", model={**EXPERTS, "n_dense_layers": 2, "n_shared_experts": 1}, blocks=5
    ),
    "experts zb-v": pipeline("zb-v", model={**EXPERTS, "expert_capacity": 1.0}, blocks=4),
    "alibi": pipeline("zb-v", blocks=4, model={"positions": "alibi", "attention_window": 4, "block": "sandwich"}),
    "softcap": pipeline("zb-h1", model={"attention_softcap": 5.0, "qk_norm": "head", "feed_forward": "gelu"}),
}
LONG_FOUR: dict[str, Case] = {
    "gpipe 4": pipeline("gpipe", 4, blocks=4),
    "1f1b 4": pipeline("1f1b", 4, blocks=7),
    "interleaved-1f1b 4": pipeline("interleaved-1f1b", 4, blocks=8),
    "zb-h1 4": pipeline("zb-h1", 4, blocks=5),
    "zb-v 4": pipeline("zb-v", 4, blocks=8),
    "1f1b data 2": pipeline("1f1b", parallelism={"data": 2}),
    "interleaved-1f1b data 2": pipeline("interleaved-1f1b", blocks=4, parallelism={"data": 2}),
    "zb-h1 data 2": pipeline("zb-h1", parallelism={"data": 2}),
    "zb-v data 2": pipeline("zb-v", blocks=4, parallelism={"data": 2}),
    "gpipe shard 2": pipeline("gpipe", parallelism={"shard": 2}),
    "1f1b shard 2 muon": pipeline(
        "1f1b",
        parallelism={"shard": 2},
        optimizer={"name": "muon", "average_decay": 0.9},
        training={"recompute": "full"},
    ),
    "interleaved-1f1b shard 2": pipeline("interleaved-1f1b", blocks=4, parallelism={"shard": 2}),
    "zb-h1 shard 2": pipeline("zb-h1", parallelism={"shard": 2}),
    "zb-v shard 2": pipeline("zb-v", blocks=4, parallelism={"shard": 2}, model=UNTIED),
    "1f1b tensor 2": pipeline("1f1b", parallelism={"tensor": 2}),
    "interleaved-1f1b tensor 2": pipeline("interleaved-1f1b", blocks=4, parallelism={"tensor": 2}, model=UNTIED),
    "zb-h1 tensor 2": pipeline("zb-h1", parallelism={"tensor": 2}, model=BIASED),
    "zb-v tensor 2": pipeline("zb-v", blocks=4, parallelism={"tensor": 2}),
    "1f1b context 2": pipeline("1f1b", parallelism={"context": 2}),
    "zb-v context 2": pipeline("zb-v", blocks=4, parallelism={"context": 2}, data=DOCUMENTS, model=BIASED),
    "1f1b shard 2 embedding alone": pipeline("1f1b", parallelism={"shard": 2, "blocks_per_stage": (0, 3)}),
    "1f1b tensor 2 head alone": pipeline("1f1b", parallelism={"tensor": 2, "blocks_per_stage": (3, 0)}),
    "experts data 2": pipeline(
        "1f1b", parallelism={"data": 2}, model={**EXPERTS, "balance_weight": 0.0}, data=DOCUMENTS
    ),
}
_QUICK_TWO = ("gpipe", "zb-h1 untied with documents", "zb-v", "1f1b untied uneven", "some experts")
_QUICK_FOUR = ("zb-v data 2", "interleaved-1f1b shard 2")
TWO: dict[str, Case] = {name: {**LONG_TWO[name], "steps": 4} for name in _QUICK_TWO}
FOUR: dict[str, Case] = {name: {**LONG_FOUR[name], "steps": 4} for name in _QUICK_FOUR}
