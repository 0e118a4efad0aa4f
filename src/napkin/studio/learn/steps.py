"""What a training step needs: its memory over time with and without recomputation, and the roofline of its products."""

import functools
from typing import Annotated, Any, Literal

import msgspec

from napkin.accounting.pricing import roofline_seconds
from napkin.accounting.rules import attention_flops_rule, matmul_flops_rule, matmul_intensity_rule
from napkin.errors import NapkinError
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.device_file import find_device
from napkin.number_formats import find_format
from napkin.studio.learn.idea import Idea

MODES = ("none", "selective", "full")
MOST_MOMENTS = 400
"""Moments of a curve; of more, the one with most bytes stands for its neighbours."""


class MemoryRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A small GPT and its batch."""

    n_layers: Annotated[int, msgspec.Meta(ge=1, le=8)] = 4
    d_model: Annotated[int, msgspec.Meta(ge=64, le=2048)] = 512
    context_length: Annotated[int, msgspec.Meta(ge=16, le=4096)] = 512
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    vocab_size: Annotated[int, msgspec.Meta(ge=256, le=65536)] = 4096
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    precision: Literal["fp32", "bf16"] = "bf16"


def memory_answer(asked: MemoryRequest) -> dict[str, Any]:
    """Bytes in tensors over the seconds of a step, by use, for each kind of recomputation; on an H100's rooflines.

    Raises NapkinError for a recipe that is not possible.
    """
    return {mode: _counted(asked, mode) for mode in MODES}


@functools.lru_cache(maxsize=64)
def _counted(asked: MemoryRequest, recompute: str) -> dict[str, Any]:
    from napkin.planning.planner import resolve
    from napkin.planning.step.machine import machine_of
    from napkin.recipe.toml_file import recipe_of_values
    from napkin.train_step.step_ledger import count_step

    if asked.d_model % 64:
        raise NapkinError(f"the width is {asked.d_model}: use a multiple of 64, the width of a head")
    recipe = recipe_of_values(
        {
            "model": {
                "n_layers": asked.n_layers,
                "d_model": asked.d_model,
                "n_heads": asked.d_model // 64,
                "vocab_size": asked.vocab_size,
                "context_length": asked.context_length,
            },
            "optimizer": {"name": asked.optimizer},
            "training": {
                "batch_size": asked.batch_size,
                "micro_batch_size": asked.batch_size,
                "precision": asked.precision,
                "recompute": recompute,
                "compile": "off",
            },
        },
        "the recipe of the page",
    )
    ledger = count_step(resolve(recipe, machine_of("H100", device="auto")), reserved=False)
    ceilings = CatalogueCeilings(find_device("H100"))
    ends, now = [], 0.0
    for row in ledger.rows:
        now += roofline_seconds(row, ceilings)
        ends.append(now)
    moments = sorted(ledger.timeline)
    size = -(-len(moments) // MOST_MOMENTS) or 1
    shown = [
        max(moments[first : first + size], key=lambda moment: moment.bytes_alive)
        for first in range(0, len(moments), size)
    ]
    return {
        "seconds": [ends[moment.row] for moment in shown],
        "uses": {
            "parameters and optimizer": [moment.state_bytes - moment.gradient_bytes for moment in shown],
            "gradients": [moment.gradient_bytes for moment in shown],
            "weight copies": [moment.weight_copy_bytes for moment in shown],
            "activations": [moment.activation_bytes for moment in shown],
            "other": [
                moment.bytes_alive - moment.state_bytes - moment.weight_copy_bytes - moment.activation_bytes
                for moment in shown
            ],
        },
        "peak": ledger.peak_bytes,
        "step_seconds": now,
        "flops": ledger.flops,
        "parameters": ledger.parameters,
    }


MEMORY = Idea(
    name="step-memory",
    title="A step's memory over time",
    summary="Bytes of a small GPT's training step by use, with recomputation off, selective and full.",
    text=(
        "Parameters and optimizer state are in memory all the time. Activations grow through the forward pass, because "
        "the backward pass needs them, and shrink again while gradients take their place. The peak is usually around "
        "the loss, where logits over the vocabulary exist together with the activations of all layers.",
        "Recomputation keeps fewer activations and computes the others again in the backward pass. Full "
        "recomputation keeps only the input of each block and costs another forward pass; selective recomputation "
        "keeps the products and recomputes cheap operators.",
    ),
    formula="bytes = parameters + optimizer state + gradients + activations kept so far\n"
    "full recomputation: FLOPs · 4/3, activations of one block and an input per block",
    command="napkin plan --model.vocab-size 4096 --model.d-model 512 --training.recompute full --on H100",
    files=("accounting/memory.py", "train_step/compile.py", "planning/step/memory_savings.py"),
    request=MemoryRequest,
    answer=memory_answer,
)


class RooflineRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A matrix product or attention on a device."""

    device: str = "H100-SXM-80GB"
    format: str = "bf16"
    operator: Literal["product", "attention", "decoding"] = "product"
    m: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 4096
    k: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 4096
    n: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 4096
    batch: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 8
    heads: Annotated[int, msgspec.Meta(ge=1, le=256)] = 32
    kv_heads: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    head_dim: Annotated[int, msgspec.Meta(ge=8, le=512)] = 128
    context: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 4096


