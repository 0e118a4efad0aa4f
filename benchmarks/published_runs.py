"""Seconds per step of published training runs: planned from their recipes, without being told an MFU.

    python benchmarks/published_runs.py          plan each run; held-out halves; one constant MFU beside them
    python benchmarks/published_runs.py --fit    fit the coefficients to all runs and write hardware/efficiency.toml

published_runs.csv has runs of MPT models with FSDP (llm-foundry of Mosaic): learned positions, layer norms, biases,
GELU, tied embeddings, a vocabulary of 50,368. "gathers" is how often a step gathers a block's weights. Held out: the
coefficients are fitted to one half of a generation's runs and judged on the other, for several ways to halve them.
Fitting needs SciPy. Coefficients are drawn towards what is known beforehand: `PRIOR`.
"""

import argparse
import csv
import dataclasses
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from napkin.accounting.communication import Communication
from napkin.accounting.ledger import Row
from napkin.accounting.pricing import roofline_seconds
from napkin.hardware.accelerators import find_device
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.device import Device
from napkin.hardware.efficiency import Efficiency, efficiency_of
from napkin.hardware.interconnect import interconnect_of
from napkin.hardware.node import node_of
from napkin.model.config import ModelConfig
from napkin.model.published_models import preset
from napkin.planning.machine import CatalogueMachine
from napkin.planning.planner import plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from result_files import write_result

RUNS = Path(__file__).with_name("published_runs.csv")
TABLE = Path(__file__).parents[1] / "src" / "napkin" / "hardware" / "efficiency.toml"
VOCAB_SIZE = 50368
HALVINGS = 4
OUTLIER = 0.035
"""A relative error from which an error counts less than by its square: the runs' own noise."""
PRIOR = {
    # The expected value, and the relative error of that expectation.
    "matmul_share": (0.75, 0.15),  # "maximum achieved matmul" of stas00/ml-engineering: 271 of 312, 795 of 989
    "matmul_width": (150, 1.0),
    "attention_share": (0.5, 0.4),  # FlashAttention-2 reaches 0.5 to 0.73 of an A100 (Dao 2023)
    "attention_width": (20, 1.0),
    "memory_share": (0.85, 0.3),
    "kernel_seconds": (5e-6, 0.7),
    "link_share": (0.75, 0.3),
    "network_share": (0.75, 0.4),
    "hop_factor": (1.0, 1.0),
    "slowdown": (0.2, 0.7),
}
LLAMA = Recipe(
    model=preset("llama-3-8b", context_length=8192),
    training=TrainingConfig(
        batch_size=16, micro_batch_size=2, recompute="selective", precision="bf16", parallelism="fsdp"
    ),
)
LLAMA_RATE = 5762
"""Tokens per second and device of Llama 3.1 8B: pytorch/torchtitan@b5bcd76, benchmarks/
llama3_h100_202412_torchtitan.md, table 1, FSDP alone."""
GENERATIONS = {"ampere": ((8, 0),), "hopper": ((9, 0),)}


@dataclass(frozen=True)
class Run:
    """A published run, and what the planner counted of it: distinct operator calls and how often a step has each."""

    row: dict[str, str]
    device: Device
    seconds: float
    calls: tuple[tuple[Row, int], ...]
    communication: Communication
    model_flops: float

    def planned_seconds(self, efficiency: Efficiency) -> float:
        """As `napkin.plan` has it."""
        ceilings = CatalogueCeilings(self.device, efficiency)
        computing: dict[str, float] = defaultdict(float)
        for call, times in self.calls:
            computing["forward" if call.phase == "forward" else call.phase] += times * roofline_seconds(call, ceilings)
        interconnect = interconnect_of(self.device, node_of(self.device), efficiency)
        assert interconnect
        exposed = self.communication.exposed_seconds(
            interconnect,
            forward_seconds=computing["forward"],
            backward_seconds=computing["backward"] + computing["recompute"],
        )
        return sum(computing.values()) + exposed


