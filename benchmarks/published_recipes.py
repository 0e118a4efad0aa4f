"""Recipes, layouts and prices of published runs: rows of published_layouts.csv and published_gpu_hours.csv.

What differs between programs, beside the recipe, is the stack's (`napkin plan --stack`) or stated by the rows: "fused"
rows ran compiled blocks or hand-written kernels, "overlap" rows hide collectives of tensor ranks behind products,
"exchange" is how experts' tokens are sent.
"""

import csv
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from napkin.hardware.ceilings import Efficiency
from napkin.hardware.cluster import node_of
from napkin.hardware.device_file import find_device
from napkin.hardware.target import CudaTarget
from napkin.model.config import ModelConfig, preset, presets
from napkin.planning.layouts.costs import LayoutCosts, choice_of
from napkin.planning.layouts.layout_plan import LayoutPlan, plan_layout
from napkin.planning.layouts.rank_bytes import ranks_bytes
from napkin.planning.layouts.stack import Stack, find_stack
from napkin.planning.layouts.stack_plan import resolve_for_stack
from napkin.planning.layouts.stages import stage_contents
from napkin.planning.step.machine import CatalogueMachine
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import ParallelismConfig, TrainingConfig

FOLDER = Path(__file__).parent
LARGEST_CHUNK = 16384
"""Tokens whose logits exist at a time: these programs compute those of a whole micro-batch."""
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_embeddings": False},
    "gpt": {"positions": "learned", "norm": "layer", "feed_forward": "gelu", "biases": "all"},
    "gpt-untied": {"norm": "layer", "feed_forward": "gelu", "biases": "all", "tie_embeddings": False},
    "nanochat": {"feed_forward": "relu_squared", "qk_norm": "head", "tie_embeddings": False},
    "relu2": {"norm": "layer", "feed_forward": "relu_squared", "tie_embeddings": False},
}
EXPERTS = ("n_experts", "experts_per_token", "n_shared_experts", "d_expert")
SIZES = ("vocab_size", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "n_layers")
STACKS = {
    "Megatron-LM": "megatron",
    "NeMo": "nemo",
    "Megatron-Bridge": "nemo",
    "torchao": "torchtitan",
    "torchtune": "torchtitan",
    "Automodel": "automodel",
}
"""The stack of `napkin plan --stack` that a row's program is planned as, where its name is another one."""


