"""Plan against meter on a GPU: FLOPs, peak allocated bytes and seconds of 24 training steps of different shapes.

One command on a machine with a GPU, and the table it prints is also written to benchmarks/results/:

    python benchmarks/gpu_plan.py

`--device cpu` runs the same on a CPU, smaller. The count knows nothing of CUDA's allocator yet (blocks of 512 bytes,
segments) and traces the CPU's attention operator: the ratios say what that is worth.
"""

import argparse
import itertools
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from napkin.accounting.meter import meter_step
from napkin.hardware.host import detect_host
from napkin.training.precision import Precision
from napkin.training.preparation import device_name, make_plan, resolve
from napkin.training.recipe import ModelConfig, Recipe, TrainingConfig
from napkin.training.step import build_learner

RESULTS = Path(__file__).parent / "results"
TIMED_STEPS = 10


def recipes(device: str) -> list[Recipe]:
    """Twenty-four shapes: width, depth, batch, precision; on a CPU a few small ones."""
    widths, depths, batches = ((512, 1024, 2048), (4, 12), (4, 16)) if device == "cuda" else ((128, 256), (2,), (2, 8))
    length, vocab_size = (1024, 50304) if device == "cuda" else (128, 4096)
    return [
        Recipe(
            model=ModelConfig(vocab_size, length, d_model=width, n_layers=depth, n_heads=width // 64),
            training=TrainingConfig(batch_size=batch, precision=precision, device=device),  # pyright: ignore[reportArgumentType]
        )
        for width, depth, batch, precision in itertools.product(widths, depths, batches, ("bf16", "fp32"))
    ]


def compare(recipe: Recipe) -> tuple[str, float, float, float, float]:
    """The shape's name; meter over count of FLOPs, bytes and seconds; MFU."""
    host = detect_host()
    recipe, precision = resolve(recipe, recipe.model.vocab_size, host)
    plan = make_plan(recipe, precision, host)
    learner = build_learner(recipe, precision)
    shape = (recipe.training.batch_size, recipe.model.context_length)
    tokens = torch.randint(recipe.model.vocab_size, shape, device=precision.device_type)
    for number in range(3):
        learner.step(number, tokens, tokens)
    metered = meter_step(learner.model, lambda: learner.step(3, tokens, tokens), device_type=precision.device_type)
    seconds = []
    for number in range(TIMED_STEPS):
        begin = time.perf_counter()
        learner.step(4 + number, tokens, tokens)
        _wait(precision)
        seconds.append(time.perf_counter() - begin)
    taken = statistics.median(seconds)
    model = recipe.model
    name = f"d {model.d_model} L {model.n_layers} B {shape[0]} T {shape[1]} {precision.products}"
    ledger = plan.ledger
    return (
        name,
        metered.ledger.flops / ledger.flops,
        metered.peak_bytes / ledger.peak_bytes,
        taken / plan.price.seconds,
        ledger.flops / taken / plan.site.matmul_peak,
    )


def _wait(precision: Precision) -> None:
    if precision.device_type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Print the table, and write it where results are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    _, precision = resolve(recipes(device)[0], recipes(device)[0].model.vocab_size, detect_host())
    name = device_name(precision, detect_host())
    lines = [
        f"# Plan against meter: {name}, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
        "",
        "| shape | FLOPs, meter/count | peak bytes, meter/count | seconds, meter/count | MFU |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for recipe in recipes(device):
        shape, flops, peak_bytes, seconds, mfu = compare(recipe)
        lines.append(f"| {shape} | {flops:.4f} | {peak_bytes:.4f} | {seconds:.3f} | {mfu:.1%} |")
        print(lines[-1], flush=True)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"plan-{device}-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.md"
    path.write_text("\n".join(lines) + "\n")
    print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