def recipe_of(row: dict[str, str]) -> Recipe:
    """The recipe of a published run."""
    names = ("d_model", "n_heads", "n_layers", "context_length")
    d_model, n_heads, n_layers, context_length = (int(row[name]) for name in names)
    size, parts, devices = (int(row[name]) for name in ("micro_batch_size", "micro_batches", "devices"))
    return Recipe(
        model=ModelConfig(
            vocab_size=VOCAB_SIZE,
            context_length=context_length,
            d_model=d_model,
            n_heads=n_heads,
            n_layers=n_layers,
            d_ff=4 * d_model,
            positions="learned",
            norm="layer",
            feed_forward="gelu",
            biases="all",
        ),
        training=TrainingConfig(
            batch_size=size * parts * devices,
            micro_batch_size=size,
            recompute="full" if row["recompute"] == "full" else "none",
            precision="fp8" if row["precision"] == "fp8" else "bf16",
            loss_chunk_size=size * context_length,
            parallelism="fsdp",
            reduce_format="bf16",
        ),
    )


def count_run(row: dict[str, str]) -> Run:
    """Plan a published run, and keep what its seconds depend on."""
    device = find_device(row["device"])
    planned = plan(recipe_of(row), on=CatalogueMachine(device, int(row["devices"])))
    bare = {"module": "", "call": None, "bytes_kept": 0, "component": "other", "elementwise_flops": 0}
    calls = Counter(dataclasses.replace(each, **bare) for each in planned.ledger.rows)
    communication = planned.communication
    if row["gathers"] == "once":
        kept = [
            each for each in communication.collectives if (each.operation, each.phase) != ("all_gather", "backward")
        ]
        communication = dataclasses.replace(communication, collectives=tuple(kept))
    tokens = int(row["context_length"]) * int(row["micro_batch_size"]) * int(row["micro_batches"])
    return Run(
        row=row,
        device=device,
        seconds=tokens / float(row["tokens_per_second_per_device"]),
        calls=tuple(calls.items()),
        communication=communication,
        model_flops=planned.ledger.flops,
    )


def fit(runs: Sequence[Run]) -> Efficiency:
    """The coefficients of one generation."""
    from scipy.optimize import least_squares  # pyright: ignore[reportMissingImports]

    expected = np.log([value for value, _ in PRIOR.values()])
    width = np.array([error for _, error in PRIOR.values()])

    def residuals(logs: np.ndarray) -> np.ndarray:
        efficiency = coefficients(logs)
        errors = np.log([run.planned_seconds(efficiency) / run.seconds for run in runs]) / OUTLIER
        softened = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([softened, (logs - expected) / width])

    return coefficients(least_squares(residuals, expected, diff_step=1e-4, max_nfev=40).x)


def coefficients(logs: Iterable[float]) -> Efficiency:
    """From the logarithms of the fitted coefficients, in the order of `PRIOR`."""
    values: dict[str, Any] = dict(zip(PRIOR, map(float, np.exp(list(logs))), strict=True))
    return Efficiency(**values, factor=1.0)


def held_out(runs: Sequence[Run]) -> list[float]:
    """Relative errors of runs that the coefficients have not seen."""
    errors = []
    for halving in range(HALVINGS):
        order = np.random.default_rng(halving).permutation(len(runs)) if halving else np.arange(len(runs))
        for half in (0, 1):
            found = fit([runs[i] for i in order[half::2]])
            errors += [runs[i].planned_seconds(found) / runs[i].seconds - 1 for i in order[1 - half :: 2]]
    return errors


def constant_mfu(runs: Sequence[Run]) -> list[float]:
    """Errors of one MFU for all runs of a device, the median of those not judged: what people do by hand."""
    errors = []
    for half in (0, 1):
        mfu = statistics.median(run.model_flops / run.seconds / run.device.peak("bf16") for run in runs[half::2])
        errors += [run.model_flops / mfu / run.device.peak("bf16") / run.seconds - 1 for run in runs[1 - half :: 2]]
    return errors


