"""What `napkin train` and `napkin resume` share: a run is trained, reconciled and reported."""

from napkin.cli.planning import describe_plan
from napkin.cli.terminal import err, out, print_json, progress_line
from napkin.report.page import write_report
from napkin.report.table import reconcile_table
from napkin.training.loop import Outcome, train
from napkin.training.preparation import Preparation
from napkin.training.run_folder import RunFolder, StepMetrics
from napkin.units import format_bytes, format_count, format_seconds


def start(preparation: Preparation, run: RunFolder, *, as_json: bool) -> int:
    """Train, and leave the books behind; returns the exit status."""
    plan, precision = preparation.plan, preparation.precision
    if not as_json:
        describe_plan(plan, precision)
    with progress_line(f"training {run.path}") as line:
        steps = preparation.recipe.training.steps
        outcome = train(
            preparation,
            run,
            on_step=lambda metrics: line(metrics.step, steps, _live(metrics, steps)),
            on_message=lambda message: err.print(message, soft_wrap=True),
        )
        line.retitle("writing the report")
        report = write_report(run.path)
    if as_json:
        print_json({"run": run.path, "step": outcome.step, "checkpoint": outcome.checkpoint, "table": outcome.table})
    else:
        _describe(run, outcome, preparation)
        if outcome.interrupted_by is None:
            out.print(f"report: {report}", soft_wrap=True)
    if outcome.interrupted_by is not None:
        err.print(f"{outcome.interrupted_by.name}: checkpoint saved; continue with: napkin resume {run.path}")
        return 128 + outcome.interrupted_by
    return 0


def _live(metrics: StepMetrics, steps: int) -> str:
    return (
        f"step {metrics.step}/{steps}  loss {metrics.loss:.3f}  {format_count(metrics.tokens_per_second)} tokens/s  "
        f"MFU {metrics.mfu:.0%}  {format_bytes(metrics.bytes)}"
    )


def _describe(run: RunFolder, outcome: Outcome, preparation: Preparation) -> None:
    measurement = outcome.measurement
    if measurement is None:
        out.print(f"{run.path} is complete: {outcome.step:,} steps, nothing left to do", soft_wrap=True)
        return
    out.print(reconcile_table(outcome.table))
    seconds = sum(measurement.seconds_by_part.values())
    parts = sorted(measurement.seconds_by_part.items(), key=lambda item: -item[1])
    out.print("where the time went: " + ", ".join(f"{part} {spent / seconds:.1%}" for part, spent in parts))
    out.print(
        f"trained {outcome.step:,} steps, {format_count(outcome.step * preparation.recipe.tokens_per_step)} tokens, "
        f"in {format_seconds(measurement.seconds)}; checkpoint: {outcome.checkpoint}",
        soft_wrap=True,
    )
