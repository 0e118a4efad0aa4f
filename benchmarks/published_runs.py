"""Seconds per step of published training runs: planned from their recipes, without being told an MFU.

    python benchmarks/published_runs.py          plan each run; what the fit has not seen apart; per program and device
    python benchmarks/published_runs.py --fit    fit the coefficients and write hardware/efficiency.toml: half an hour

published_runs.csv has runs of MPT models with FSDP (llm-foundry of Mosaic): learned positions, layer norms, biases,
GELU, tied embeddings, a vocabulary of 50,368. "gathers" is how often a step gathers a block's weights.
published_layouts.csv has runs of other programs, with tensor, pipeline, context and expert ranks: see
published_recipes.py. The coefficients of a generation are fitted to llm-foundry's runs and to the other programs' that
`seen` and `EVERY` choose; those that they do not choose are the judgement. published_stacks.csv has runs of stacks that
nothing is fitted to (`HELD_BACK`), and further ones of Megatron-Bridge, which NeMo's rows are of too. Fitting needs
SciPy. Coefficients are drawn towards what is known beforehand: `PRIOR`.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from napkin.hardware.ceilings import Efficiency, efficiencies
from published_recipes import PublishedRun, foundry_row, read_rows
from result_files import heading, write_result

TABLE = Path(__file__).parents[1] / "src" / "napkin" / "hardware" / "efficiency.toml"
OUTLIER = 0.035
"""A relative error from which an error counts less than by its square: the runs' own noise."""
PRIOR = {
    # The expected value, and the relative error of that expectation.
    "product_share": (0.85, 0.15),  # of kernels alone: hardware/kernel_curves.toml; less in a long run, by its power
    "attention_share": (0.4, 0.4),  # FlashAttention-2 reaches 0.5 to 0.73 of an A100 (Dao 2023), a third of an H100
    "attention_width": (20, 1.0),
    "attention_rows": (50_000, 1.0),  # published_kernels.csv
    "memory_share": (0.85, 0.3),
    "fused_share": (0.35, 0.4),
    "kernel_seconds": (5e-6, 0.7),
    "link_share": (0.7, 0.3),
    "network_share": (0.75, 0.4),
    "hop_factor": (1.0, 1.0),
    "slowdown": (0.2, 0.7),
    "cudnn_attention_share": (0.6, 0.3),
    "fp8_share": (0.6, 0.2),
}
KEPT = ("matmul_share", "matmul_width")
"""Of products in formats that no curve has: as they are in the table."""
EVERY = {"ampere": 3, "hopper": 2}
"""Of llm-foundry's runs every second or third is fitted to; the others are the judgement."""
HELD_BACK = ("Automodel", "fms-fsdp", "torchao")
"""Stacks of which no run is fitted to, neither by `--fit` nor by a constant of a stack's file."""
GENERATIONS = {"ampere": ((8, 0),), "hopper": ((9, 0),), "blackwell": ((10, 0), (10, 3))}


class LayoutRun(PublishedRun):
    """A published run of any program."""

    def planned_seconds(self, efficiency: Efficiency | None = None) -> float:
        """Seconds of a step as `plan_layout` has it."""
        return self.plan(efficiency).seconds

    @property
    def best_seconds(self) -> float:
        """Of a step at the peak of the datasheet."""
        flops = self.costs.model_flops(self.resolved.recipe.training.batch_size)
        return flops / self.n_devices / self.device.peak("bf16")


def seen(number: int, run: LayoutRun) -> bool:
    """Whether a run of another program is fitted to: of llama-3-405b on Blackwell none is, so that a larger model than
    any that was seen is judged; of mixtures of experts none; otherwise every other row of the table."""
    row = run.row
    if run.stack in HELD_BACK or run.stack == "Megatron-Bridge":
        return False
    if run.stack == "Megatron-LM" and row["device"].startswith("B200"):
        return row["model"] == "llama-3-70b"
    return number % 2 == 0


def seen_of_foundry(runs: Sequence[LayoutRun], run: LayoutRun) -> bool:
    """Whether a run of llm-foundry is fitted to, by its place among those of its generation."""
    name = generation_of(run)
    same = [each for each in runs if generation_of(each) == name]
    return same.index(run) % EVERY[name] == 0