def roofline_answer(asked: RooflineRequest) -> dict[str, Any]:
    """The roof of a device, and where an operator stands under it: FLOPs, bytes, intensity, least seconds.

    Raises NapkinError for a format in which the device has no products.
    """
    device = find_device(asked.device)
    peak = device.peak(asked.format)
    size = find_format(asked.format).bytes
    if asked.operator == "product":
        flops = float(matmul_flops_rule(asked.m, asked.k, asked.n))
        moved = flops / matmul_intensity_rule(asked.m, asked.k, asked.n, bytes_per_number=1) * size
        reached = CatalogueCeilings(device).matmul_rate(asked.format, asked.m, asked.n, asked.k)
    else:
        if asked.heads % asked.kv_heads:
            raise NapkinError(f"{asked.heads} heads do not divide among {asked.kv_heads} of keys and values")
        queries = 1 if asked.operator == "decoding" else asked.context
        width, kv_width = asked.heads * asked.head_dim, asked.kv_heads * asked.head_dim
        # The rule is of a forward and a backward pass, over all pairs.
        flops = attention_flops_rule(n_layers=1, d_model=width, context_length=asked.context, tokens=queries) / 3
        flops *= asked.batch
        moved = 2 * asked.batch * (queries * width + asked.context * kv_width) * size
        reached = None
    by_flops, by_bytes = flops / peak, moved / device.memory_bandwidth
    return {
        "peak": peak,
        "bandwidth": device.memory_bandwidth,
        "ridge": peak / device.memory_bandwidth,
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved,
        "seconds": max(by_flops, by_bytes),
        "by_flops": by_flops,
        "by_bytes": by_bytes,
        "reached": reached,
        "formats": dict(device.peaks),
    }


ROOFLINE = Idea(
    name="roofline",
    title="The roofline",
    summary="A product or attention of any shape on a device: whether arithmetic or memory bounds it, and by how much.",
    text=(
        "A device has a maximum rate of FLOP/s and of bytes per second. An operator with many FLOPs per "
        "byte reaches the flat roof, the peak; one with few is limited by the sloping roof, the bandwidth. This ratio "
        "is the operator's intensity.",
        "A large square product has hundreds of FLOPs per byte; the same weights for one token have one FLOP per "
        "byte in 16 bits. That is why training is bound by arithmetic, why decoding one sequence is bound by memory, "
        "and why a batch of sequences is nearly free.",
    ),
    formula="seconds ≥ max(FLOPs / peak, bytes / bandwidth),  intensity = FLOPs / bytes\n"
    "product: 2·m·k·n FLOPs, (m·k + k·n + m·n) numbers\n"
    "attention over all pairs: 4·batch·queries·context·heads·width FLOPs, queries, outputs, keys and values moved once",
    command="napkin bench matmul --shapes tokens=1024,d_in=1024,d_out=1024",
    files=("accounting/pricing.py", "hardware/ceilings.py", "hardware/catalogue.toml"),
    request=RooflineRequest,
    answer=roofline_answer,
)
