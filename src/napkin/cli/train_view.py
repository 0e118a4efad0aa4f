"""What `napkin train` and `napkin resume` share: a run is trained, reconciled and reported."""

import shlex

from napkin.accounting.overhead import loop_overhead
from napkin.cli.plan_view import describe_plan
from napkin.cli.terminal import err, out, print_json, progress_line, say
from napkin.planning.checkpoint_plan import describe_checkpoints
from napkin.report.live_report import live_report
from napkin.report.page import write_report
from napkin.report.table import reconcile_table
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import RunFolder
from napkin.training.prepare import Preparation
from napkin.training.run import Outcome, train_run
from napkin.units import format_bytes, format_count, format_seconds


def start(preparation: Preparation, run: RunFolder, *, as_json: bool) -> int:
    """Train, and leave the books behind; returns the exit status."""
    if not preparation.ranks.is_rank_zero:
        # The first rank speaks for all.
        followed = train_run(preparation, run)
        return 0 if followed.interrupted_by is None else 128 + followed.interrupted_by
    plan = preparation.plan
    assert plan is not None
    if not as_json:
        describe_plan(plan)
        if preparation.recipe.training.parallelism == "fsdp" and preparation.ranks.world_size == 1:
            say("fsdp has nothing to spread in one process: `torchrun --nproc-per-node N -m napkin ...` starts several")
        say(describe_checkpoints(plan))

    def say_aside(message: str) -> None:
        err.print(message, soft_wrap=True)

    with progress_line(f"training {run.path}") as line:
        steps = preparation.recipe.training.steps
        with live_report(run.path, say_aside) as live:

            def on_step(metrics: StepMetrics) -> None:
                line(metrics.step, steps, _live(metrics, steps))
                live()

            outcome = train_run(preparation, run, on_step=on_step, on_message=say_aside)
        line.retitle("writing the report")
        report = write_report(run.path, training=False)
    if as_json:
        stopped_by = None if outcome.interrupted_by is None else outcome.interrupted_by.name
        print_json(
            {
                "run": run.path,
                "step": outcome.step,
                "stopped_by": stopped_by,
                "checkpoint": outcome.checkpoint,
                "table": outcome.table,
            }
        )
    else:
        _describe(run, outcome, preparation)
        if outcome.interrupted_by is None:
            say(f"report: {report}")
    if outcome.interrupted_by is not None:
        resume = f"napkin resume {shlex.quote(str(run.path))}"
        err.print(f"{outcome.interrupted_by.name}: checkpoint saved; continue with: {resume}", soft_wrap=True)
        return 128 + outcome.interrupted_by
    return 0


def _live(metrics: StepMetrics, steps: int) -> str:
    mark = f" (spike, {metrics.spike:.0f}σ)" if metrics.spike is not None else ""
    return (
        f"step {metrics.step}/{steps}  loss {metrics.loss:.3f}{mark}  {format_count(metrics.tokens_per_second)} tok/s  "
        f"MFU {metrics.mfu:.0%}  {format_bytes(metrics.bytes)}"
    )


def _describe(run: RunFolder, outcome: Outcome, preparation: Preparation) -> None:
    if outcome.step == outcome.first_step:
        say(f"{run.path} stands at step {outcome.step:,} of {preparation.recipe.training.steps:,}: nothing was done")
        return
    taken = f"{outcome.step:,} steps, {format_count(outcome.step * preparation.recipe.tokens_per_step)} tokens"
    measurement = outcome.measurement
    if measurement is None:
        say(f"trained {taken}, too few to be metered; checkpoint: {outcome.checkpoint}")
        return
    out.print(reconcile_table(outcome.table))
    seconds = sum(measurement.seconds_by_part.values())
    parts = sorted(measurement.seconds_by_part.items(), key=lambda item: -item[1])
    went = ", ".join(f"{part} {spent / seconds:.1%}" for part, spent in parts)
    added = loop_overhead(measurement.seconds_by_part)
    say(f"where the time went: {went}" + (f"; the loop adds {added[1]:.1%} to its steps" if added else ""))
    say(f"trained {taken}, in {format_seconds(measurement.seconds)}; checkpoint: {outcome.checkpoint}")
