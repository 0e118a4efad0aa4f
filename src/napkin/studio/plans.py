"""Answers for the planner's page: the models and devices to choose from, and plans by count.

A plan is the sum of a model's parts, each counted on fake tensors: a second for a model of 70 billion parameters, and
less where only the layout changes.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import msgspec

from napkin.accounting.step_rules import run_rule, step_rule
from napkin.errors import NapkinError
from napkin.hardware.cluster import find_cluster, node_of
from napkin.hardware.device_file import catalogue
from napkin.model.config import preset, presets
from napkin.optim.registry import OPTIMIZERS
from napkin.planning.rules import USUAL_MFU
from napkin.planning.step.site import step_memory
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe, recipe_of_values
from napkin.studio.javascript import javascript_of
from napkin.studio.rule_fields import FORMAT_BYTES, model_fields, optimizer_bytes

RULES = (step_rule, run_rule)
LONGEST_CONTEXT = 8192
"""Tokens of the sequences that a plan begins with, where the model allows more."""
FIRST: dict[str, Any] = {
    "preset": "llama-3-8b",
    "tokens": 1e12,
    "batch_size": 512,
    "micro_batch_size": 1,
    "recompute": "none",
    "loss_chunk_size": 4096,
    "precision": "bf16",
    "optimizer": "adamw",
    "device": "H100-SXM-80GB",
    "n": 64,
    "sharing": "shards",
    "tensor": 1,
    "pipeline": 1,
    "context": 1,
    "expert": 1,
    "efficiency": USUAL_MFU,
}
"""Initial values of the planner's controls."""


class PlanRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The request for a plan: a published model, fields of a recipe that differ from it, and devices."""

    on: str
    """Devices, as in "64xH100"."""
    tokens: float = 0.0
    """Tokens of the run; 0 leaves the recipe's number of steps."""
    preset: str | None = None
    model: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    training: dict[str, Any] = {}
    parallelism: dict[str, Any] = {}


def recipe_of(request: PlanRequest) -> Recipe:
    """The recipe that is asked for. Raises NapkinError for a field or a value that is none."""
    model = {} if request.preset is None else dataclasses.asdict(preset(request.preset))
    values = {
        "model": {**model, **request.model},
        "optimizer": request.optimizer,
        "training": request.training,
        "parallelism": request.parallelism,
    }
    recipe = recipe_of_values(values, "the recipe of the page")
    if not 0 <= request.tokens < 2**63:
        raise NapkinError(f"tokens is {request.tokens}: use a number from 0 to 9.2e18")
    if request.tokens:
        return recipe.with_steps(max(1, -(-int(request.tokens) // recipe.tokens_per_step)))
    return recipe


def recipe_text(request: PlanRequest) -> str:
    """The recipe as TOML, every field written out."""
    return format_recipe(recipe_of(request))


def plan_by_count(request: PlanRequest, progress: Callable[[str], None]) -> dict[str, Any]:
    """The plan of a request: bytes of the busiest rank by what they are for, seconds by kind, dollars, what fits.

    Raises NapkinError for what cannot be planned; what `progress` raises ends the count.
    """
    from napkin.planning.layouts.layout_plan import plan_layout
    from napkin.planning.planner import resolve
    from napkin.planning.step.machine import CatalogueMachine, machine_of

    machine = machine_of(request.on, device="auto")
    assert isinstance(machine, CatalogueMachine)
    plan = plan_layout(resolve(recipe_of(request), machine), machine, progress=progress)
    recipe = plan.resolved.recipe
    return {
        **plan.as_values(),
        "bytes_by_use": plan.bytes_of_largest.parts,
        "steps": recipe.training.steps,
        "tokens_per_step": recipe.tokens_per_step,
        "model_flops": plan.model_flops,
        "run_seconds": recipe.training.steps * plan.seconds,
        "factor": plan.factor,
        "precision": plan.resolved.precision.name,
    }


@functools.cache
def planner_catalogue() -> dict[str, Any]:
    """Published models by the fields of a rule, devices, optimizers and formats, for the page's controls."""
    models = {
        name: {
            "rule": model_fields(each.model),
            "derived": [field for field in ("head_dim", "n_kv_heads") if getattr(each.model, field) is None],
            "parameters": each.parameters,
            "source": each.source,
        }
        for name, each in presets().items()
        if not each.model.has_states
    }
    devices = {}
    for device in catalogue():
        node = node_of(device)
        devices[device.name] = {
            "peaks": device.peaks,
            "memory_bytes": device.usable_bytes,
            "step_bytes": step_memory(device.usable_bytes),
            "memory_bandwidth": device.memory_bandwidth,
            "host_bandwidth": device.host_bandwidth,
            "per_node": node.devices,
            "watts": device.watts,
            "usd_per_hour": device.price.usd_per_hour if device.price else None,
            "price": str(device.price) if device.price else None,
            "source": str(device.source),
        }
    return {
        "models": models,
        "devices": devices,
        "optimizers": {name: optimizer_bytes(name) for name in OPTIMIZERS},
        "formats": FORMAT_BYTES,
        "first": FIRST,
        "longest_context": LONGEST_CONTEXT,
    }


def first_request(name: str, on: str) -> PlanRequest:
    """The page's request for a published model with all other controls at their initial values."""
    n_devices = find_cluster(on).n_devices
    fields = ("batch_size", "micro_batch_size", "recompute", "loss_chunk_size", "precision")
    sharing = {
        "data": 1,
        "shard": n_devices,
        **{name: FIRST[name] for name in ("tensor", "pipeline", "context", "expert")},
    }
    return PlanRequest(
        on=on,
        tokens=FIRST["tokens"],
        preset=name,
        model={"context_length": min(LONGEST_CONTEXT, presets()[name].model.context_length)},
        optimizer={"name": FIRST["optimizer"]},
        training={**{field: FIRST[field] for field in fields}, "parallelism": "fsdp" if n_devices > 1 else "ddp"},
        parallelism={**sharing, "shard_optimizer": False},
    )


@functools.cache
def rules_script() -> str:
    """The rules of a step and a run as a module of JavaScript."""
    names = ", ".join(rule.__name__ for rule in RULES)
    return f"// Translated from the rules of napkin.accounting.\n{javascript_of(RULES)}\nexport {{ {names} }};\n"
