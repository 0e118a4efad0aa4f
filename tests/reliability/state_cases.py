"""Cases of `rank_cases` for optimizer state that ranks divide, and for checkpoints that another layout reads."""

from typing import Any

from reliability.rank_cases import Case


def zero(data: int, **tables: Any) -> Case:
    """Ranks with the whole model that each keep the optimizer state of a part of it."""
    return {**tables, "parallelism": {"data": data, "shard_optimizer": True, **tables.get("parallelism", {})}}


def resumed(parallelism: dict[str, Any], later: dict[str, Any], **tables: Any) -> Case:
    """A case that another layout resumes halfway."""
    return {"steps": 4, **tables, "parallelism": parallelism, "resumed": {"parallelism": later}}


PIPELINE = {"model": {"n_layers": 4}, "training": {"batch_size": 8, "micro_batch_size": 1}}
TWO: dict[str, Case] = {
    "zero 2 muon averaged": zero(
        2, optimizer={"name": "muon", "average_decay": 0.9}, training={"micro_batch_size": 1}, steps=4
    ),
    "zero 2 as shard 2": resumed({"data": 2, "shard_optimizer": True}, {"shard": 2}, optimizer={"name": "adafactor"}),
    "tensor 2 as pipeline 2": resumed({"tensor": 2}, {"pipeline": 2}, **PIPELINE),
}
FOUR: dict[str, Case] = {
    "data 2 shard 2": {"parallelism": {"data": 2, "shard": 2}, "steps": 4},
    "tensor 4 as shard 4": resumed({"tensor": 4}, {"shard": 4}, model={"n_kv_heads": 4}),
    "pipeline 2 data 2 as tensor 4": resumed(
        {"pipeline": 2, "data": 2}, {"tensor": 4}, model={"n_kv_heads": 4}, training=PIPELINE["training"]
    ),
}
LONG_TWO: dict[str, Case] = {
    "zero 2": zero(2),
    "zero 2 adafactor": zero(2, optimizer={"name": "adafactor", "average_decay": 0.9}),
    "zero 2 sgd": zero(2, optimizer={"name": "sgd"}),
    "zero 2 and experts": zero(2, model={"n_experts": 4, "d_expert": 16, "balance_weight": 0.0}),
    "shard 2 as zero 2": resumed({"shard": 2}, {"data": 2, "shard_optimizer": True}, optimizer={"name": "muon"}),
    "pipeline 2 as tensor 2": resumed({"pipeline": 2}, {"tensor": 2}, **PIPELINE),
}
LONG_FOUR: dict[str, Case] = {
    "zero 4": zero(4, optimizer={"name": "muon"}, training={"batch_size": 8, "micro_batch_size": 1}),
    "zero 2 tensor 2": zero(2, optimizer={"name": "muon"}, parallelism={"tensor": 2}),
    "tensor 2 pipeline 2 as data 2 tensor 2": resumed(
        {"tensor": 2, "pipeline": 2}, {"data": 2, "tensor": 2}, **PIPELINE, optimizer={"name": "adafactor"}
    ),
    "zero 2 pipeline 2": zero(2, **PIPELINE, parallelism={"pipeline": 2}),
    "data 2 shard 2 accumulated": {
        "parallelism": {"data": 2, "shard": 2},
        "training": {"batch_size": 8, "micro_batch_size": 1},
    },
    "data 2 shard 2 adafactor averaged": {
        "parallelism": {"data": 2, "shard": 2},
        "optimizer": {"name": "adafactor", "average_decay": 0.9},
    },
    "data 2 shard 2 muon": {"parallelism": {"data": 2, "shard": 2}, "optimizer": {"name": "muon"}},
    "pipeline 4 as data 2 shard 2": resumed({"pipeline": 4}, {"data": 2, "shard": 2}, **PIPELINE),
    "shard 4 as pipeline 2 shard 2": resumed({"shard": 4}, {"pipeline": 2, "shard": 2}, **PIPELINE),
}
