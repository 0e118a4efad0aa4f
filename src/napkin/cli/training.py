"""What `napkin train` and `napkin resume` share: a run is prepared, trained, reconciled and reported."""

import msgspec

from napkin.accounting.reconcile import Measurement, reconcile
from napkin.cli.planning import describe_plan, plan_as_json
from napkin.cli.terminal import err, out, print_json, progress_line
from napkin.report.page import write_report
from napkin.report.table import reconcile_table
from napkin.training.loop import Outcome, train
from napkin.training.preparation import Preparation, Progress, prepare, refuse_what_does_not_fit
from napkin.training.recipe import Recipe
from napkin.training.run_folder import RunFolder, StepMetrics
from napkin.units import format_bytes, format_count, format_seconds


def new_run(recipe: Recipe, folder: str, progress: Progress) -> tuple[Preparation, RunFolder]:
    """Check and plan a recipe, then make its run folder."""
    RunFolder.refuse_existing(folder)
    preparation = prepare(recipe, progress=progress)
    _refuse(preparation)
    return preparation, RunFolder.create(folder, preparation.recipe, preparation.tokenizer)


def old_run(folder: str, progress: Progress) -> tuple[Preparation, RunFolder]:
    """Open a run folder and plan what it holds."""
    run = RunFolder.open(folder)
    preparation = prepare(run.recipe, tokenizer=run.tokenizer, progress=progress)
    _refuse(preparation)
    return preparation, run


def start(preparation: Preparation, run: RunFolder, *, as_json: bool) -> int:
    """Train, and leave the books behind; returns the exit status."""
    plan, precision = preparation.plan, preparation.precision
    run.write_json("plan.json", plan_as_json(plan, precision))
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
        table = _keep_books(run, preparation, outcome.measurement)
        report = write_report(run.path)
    if as_json:
        print_json({"run": str(run.path), "step": outcome.step, "checkpoint": str(outcome.checkpoint), "table": table})
    else:
        _describe(run, outcome, preparation)
        if outcome.interrupted_by is None:
            out.print(f"report: {report}", soft_wrap=True)
    if outcome.interrupted_by is not None:
        err.print(f"{outcome.interrupted_by.name}: checkpoint saved; continue with: napkin resume {run.path}")
        return 128 + outcome.interrupted_by
    return 0


def _refuse(preparation: Preparation) -> None:
    refuse_what_does_not_fit(preparation.recipe, preparation.precision, preparation.plan)


def _live(metrics: StepMetrics, steps: int) -> str:
    return (
        f"step {metrics.step}/{steps}  loss {metrics.loss:.3f}  {format_count(metrics.tokens_per_second)} tokens/s  "
        f"MFU {metrics.mfu:.0%}  {format_bytes(metrics.bytes)}"
    )


def _keep_books(run: RunFolder, preparation: Preparation, measurement: Measurement | None) -> list[dict]:
    if measurement is None:
        return []
    table = msgspec.to_builtins(reconcile(preparation.plan, measurement))
    run.write_json(
        "measurement.json",
        {
            "table": table,
            "seconds": measurement.seconds_by_part,
            "mfu": measurement.mfu,
            "hfu": measurement.hfu,
            "steps": measurement.steps,
        },
    )
    return table


def _describe(run: RunFolder, outcome: Outcome, preparation: Preparation) -> None:
    measurement = outcome.measurement
    if measurement is None:
        out.print(f"{run.path} is complete: {outcome.step:,} steps, nothing left to do", soft_wrap=True)
        return
    out.print(reconcile_table(reconcile(preparation.plan, measurement)))
    seconds = sum(measurement.seconds_by_part.values())
    parts = sorted(measurement.seconds_by_part.items(), key=lambda item: -item[1])
    out.print("where the time went: " + ", ".join(f"{part} {spent / seconds:.1%}" for part, spent in parts))
    out.print(
        f"trained {outcome.step:,} steps, {format_count(outcome.step * preparation.recipe.tokens_per_step)} tokens, "
        f"in {format_seconds(measurement.seconds)}; checkpoint: {outcome.checkpoint}",
        soft_wrap=True,
    )