def generation_of(run: LayoutRun) -> str:
    """The name of its device's generation."""
    return next(name for name, found in GENERATIONS.items() if run.device.compute_capability in found)


def group_of(run: LayoutRun) -> str:
    """The line of the table that a run stands in."""
    generation = generation_of(run)
    experts = ", experts" if run.resolved.recipe.model.n_experts else ""
    fp8 = ", fp8" if run.stack == "llm-foundry" and run.row["precision"] == "fp8" else ""
    return f"{run.stack}, {generation}{experts}{fp8}"


def names_of(run: LayoutRun, used: bool) -> list[str]:
    """The lines of the table that a run counts for."""
    group, experts = group_of(run), ", experts" if run.resolved.recipe.model.n_experts else ""
    if run.stack in HELD_BACK:
        return [f"{run.stack}: held back{experts}", f"all stacks held back{experts}"]
    if run.stack == "Megatron-Bridge":
        return [f"{group}: constants of its stack"]
    if used:
        return [group]
    of_all = "llm-foundry" if run.stack == "llm-foundry" else "Megatron-LM, NeMo, torchtitan"
    return [f"{group}: not fitted to", f"{of_all}{experts}, not fitted to"]


def fit(runs: Sequence[LayoutRun], known: Efficiency) -> Efficiency:
    """The coefficients of one generation; `KEPT` are those of `known`."""
    from scipy.optimize import least_squares  # pyright: ignore[reportMissingImports]

    fp8 = any(run.row["precision"] == "fp8" for run in runs)
    # Where all attention is cuDNN's, there are not two shares to tell apart.
    both = {run.stack in ("NeMo", "Megatron-LM") for run in runs} == {True, False} and fp8
    optional = {"fp8_share": fp8, "cudnn_attention_share": both}
    names = [name for name in PRIOR if optional.get(name, True)]
    expected = np.log([PRIOR[name][0] for name in names])
    width = np.array([PRIOR[name][1] for name in names])

    def residuals(logs: np.ndarray) -> np.ndarray:
        efficiency = coefficients(names, logs, known)
        errors = np.log([run.planned_seconds(efficiency) / run.seconds for run in runs]) / OUTLIER
        softened = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([softened, (logs - expected) / width])

    return coefficients(names, least_squares(residuals, expected, diff_step=1e-4, max_nfev=25).x, known)


def coefficients(names: Iterable[str], logs: Iterable[float], known: Efficiency) -> Efficiency:
    """From the logarithms of the fitted coefficients, and those that are kept."""
    values: dict[str, Any] = dict(zip(names, map(float, np.exp(list(logs))), strict=True))
    return Efficiency(**values, **{name: getattr(known, name) for name in KEPT}, factor=1.0)


def constant_mfu(runs: Sequence[LayoutRun]) -> list[float]:
    """Errors of one MFU for all runs of a device, the median of those not judged: what people do by hand."""
    errors = []
    for half in (0, 1):
        mfu = statistics.median(run.best_seconds / run.seconds for run in runs[half::2])
        errors += [run.best_seconds / mfu / run.seconds - 1 for run in runs[1 - half :: 2]]
    return errors


def described(errors: Sequence[float], factors: Sequence[float] = ()) -> str:
    """Median, nine in ten, worst and mean of relative errors, how many their plans' factors hold, and their number."""
    sizes = np.abs(errors)
    held = f"{np.mean(np.abs(np.log1p(errors)) <= np.log(factors)):.0%}" if factors else "–"
    return (
        f"{np.median(sizes):.1%} | {np.quantile(sizes, 0.9):.1%} | {sizes.max():.0%} | "
        f"{statistics.mean(errors):+.1%} | {held} | {len(errors)}"
    )


def write_table(found: dict[str, tuple[Efficiency, list[float], int]]) -> None:
    """hardware/efficiency.toml, with the factor that nine in ten of the runs not fitted to are within."""
    lines = [
        "# Fractions of a datasheet's figures that kernels and collectives reach: napkin.hardware.ceilings explains.",
        "# Written by `python benchmarks/published_runs.py --fit`, from the runs and sources of published_runs.csv and",
        "# published_layouts.csv. rows: fitted to; factor: nine in ten of the runs that were not are within it;",
        "# residual: their median relative error.",
    ]
    for name, (efficiency, errors, rows) in found.items():
        factor = float(np.quantile(np.exp(np.abs(np.log1p(errors))), 0.9))
        values: dict[str, Any] = {
            each: float(f"{value:.4g}") for each in (*KEPT, *PRIOR) if (value := getattr(efficiency, each)) is not None
        }
        values |= {"factor": round(factor, 3), "rows": rows, "residual": round(float(np.median(np.abs(errors))), 4)}
        values["compute_capabilities"] = [list(each) for each in GENERATIONS[name]]
        lines += ["", f"[{name}]", *(f"{key} = {value}" for key, value in values.items())]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    efficiencies.cache_clear()
    print(f"wrote {TABLE}")