def read_rows(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file of this folder."""
    with (FOLDER / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@functools.cache
def _shapes() -> dict[str, dict[str, str]]:
    return {row["name"]: row for row in read_rows("published_shapes.csv")}


def foundry_row(row: dict[str, str]) -> dict[str, str]:
    """A row of published_runs.csv with the columns of published_layouts.csv."""
    one = dict.fromkeys(("data", "tensor", "pipeline", "stages_per_rank", "context", "expert"), "1")
    more = {"stack": "llm-foundry", "shard": row["devices"], "attention": "auto", "fused": "no", "overlap": "no"}
    rate = {"unit": "tok/s/device", "value": row["tokens_per_second_per_device"]}
    return {**row, **one, **more, **rate}


FOUNDRY_VOCAB_SIZE = 50368


def foundry_model(row: Mapping[str, str]) -> ModelConfig:
    """An MPT model: learned positions, layer norms, biases, GELU, tied embeddings."""
    names = ("d_model", "n_heads", "n_layers", "context_length")
    sizes = {name: int(row[name]) for name in names}
    return ModelConfig(vocab_size=FOUNDRY_VOCAB_SIZE, d_ff=4 * sizes["d_model"], **sizes, **KINDS["gpt"])


def model_of(name: str, context_length: int, n_layers: int | None = None) -> ModelConfig:
    """A published model, cut to some of its layers; with fewer, only one of them has no experts."""
    if name in presets():
        model = preset(name)
        changes: dict[str, Any] = {"rope_scaling": "none", "rope_factor": 1.0, "rope_original_context": None}
        # Kernels of other programs take the window of some blocks as an argument, where napkin's own take a mask.
        changes |= {"attention_window": None, "full_attention_every": None}
        if n_layers and model.n_dense_layers:
            changes["n_dense_layers"] = 1
    else:
        shape = _shapes()[name]
        changes = {}
        own: dict[str, Any] = {size: int(shape[size]) for size in SIZES} | KINDS[shape["kind"]]
        if int(shape["n_experts"]):
            own |= {size: int(shape[size]) for size in EXPERTS}
            own["n_dense_layers"] = 1 if n_layers else int(shape["n_dense_layers"])
        model = ModelConfig(**own)
    return dataclasses.replace(model, context_length=context_length, n_layers=n_layers or model.n_layers, **changes)


class PublishedRun:
    """A row: its recipe and layout, counted once, and priced with any efficiency."""

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row
        self.device = find_device(row["device"])
        self.n_devices = self._number("devices")
        self.stack = row.get("stack", "")
        self.program = self._program()
        machine = self.machine(None)
        self.resolved = self._resolved(machine)
        self.choice = choice_of(self.resolved)
        self.costs = LayoutCosts(self.resolved, machine, (self.choice.layout.tensor,), stack=self.program)

    def _program(self) -> Stack:
        """The stack that the row ran, with what the row says differs."""
        row = self.row
        stack = find_stack(STACKS.get(self.stack, self.stack or "napkin"))
        exchange = dataclasses.replace(
            stack.exchange,
            sends=row.get("exchange") or stack.exchange.sends,  # pyright: ignore[reportArgumentType]
            behind_other_micro_batch=row.get("exchange_hidden") == "yes" or stack.exchange.behind_other_micro_batch,
        )
        overlaps, memory = row.get("overlap") == "yes", stack.memory
        if memory is not None and row.get("offloaded"):
            memory = dataclasses.replace(memory, offloaded_blocks=self._number("offloaded"))
        return dataclasses.replace(
            stack, fuses=row["fused"] == "yes", overlaps_tensor=overlaps, exchange=exchange, memory=memory
        )

    def _number(self, name: str) -> int:
        return int(self.row[name] or 0)

    @property
    def seconds(self) -> float:
        """Of a step, as published."""
        value = float(self.row["value"])
        tokens = self.resolved.recipe.tokens_per_step
        return value if self.row["unit"] == "s" else tokens / self.n_devices / value

    def machine(self, efficiency: Efficiency | None) -> CatalogueMachine:
        """Its devices; None is the efficiency of the table."""
        node = node_of(self.device)
        per_device = self.row.get("network_bandwidth")
        if per_device:
            node = dataclasses.replace(node, network_bandwidth=float(per_device))
        machine = CatalogueMachine(self.device, self.n_devices, node=node, efficiency=efficiency)
        if self.program.cudnn_attention is False and self.device.compute_capability:
            machine.target = CudaTarget(self.device.compute_capability, cudnn_attention=False)
        return machine

    def plan(self, efficiency: Efficiency | None = None) -> LayoutPlan:
        """Its step, planned without an MFU told."""
        machine = self.machine(efficiency)
        costs = self.costs.priced_on(machine, self.program)
        return plan_layout(self.resolved, machine, self.choice, costs=costs)

    @property
    def peak_bytes(self) -> float:
        """Of the rank that needs most, of a stack that says what it keeps: nothing is counted."""
        layout = self.choice.layout
        contents = stage_contents(self.costs.model, layout)
        rows = layout.batch_parts * self.choice.micro_batch_size
        micro_batches = self.resolved.recipe.training.batch_size // rows
        return max(rank.total for rank in ranks_bytes(self.costs, self.choice, contents, micro_batches))

    def _resolved(self, machine: CatalogueMachine) -> ResolvedRecipe:
        return resolve_for_stack(self._recipe(), machine)

    def _recipe(self) -> Recipe:
        number, row = self._number, self.row
        context_length, size, data, shard = (
            number(name) for name in ("context_length", "micro_batch_size", "data", "shard")
        )
        batch_size = int(row["batch_size"]) if "batch_size" in row else size * number("micro_batches") * data * shard
        per_rank = number("stages_per_rank")
        if self.stack == "llm-foundry":
            model = foundry_model(row)
        else:
            model = model_of(row["model"], context_length, int(row.get("n_layers") or 0) or None)
        schedule = row.get("schedule") or ("interleaved-1f1b" if per_rank > 1 else "1f1b")
        return Recipe(
            model=dataclasses.replace(model, attention=row["attention"]),  # pyright: ignore[reportArgumentType]
            training=TrainingConfig(
                batch_size=batch_size,
                micro_batch_size=size,
                precision=row["precision"],  # pyright: ignore[reportArgumentType]
                recompute=row["recompute"],  # pyright: ignore[reportArgumentType]
                recompute_every=int(row.get("recompute_every") or 1),
                parallelism="fsdp" if shard > 1 else "ddp",
                loss_chunk_size=min(size * context_length // number("context"), LARGEST_CHUNK),
                reduce_format="bf16",
            ),
            parallelism=ParallelismConfig(
                data=data,
                shard=shard,
                tensor=number("tensor"),
                pipeline=number("pipeline"),
                context=number("context"),
                expert=number("expert"),
                whole_experts=row.get("whole_experts") == "yes",
                schedule=schedule,  # pyright: ignore[reportArgumentType]
                stages_per_rank=per_rank if per_rank > 1 else None,
                blocks_per_stage=_blocks_per_stage(row.get("blocks_per_stage") or ""),
                shard_optimizer=shard == 1 and data * number("context") > 1,
            ),
        )


def _blocks_per_stage(listed: str) -> tuple[int, ...] | None:
    """Parse the blocks of each stage: "0 126x1 0" is a stage without any, 126 of one block, and one without any."""
    blocks: list[int] = []
    for part in listed.split():
        stages, _, each = part.rpartition("x")
        blocks += [int(each)] * int(stages or 1)
    return tuple(blocks) or None
