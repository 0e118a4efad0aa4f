"""Six well-known training runs beside what was published: planned from their layouts, and by one constant MFU.

    python benchmarks/famous_six.py

Llama 3 405B and DeepSeek-V3 are rows of published_gpu_hours.csv, a 7B on 8 H100 is one of llm-foundry's runs that
nothing was fitted to, the other three are rows of published_six.csv, which were entered for this table and are fitted
to nowhere. The column "assumed" of the files says what was not published. The constant MFU of a run is the median of
the other five: 6 FLOPs per active parameter and token, over the peak of the datasheet in bf16.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from napkin.accounting.rules import training_flops_rule
from published_gpu_hours import active_parameters, planned_hours
from published_recipes import PublishedRun, foundry_row, read_rows
from result_files import heading, no_options, write_result


@dataclass(frozen=True)
class Compared:
    """A run: device seconds per token as published and as planned, and what a device at its peak would take."""

    name: str
    published: float
    planned: float
    best: float
    shown: str
    factor: float

    @property
    def mfu(self) -> float:
        return self.best / self.published


def compared(name: str, row: Mapping[str, str]) -> Compared:
    """A row of any of the files, planned."""
    run = PublishedRun(row)
    plan = run.plan()
    parameters, active = active_parameters(run)
    best = training_flops_rule(round(active), 1.0) / run.device.peak("bf16")
    if "gpu_hours" in row:
        tokens, hours = float(row["tokens"]), float(row["gpu_hours"])
        planned = planned_hours(run, plan, parameters)
        shown = f"{hours:,.0f} h | {planned:,.0f} h"
        published, planned = 3600 * hours / tokens, 3600 * planned / tokens
    else:
        per_token = run.n_devices / run.resolved.recipe.tokens_per_step
        shown = f"{run.seconds:.3g} s | {plan.seconds:.3g} s"
        published, planned = run.seconds * per_token, plan.seconds * per_token
    return Compared(name, published, planned, best, shown, plan.factor)


def main() -> None:
    no_options(__doc__)
    head = heading("Six well-known training runs beside what was published")
    hours = {row["model"]: row for row in read_rows("published_gpu_hours.csv")}
    foundry = next(
        row
        for row in read_rows("published_runs.csv")
        if (row["model"], row["device"], row["devices"], row["context_length"])
        == ("MPT-7b", "H100-SXM-80GB", "8", "1024")
    )
    rows = {
        "Llama 3 405B, 16,384 H100": hours["llama-3-405b"],
        "DeepSeek-V3, 2,048 H800": hours["deepseek-v3-mtp"],
        "MPT 7B, 8 H100": foundry_row(foundry),
        **{
            f"{row['name']}, {int(row['devices']):,} {row['device'][:4]}": row for row in read_rows("published_six.csv")
        },
    }
    found = [compared(name, row) for name, row in rows.items()]
    lines = ["| run | published | planned | error | within its interval | MFU published | by one constant MFU |"]
    lines.append("|---|---|---|---|---|---|---|")
    print("\n".join(lines), flush=True)
    errors, constant = [], []
    for each in found:
        others = statistics.median(other.mfu for other in found if other is not each)
        errors.append(each.planned / each.published - 1)
        constant.append(each.mfu / others - 1)
        held = "yes" if 1 / each.factor <= each.planned / each.published <= each.factor else "no"
        lines.append(
            f"| {each.name} | {each.shown} | {errors[-1]:+.0%} | {held} | {each.mfu:.0%} | {constant[-1]:+.0%} |"
        )
        print(lines[-1], flush=True)
    lines += ["", "| | median | worst |", "|---|---|---|"]
    for name, values in (("planned", errors), ("one constant MFU", constant)):
        sizes = [abs(value) for value in values]
        lines.append(f"| {name} | {statistics.median(sizes):.0%} | {max(sizes):.0%} |")
    print("\n".join(lines[-5:]))
    write_result("famous-six", [*head, *lines])


if __name__ == "__main__":
    main()