def described(errors: Sequence[float]) -> str:
    """Median, nine in ten, worst and mean of relative errors."""
    sizes = np.abs(errors)
    return (
        f"{np.median(sizes):.1%} | {np.quantile(sizes, 0.9):.1%} | {sizes.max():.0%} | "
        f"{statistics.mean(errors):+.1%} | {len(errors)}"
    )


def write_table(found: dict[str, tuple[Efficiency, list[float], int]]) -> None:
    """hardware/efficiency.toml, with the factor that nine in ten of the held-out runs are within."""
    lines = [
        "# Fractions of a datasheet's figures that kernels and collectives reach: see napkin.hardware.efficiency.",
        "# Written by `python benchmarks/published_runs.py --fit`, from the runs and sources of published_runs.csv.",
    ]
    for name, (efficiency, errors, rows) in found.items():
        factor = float(np.quantile(np.exp(np.abs(np.log1p(errors))), 0.9))
        values: dict[str, Any] = {each: float(f"{getattr(efficiency, each):.4g}") for each in PRIOR}
        values |= {"factor": round(factor, 3), "rows": rows}
        values["compute_capabilities"] = [list(each) for each in GENERATIONS[name]]
        lines += ["", f"[{name}]", *(f"{key} = {value}" for key, value in values.items())]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {TABLE}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds per step of published training runs.")
    parser.add_argument("--fit", action="store_true", help="fit the coefficients to all runs and write them")
    arguments = parser.parse_args()
    with RUNS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    runs = []
    for row in rows:
        runs.append(count_run(row))
        print(f"\rcounting {len(runs)} of {len(rows)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    bf16 = [run for run in runs if run.row["precision"] == "bf16"]
    lines = ["| seconds per step | median | nine in ten | worst | mean | runs |", "|---|---|---|---|---|---|"]
    constant: list[float] = []
    for device in dict.fromkeys(run.row["device"] for run in bf16):
        constant += constant_mfu([run for run in bf16 if run.row["device"] == device])
    lines.append(f"| one constant MFU per device | {described(constant)} |")
    found = {}
    unseen: list[float] = []
    for name, capabilities in GENERATIONS.items():
        of_generation = [run for run in bf16 if run.device.compute_capability in capabilities]
        errors = held_out(of_generation)
        unseen += errors
        lines.append(f"| {name}, not seen by the fit | {described(errors)} |")
        if arguments.fit:
            found[name] = (fit(of_generation), errors, len(of_generation))
    lines.append(f"| both, not seen by the fit | {described(unseen)} |")
    if arguments.fit:
        write_table(found)
        efficiency_of.__globals__["efficiencies"].cache_clear()
    now = [(run, run.planned_seconds(efficiency_of(run.device)) / run.seconds - 1) for run in bf16]
    lines.append(f"| napkin plan, as its table is | {described([error for _, error in now])} |")
    titan = plan(LLAMA, on="8xH100-96GB")
    tokens_per_second = titan.tokens_per_step / titan.site.n_devices / titan.seconds_per_step
    lines.append(f"| another program: torchtitan, not compiled | {described([LLAMA_RATE / tokens_per_second - 1])} |")
    fp8 = [run.planned_seconds(efficiency_of(run.device)) / run.seconds - 1 for run in runs if run not in bf16]
    lines.append(f"| the same, fp8 | {described(fp8)} |")
    lines += ["", "Furthest off:", ""]
    for run, error in sorted(now, key=lambda pair: -abs(pair[1]))[:12]:
        row = run.row
        batch = f"{row['micro_batches']} × {row['micro_batch_size']} × {row['context_length']}"
        lines.append(f"- {error:+.0%} {row['model']} on {row['devices']} {row['device']}, {batch}")
    print("\n".join(lines))
    write_result("published-runs", lines)


if __name__ == "__main__":
    main()
