"""Device hours of published models, planned from their sizes, without being told an MFU.

    python benchmarks/published_gpu_hours.py     one line per model, then the errors beside those of the rule

The rule is 6·N·T FLOPs at an MFU of 0.5. "elapsed" hours include what the run lost to failures: the plan's are then
divided by the goodput that `napkin.accounting.failures` expects with checkpoints at the best interval. Where a layout
or a number of devices is not published, the column "assumed" of published_gpu_hours.csv says what was taken; a layout
that does not fit, as where ranks keep the optimizer's state whole in place of a part, is said beside its peak.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from napkin.accounting.failures import failure_model
from napkin.accounting.rules import training_flops_rule
from napkin.planning.layouts.layout_plan import LayoutPlan
from napkin.units import format_bytes
from published_recipes import PublishedRun, read_rows
from result_files import heading, no_options, write_result

ASKED_FOR = ("llama", "bloom", "deepseek")
"""Beginnings of the names of models that the target speaks of."""
RULE_MFU = 0.5
STATE_BYTES = 14
"""Of a checkpoint, per parameter: weights in bf16, and three numbers of fp32."""


def planned_hours(run: PublishedRun, plan: LayoutPlan, parameters: float) -> float:
    """Hours of all devices together."""
    row = run.row
    steps = float(row["tokens"]) / run.resolved.recipe.tokens_per_step
    useful = steps * plan.seconds
    if row["elapsed"] == "yes":
        useful /= goodput(run, parameters)
    return useful * run.n_devices / 3600


def goodput(run: PublishedRun, parameters: float) -> float:
    """The part of the elapsed time that is useful, with checkpoints at the best interval."""
    written = STATE_BYTES * parameters
    model = failure_model(
        n_devices=run.n_devices,
        copied_bytes=written / run.n_devices,
        written_bytes=written,
        writing_nodes=max(1, run.n_devices // 8),
        host_bandwidth=run.device.host_bandwidth,
    )
    return model.goodput(model.best_interval)


def active_parameters(run: PublishedRun) -> tuple[float, float]:
    """All parameters, and those that a token passes through."""
    costs, model = run.costs, run.resolved.recipe.model
    each = costs.parameters(1)
    shared, experts = each.of_blocks(costs.blocks)
    shared += each.embedding + each.head
    used = experts * model.experts_per_token / model.n_experts if model.n_experts else 0.0
    return shared + experts, shared + used


def described(errors: Sequence[float]) -> str:
    """Median, worst and mean of relative errors."""
    sizes = np.abs(errors)
    return f"{np.median(sizes):.0%} | {sizes.max():.0%} | {statistics.mean(errors):+.0%} | {len(errors)}"


def main() -> None:
    no_options(__doc__)
    head = heading("Device hours of published models")
    lines = [
        "| model | devices | published hours | planned | error | MFU planned | peak | rule at 0.5 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    errors: dict[str, list[float]] = {"asked": [], "others": [], "rule asked": [], "rule others": []}
    for row in read_rows("published_gpu_hours.csv"):
        run = PublishedRun(row)
        plan = run.plan()
        parameters, active = active_parameters(run)
        published = float(row["gpu_hours"])
        hours = planned_hours(run, plan, parameters)
        flops = training_flops_rule(round(active), float(row["tokens"]))
        rule = flops / (RULE_MFU * run.device.peak("bf16")) / 3600
        kind = "asked" if row["model"].startswith(ASKED_FOR) else "others"
        too_much = "" if plan.fits else f" of {format_bytes(plan.site.memory_bytes)}: does not fit"
        errors[kind].append(hours / published - 1)
        errors[f"rule {kind}"].append(rule / published - 1)
        lines.append(
            f"| {row['model']} | {run.n_devices} {row['device']} | {published:,.0f} | {hours:,.0f} | "
            f"{hours / published - 1:+.0%} | {plan.mfu:.0%} | {format_bytes(plan.peak_bytes)}{too_much} | "
            f"{rule / published - 1:+.0%} |"
        )
        print(lines[-1], flush=True)
    lines += ["", "| device hours | median | worst | mean | models |", "|---|---|---|---|---|"]
    lines.append(f"| napkin, models asked for | {described(errors['asked'])} |")
    lines.append(f"| rule at MFU 0.5 | {described(errors['rule asked'])} |")
    lines.append(f"| napkin, other models | {described(errors['others'])} |")
    lines.append(f"| rule at MFU 0.5 | {described(errors['rule others'])} |")
    print("\n".join(lines[-7:]))
    write_result("published-gpu-hours", [*head, *lines])


if __name__ == "__main__":
    main()