def fit_all(runs: Sequence[tuple[LayoutRun, bool]]) -> None:
    """Fit every generation to the runs that are used, and write the table."""
    found = {}
    for name, capabilities in GENERATIONS.items():
        own = [(run, used) for run, used in runs if run.device.compute_capability in capabilities]
        chosen = [run for run, used in own if used]
        print(f"fitting {name} to {len(chosen)} runs", file=sys.stderr)
        efficiency = fit(chosen, efficiencies()[name])
        judged = [run for run, used in own if not used and not group_of(run).endswith(("experts", "fp8"))]
        errors = [run.planned_seconds(efficiency) / run.seconds - 1 for run in judged]
        found[name] = (efficiency, errors, len(chosen))
    write_table(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the coefficients and write them")
    arguments = parser.parse_args()
    head = heading("Seconds per step of published training runs")
    foundry = [LayoutRun(foundry_row(row)) for row in read_rows("published_runs.csv")]
    by_group: dict[str, list[LayoutRun]] = defaultdict(list)
    for row in (*read_rows("published_layouts.csv"), *read_rows("published_stacks.csv")):
        run = LayoutRun(row)
        by_group[group_of(run)].append(run)
    experts = {name for name in by_group if ", experts" in name}
    layouts = [
        (run, name not in experts and seen(number, run))
        for name, runs in by_group.items()
        for number, run in enumerate(runs)
    ]
    bf16 = [run for run in foundry if run.row["precision"] == "bf16"]
    both = [*((run, run in bf16 and seen_of_foundry(bf16, run)) for run in foundry), *layouts]
    heads = "| seconds per step | median | nine in ten | worst | mean | in the interval | runs |"
    lines = [heads, "|---|---|---|---|---|---|---|"]
    constant: list[float] = []
    for device in dict.fromkeys(run.row["device"] for run in bf16):
        constant += constant_mfu([run for run in bf16 if run.row["device"] == device])
    lines.append(f"| one constant MFU per device, llm-foundry | {described(constant)} |")
    if arguments.fit:
        fit_all(both)
    judged: dict[str, list[tuple[float, float]]] = defaultdict(list)
    all_errors: dict[str, list[tuple[float, str]]] = {"dense": [], "mixtures of experts": []}
    for number, (run, used) in enumerate(both):
        if number % 20 == 0:
            print(f"{number} of {len(both)} runs planned", file=sys.stderr, flush=True)
        planned = run.plan()
        error = planned.seconds / run.seconds - 1
        for name in names_of(run, used):
            judged[name].append((error, planned.factor))
        kind = "mixtures of experts" if run.resolved.recipe.model.n_experts else "dense"
        all_errors[kind].append((error, _described_run(run)))
    for name, found in sorted(judged.items()):
        errors, factors = zip(*found, strict=True)
        lines.append(f"| {name} | {described(errors, factors)} |")
    for kind, found in all_errors.items():
        lines += ["", f"Furthest off, {kind}:", ""]
        lines += [f"- {error:+.0%} {what}" for error, what in sorted(found, key=lambda pair: -abs(pair[0]))[:10]]
    print("\n".join(lines))
    write_result("published-runs", [*head, *lines])


def _described_run(run: LayoutRun) -> str:
    row = run.row
    batch = f"{row['micro_batches']} × {row['micro_batch_size']} × {row['context_length']}"
    sizes = ("data", "shard", "tensor", "pipeline", "context", "expert")
    layout = ", ".join(f"{name} {row[name]}" for name in sizes if row.get(name, "1") != "1")
    return f"{run.stack} {row['model']} on {row['devices']} {row['device']}, {batch} {layout} {row['precision']}"


if __name__ == "__main__":
    main()
