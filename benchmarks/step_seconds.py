"""Seconds of a training step, planned and then measured, over 24 shapes: how far off is the plan?

    python benchmarks/step_seconds.py

The plan is the one that `napkin train` prints: operators rehearsed one by one, and a slice of the model timed. Beside
it stand what users have otherwise: 6·N·T FLOPs at half of the measured matmul peak, and the roofline of each operator.
The shapes are drawn with a fixed seed from a grid of widths, depths, batches, contexts and precisions. The table is
also written to benchmarks/results/.
"""

import argparse
import itertools
import math
import random
import statistics
import time

import torch

from napkin.accounting.pricing import price
from napkin.accounting.rules import seconds_rule, training_flops_rule
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.model.config import ModelConfig
from napkin.planning.planner import plan
from napkin.planning.step.machine import ThisMachine
from napkin.planning.step.run_plan import RULE_MFU
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import TrainingConfig
from napkin.train_step.step import build_train_state
from result_files import heading, write_result
from turns import BRACKETS, spread

TIMED_STEPS = 12
VOCAB_SIZES = {"cpu": 4096, "cuda": 50304}
GRIDS = {
    "cpu": ((128, 192, 256, 384, 512), (2, 4, 6), (2, 4, 8), (128, 256), ("bf16", "fp32"), (1, 2)),
    "cuda": ((512, 768, 1024, 2048), (4, 8, 12), (4, 8, 16), (512, 1024), ("bf16", "fp32"), (1, 2)),
}


def recipes(device: str, how_many: int) -> list[Recipe]:
    """As many shapes of the device's grid."""
    drawn = random.Random(0).sample(list(itertools.product(*GRIDS[device])), how_many)
    return [
        Recipe(
            model=ModelConfig(VOCAB_SIZES[device], length, d_model=width, n_layers=depth, n_heads=width // 64),
            training=TrainingConfig(
                batch_size=batch,
                micro_batch_size=batch // micro_batches,
                precision=precision,  # pyright: ignore[reportArgumentType]
                device=device,  # pyright: ignore[reportArgumentType]
            ),
        )
        for width, depth, batch, length, precision, micro_batches in drawn
    ]


def measure(resolved: ResolvedRecipe) -> list[float]:
    """Seconds of steps, after two that warm up."""
    train_state, recipe, device_type = build_train_state(resolved), resolved.recipe, resolved.precision.device_type
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.randint(recipe.model.vocab_size, shape, device=device_type)
    seconds = []
    for number in range(2 + TIMED_STEPS):
        begin = time.perf_counter()
        train_state.step(number, tokens, tokens)
        if device_type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return seconds[2:]


def compare(recipe: Recipe) -> tuple[str, str, float, float, float, float]:
    """The shape's name, measured milliseconds with their interval, the median over plan, roofline and rule, and the
    plan's stated factor."""
    planned = plan(recipe)
    precision = planned.resolved.precision
    roofline = price(planned.ledger, calibration_of_this_machine(precision.device_type)).seconds
    flops = training_flops_rule(planned.rule_parameters, planned.tokens_per_step)
    rule = seconds_rule(flops, planned.site.matmul_peak, mfu=RULE_MFU)
    seconds = measure(planned.resolved)
    taken = statistics.median(seconds)
    model, training = planned.recipe.model, planned.recipe.training
    batch = f"{training.batch_size // training.resolved_micro_batch_size}×{training.resolved_micro_batch_size}"
    name = f"d {model.d_model} L {model.n_layers} B {batch} T {model.context_length} {precision.products}"
    shown = spread([1e3 * each for each in seconds], "{:.1f}".format)
    return name, shown, taken / planned.seconds_per_step, taken / roofline, taken / rule, planned.price.factor


def off(ratio: float) -> float:
    """How far off a prediction was, whichever way: 0.1 is a tenth too much or too little."""
    return max(ratio, 1 / ratio) - 1


def coverage(over_plan: list[float], factors: list[float]) -> str:
    """How many plans kept the factor that they stated, and by how much all stated factors were too wide or narrow."""
    covered = sum(off(ratio) <= factor - 1 for ratio, factor in zip(over_plan, factors, strict=True))
    # Of each plan, its error in units of its own interval: nine in ten are to be below one.
    used = sorted(math.log(1 + off(ratio)) / math.log(factor) for ratio, factor in zip(over_plan, factors, strict=True))
    return (
        f"within the factor that the plan states: {covered} of {len(factors)} ({covered / len(factors):.0%}, where 85% "
        f"to 95% are wanted); stated: median {statistics.median(factors):.3f}, from {min(factors):.3f} to "
        f"{max(factors):.3f}; intervals {used[int(0.9 * len(used)) - 1]:.2f} times as wide would hold nine in ten"
    )


def main() -> None:
    """Print the table and what it comes to, and write it where results are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", type=int, default=24)
    options = parser.parse_args()
    drawn = recipes(options.device, options.shapes)
    lines = [
        *heading(f"Seconds per step on {ThisMachine(device=options.device).device_name}", BRACKETS),
        "| shape (batch as micro-batches × sequences) | measured ms | over plan | stated | over roofline | over rule |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines[-2:]), flush=True)
    ratios: list[tuple[float, float, float]] = []
    factors: list[float] = []
    for recipe in drawn:
        name, shown, *of, factor = compare(recipe)
        ratios.append((of[0], of[1], of[2]))
        factors.append(factor)
        lines.append(f"| {name} | {shown} | {of[0]:.3f} | {factor:.3f} | {of[1]:.3f} | {of[2]:.3f} |")
        print(lines[-1], flush=True)
    summary = []
    for witness, column in zip(("plan", "roofline", "rule"), zip(*ratios, strict=True), strict=True):
        errors = sorted(map(off, column))
        summary.append(
            f"{witness}: median {statistics.median(errors):.1%} off, nine in ten within "
            f"{errors[int(0.9 * len(errors)) - 1]:.1%}, worst {errors[-1]:.1%}"
        )
    summary.append(coverage([of[0] for of in ratios], factors))
    lines += ["", *(f"- {line}" for line in summary)]
    print("\n" + "\n".join(summary))
    write_result(f"step-seconds-{options.device}", lines)


if __name__ == "__main__":
    main()
