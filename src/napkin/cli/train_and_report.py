"""What `napkin train` and `napkin resume` share: a run is trained, reconciled and reported."""

import shlex

from napkin.accounting.overhead import loop_overhead
from napkin.cli.plan_output import print_plan
from napkin.cli.progress import progress_line
from napkin.cli.terminal import notify, print_json, print_rich, say
from napkin.cli.training_lines import TrainingLines
from napkin.planning.checkpoint_plan import describe_checkpoints
from napkin.report.live_report import live_report
from napkin.report.page import write_report
from napkin.report.table import reconcile_table
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import RunFolder
from napkin.training.preparation import Preparation
from napkin.training.run import Outcome, train_run
from napkin.units import format_seconds


def train_and_report(preparation: Preparation, run: RunFolder, *, as_json: bool) -> int:
    """Train, write the report, and return the exit status."""
    if not preparation.ranks.is_rank_zero:
        # Only rank 0 prints.
        followed = train_run(preparation, run)
        return 0 if followed.interrupted_by is None else 128 + followed.interrupted_by
    if not as_json:
        _print_preparation(preparation)
    recipe, steps = preparation.recipe, preparation.recipe.training.steps
    train_tokens = preparation.train_tokens.n_tokens
    lines = TrainingLines(run.path, steps=steps, tokens_per_step=recipe.tokens_per_step, train_tokens=train_tokens)
    with progress_line(f"training {run.path}") as line:
        with live_report(run.path, notify) as live:

            def on_step(metrics: StepMetrics) -> None:
                line(metrics.step, steps, lines.of_step(metrics))
                live()

            outcome = train_run(preparation, run, on_step=on_step, on_message=notify)
        line.retitle("writing the report")
        report = write_report(run.path, training=False)
    if as_json:
        stopped_by = None if outcome.interrupted_by is None else outcome.interrupted_by.name
        state = {"run": run.path, "step": outcome.step, "stopped_by": stopped_by, **lines.as_json(outcome.step)}
        print_json({**state, "checkpoint": outcome.checkpoint, "table": outcome.table})
    else:
        _print_outcome(run, outcome, preparation, lines)
        if outcome.interrupted_by is None:
            say(f"report: {report}")
    if outcome.interrupted_by is not None:
        resume = f"napkin resume {shlex.quote(str(run.path))}"
        notify(f"{outcome.interrupted_by.name}: checkpoint saved; continue with: {resume}")
        return 128 + outcome.interrupted_by
    return 0


def _print_preparation(preparation: Preparation) -> None:
    plan = preparation.plan
    assert plan is not None
    print_plan(plan)
    if preparation.recipe.training.parallelism == "fsdp" and preparation.ranks.world_size == 1:
        say("fsdp has nothing to shard in one process: `torchrun --nproc-per-node N -m napkin ...` starts several")
    say(describe_checkpoints(plan))


def _print_outcome(run: RunFolder, outcome: Outcome, preparation: Preparation, lines: TrainingLines) -> None:
    if outcome.step == outcome.first_step:
        say(f"{run.path} is at step {outcome.step:,} of {preparation.recipe.training.steps:,}: nothing was done")
        return
    trained, measurement = lines.trained(outcome.step), outcome.measurement
    if measurement is None:
        say(f"trained {trained}, too few to be metered; checkpoint: {outcome.checkpoint}")
        _print_validation(lines)
        return
    print_rich(reconcile_table(outcome.table))
    seconds = sum(measurement.seconds_by_part.values())
    parts = sorted(measurement.seconds_by_part.items(), key=lambda item: -item[1])
    spent = ", ".join(f"{part} {each / seconds:.1%}" for part, each in parts)
    overhead = loop_overhead(measurement.seconds_by_part)
    of_the_loop = f"; overhead of the training loop: {overhead[1]:.1%} of the steps" if overhead else ""
    say(f"where the time went: {spent}{of_the_loop}")
    say(f"trained {trained}, in {format_seconds(measurement.seconds)}; checkpoint: {outcome.checkpoint}")
    _print_validation(lines)


def _print_validation(lines: TrainingLines) -> None:
    if (found := lines.validation()) is not None:
        say(found)
