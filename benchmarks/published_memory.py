"""Peak bytes of published training runs, and whether they fit: planned from their recipes and layouts.

    python benchmarks/published_memory.py        by what each stack keeps; nothing is counted
    python benchmarks/published_memory.py --all  also the runs of llm-foundry, whose step is counted as napkin's own

Three tables. Peak bytes of the runs that state theirs. "Fits" on the devices that the runs had: all rows of
published_layouts.csv and published_stacks.csv ran, of published_memory.csv those that say so, and the others ran out
of memory. "Fits" on other memories: each stated peak against the memories of the catalogue's devices from half of it
to twice, where the stated peak itself is the answer.

What a stack keeps comes from sources that its file names. The stated peaks of Megatron-LM, torchtitan and torchao were
looked at while those files were written (`LOOKED_AT`); of the other stacks none is known but DeepSpeed's, whose rows
were found after its file was written, and no run's "fits" was looked at before its stack's file but those of NeMo,
Megatron-Bridge and Automodel: the formats of their weights and gradients were looked up when plans did not fit.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from napkin.hardware.device_file import catalogue
from napkin.planning.step.site import fits
from napkin.units import format_bytes
from published_recipes import PublishedRun, foundry_row, read_rows
from result_files import heading, write_result

LOOKED_AT = ("Megatron-LM", "torchtitan", "torchao")
"""Stacks whose stated peaks were seen when the file of what they keep was written."""
FIT_LOOKED_AT = ("NeMo", "Megatron-Bridge", "Automodel")
"""Stacks of which a source was looked up because runs of theirs did not fit by their plan."""
TABLES = ("published_layouts.csv", "published_stacks.csv", "published_memory.csv")
GIB = 2**30


def peak_of(run: PublishedRun) -> float:
    """Planned bytes of the rank that needs most."""
    return run.peak_bytes if run.program.memory is not None else run.plan().peak_bytes


def described(errors: Sequence[float]) -> str:
    """Median, nine in ten, worst and mean of relative errors, and their number."""
    sizes = np.abs(errors)
    return (
        f"{np.median(sizes):.1%} | {np.quantile(sizes, 0.9):.1%} | {sizes.max():.0%} | "
        f"{statistics.mean(errors):+.1%} | {len(errors)}"
    )


def right_of(answers: Sequence[bool]) -> str:
    """The part of answers that is right, and their number."""
    return f"{np.mean(answers):.1%} | {sum(answers)} of {len(answers)}"


def name_of(run: PublishedRun) -> str:
    """What a run is, in a line."""
    row = run.row
    sizes = ("data", "shard", "tensor", "pipeline", "context", "expert")
    layout = ", ".join(f"{name} {row[name]}" for name in sizes if row.get(name, "1") != "1")
    return (
        f"{run.stack} {row['model']} on {row['devices']} {row['device']}, {row['micro_batch_size']} × "
        f"{row['context_length']}, {layout}, {row['precision']}, recompute {row['recompute']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="count the steps of llm-foundry's runs too: 20 minutes")
    rows = [row for table in TABLES for row in read_rows(table)]
    every = parser.parse_args().all
    head = heading("Peak bytes of published training runs")
    if every:
        rows += [foundry_row(row) for row in read_rows("published_runs.csv")]
    errors: dict[str, list[float]] = defaultdict(list)
    on_its_own: dict[str, list[bool]] = defaultdict(list)
    on_others: dict[str, list[bool]] = defaultdict(list)
    wrong: list[str] = []
    memories = sorted({device.usable_bytes for device in catalogue()})
    for row in rows:
        run = PublishedRun(row)
        peak, memory, ran = peak_of(run), run.device.usable_bytes, row.get("ran", "yes") == "yes"
        split = ", looked at" if run.stack in FIT_LOOKED_AT else ""
        if not ran:
            split += ", ran out of memory"
        for name in (f"{run.stack}{split}", "all"):
            on_its_own[name].append(fits(peak, memory) == ran)
        if fits(peak, memory) != ran:
            wrong.append(f"- {format_bytes(peak)} planned of {format_bytes(memory)}: {name_of(run)}")
        if row.get("peak_gib"):
            stated = GIB * float(row["peak_gib"])
            name = f"{run.stack}, looked at" if run.stack in LOOKED_AT else run.stack
            errors[name].append(peak / stated - 1)
            near = [each for each in memories if stated / 2 <= each <= 2 * stated]
            for group in (name, "all"):
                on_others[group] += [fits(peak, each) == fits(stated, each) for each in near]
    lines = ["| peak bytes of a rank | median | nine in ten | worst | mean | runs |", "|---|---|---|---|---|---|"]
    lines += [f"| {name} | {described(found)} |" for name, found in sorted(errors.items())]
    lines += ["", "| fits, on the devices of the run | right | runs |", "|---|---|---|"]
    lines += [f"| {name} | {right_of(found)} |" for name, found in sorted(on_its_own.items())]
    lines += ["", "| fits, on other memories | right | answers |", "|---|---|---|"]
    lines += [f"| {name} | {right_of(found)} |" for name, found in sorted(on_others.items())]
    lines += ["", "Said not to fit, or to fit, wrongly:", "", *dict.fromkeys(wrong)]
    print("\n".join(lines))
    write_result("published-memory", [*head, *lines])


if __name__ == "__main__":
    main()
