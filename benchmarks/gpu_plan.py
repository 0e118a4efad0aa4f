"""Plan against meter on a GPU: FLOPs, allocated and reserved bytes and seconds of 32 training steps.

One command on a machine with a GPU, and the table it prints is also written to benchmarks/results/:

    python benchmarks/gpu_plan.py

The steps differ in width, depth, batch, micro-batches, precision and key-value heads. Peak bytes are
torch.cuda.max_memory_allocated over a step that nothing watches, reserved bytes torch.cuda.max_memory_reserved from the
first step on, each over what count says. `--device cpu` runs the same on a CPU, smaller.
"""

import argparse
import gc
import itertools
import statistics
import time
from dataclasses import dataclass

import torch

from napkin.accounting.metering import meter_step
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step import build_train_state
from result_files import heading, write_result

TIMED_STEPS = 10


@dataclass(frozen=True)
class Comparison:
    """Meter over count, for one recipe."""

    shape: str
    flops: float
    allocated: float
    reserved: float | None
    seconds: float
    mfu: float


def recipes(device: str) -> list[Recipe]:
    """Thirty-two shapes; on a CPU a few small ones."""
    widths, depths, batches = ((512, 1024, 2048), (4, 12), (4, 16)) if device == "cuda" else ((128, 256), (2,), (4, 8))
    length, vocab_size = (1024, 50304) if device == "cuda" else (128, 4096)
    shapes = [(*shape, 1, 1) for shape in itertools.product(widths, depths, batches)]
    # Micro-batches; groups of query heads.
    shapes += [(*shapes[len(shapes) // 2][:3], parts, groups) for parts, groups in ((2, 1), (4, 1), (1, 2), (2, 2))]
    return [
        Recipe(
            model=ModelConfig(
                vocab_size, length, d_model=width, n_layers=depth, n_heads=width // 64, n_kv_heads=width // 64 // groups
            ),
            training=TrainingConfig(
                batch_size=batch,
                micro_batch_size=batch // parts,
                precision=precision,  # pyright: ignore[reportArgumentType]
                device=device,  # pyright: ignore[reportArgumentType]
            ),
        )
        for (width, depth, batch, parts, groups), precision in itertools.product(shapes, ("bf16", "fp32"))
    ]


def compare(recipe: Recipe) -> Comparison:
    """Train a few steps of the recipe, and set what they took against its plan."""
    planned = plan(recipe)
    recipe, precision, ledger = planned.recipe, planned.resolved.precision, planned.ledger
    on_cuda = precision.device_type == "cuda"
    if on_cuda:
        # What the plan's microbenchmark left in the cache is not the step's.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train_state = build_train_state(planned.resolved)
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.zeros(shape, dtype=torch.int64, device=precision.device_type)
    targets = tokens.clone()
    for number in range(3):
        train_state.step(number, tokens, targets)
    allocated = reserved = None
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
        train_state.step(3, tokens, targets)
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    seconds = []
    for number in range(TIMED_STEPS):
        begin = time.perf_counter()
        train_state.step(4 + number, tokens, targets)
        _wait(precision)
        seconds.append(time.perf_counter() - begin)
    taken = statistics.median(seconds)
    metered = meter_step(
        train_state.model, lambda: train_state.step(3, tokens, targets), device_type=precision.device_type
    )
    model, parts = recipe.model, shape[0] // recipe.training.resolved_micro_batch_size
    return Comparison(
        f"d {model.d_model} L {model.n_layers} H {model.n_heads}/{model.n_kv_heads} B {shape[0]}/{parts} T {shape[1]} "
        f"{precision.products}",
        metered.ledger.flops / ledger.flops,
        (allocated or metered.peak_bytes) / ledger.peak_bytes,
        reserved / ledger.reserved_bytes if reserved and ledger.reserved_bytes else None,
        taken / planned.price.seconds,
        ledger.flops / taken / planned.site.matmul_peak,
    )


def _wait(precision: Precision) -> None:
    if precision.device_type == "cuda":
        torch.cuda.synchronize()


def _worst(found: list[Comparison]) -> list[str]:
    columns = {"FLOPs": [c.flops for c in found], "peak bytes allocated": [c.allocated for c in found]}
    columns["bytes reserved"] = [c.reserved for c in found if c.reserved is not None]
    return [
        f"{name}: {max(abs(ratio - 1) for ratio in ratios):.2%} off at worst over {len(ratios)} shapes"
        for name, ratios in columns.items()
        if ratios
    ]


def main() -> None:
    """Print the table, and write it where results are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use: --device cpu shows that the code runs")
    lines = [
        *heading(
            f"Plan against meter on {ThisMachine(device=device).device_name}",
            "Each figure is meter/count. H is heads/key-value heads, B batch/micro-batches.",
        ),
        "| shape | FLOPs | peak bytes allocated | bytes reserved | seconds | MFU |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    found = []
    for recipe in recipes(device):
        c = compare(recipe)
        found.append(c)
        reserved = "" if c.reserved is None else f"{c.reserved:.4f}"
        lines.append(f"| {c.shape} | {c.flops:.4f} | {c.allocated:.4f} | {reserved} | {c.seconds:.3f} | {c.mfu:.1%} |")
        print(lines[-1], flush=True)
    lines += ["", *_worst(found)]
    print("\n".join(lines[-4:]))
    write_result(f"plan-{device}", lines)


if __name__ == "__main__":
    main()
