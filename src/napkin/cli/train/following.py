"""What `napkin train` and `napkin resume` share: a run is trained, reconciled and reported."""

import contextlib
import shlex

from napkin.accounting.pricing import loop_overhead
from napkin.accounting.rank_seconds import rank_lines
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, output_may_be_lost, print_json, print_rich, say
from napkin.cli.plan.output import print_plan
from napkin.cli.train.training_lines import PretrainingLines, TrainingLines
from napkin.errors import NapkinError
from napkin.files import read_bytes
from napkin.json_files import read_json
from napkin.planning.step.failure_plan import describe_checkpoints
from napkin.report.bars import reconcile_table
from napkin.report.live_report import live_report
from napkin.report.page import REPORT_FILE, write_report
from napkin.runs.accounting_files import MEASUREMENT_FILE, MeasurementFile, PlanFile
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import RunFolder
from napkin.training.method import Method
from napkin.training.pretraining import Pretraining
from napkin.training.run import Outcome, train_run
from napkin.training.signals import catch_interruption
from napkin.units import format_seconds


def train_and_report(method: Method, run: RunFolder, *, as_json: bool) -> int:
    """Train a run of pre-training, write the report, and return the exit status."""
    assert isinstance(method, Pretraining)
    lines = PretrainingLines(
        run.path,
        steps=method.recipe.training.steps,
        tokens_per_step=method.recipe.tokens_per_step,
        train_tokens=method.train_tokens,
    )
    return follow_training(method, run, lines, as_json=as_json)


def follow_training(method: Method, run: RunFolder, lines: TrainingLines, *, as_json: bool) -> int:
    """Train a run of any kind with its lines on the terminal, write the report, and return the exit status."""
    if not method.ranks.is_rank_zero:
        # Only rank 0 prints.
        followed = train_run(method, run)
        return 0 if followed.interrupted_by is None else 128 + followed.interrupted_by
    if not as_json:
        _print_preparation(method)
    before, steps = _books(run), method.recipe.training.steps
    with progress_line(f"training {run.path}") as line:
        with live_report(run.path, notify) as live:

            def on_step(metrics: StepMetrics) -> None:
                line(metrics.step, steps, lines.of_step(metrics))
                live()

            outcome = train_run(method, run, on_step=on_step, on_message=notify)
        line.retitle("writing the report")
        # A signal comes too late to stop anything: the books are closed first.
        with catch_interruption():
            damaged = _write_report(run)
    written = [name for name, content in _books(run).items() if content != before[name]]
    # If it was interrupted, the terminal may be what was lost.
    with contextlib.nullcontext() if outcome.interrupted_by is None else output_may_be_lost():
        _print_outcome(run, outcome, lines, written, as_json=as_json)
    if damaged is not None:
        notify(f"the run is trained and saved, but its report is not written: {damaged}")
    if outcome.interrupted_by is None:
        return 0 if damaged is None else 2
    resume = f"napkin resume {shlex.quote(str(run.path))}"
    notify(f"{outcome.interrupted_by.name}: checkpoint saved; continue with: {resume}")
    return 128 + outcome.interrupted_by


def _books(run: RunFolder) -> dict[str, bytes | None]:
    """The files that the end of a run writes, by name; None where there is none yet."""
    paths = [run.path / MEASUREMENT_FILE, run.path / REPORT_FILE]
    return {path.name: read_bytes(path) if path.exists() else None for path in paths}


def _write_report(run: RunFolder) -> NapkinError | None:
    """Write the report. A file that was damaged while the run trained does not hide what the run has done."""
    try:
        write_report(run.path, training=False)
    except NapkinError as error:
        return error
    return None


def _print_preparation(method: Method) -> None:
    plan = method.plan
    if plan is None:
        return
    print_plan(plan)
    if method.recipe.training.parallelism == "fsdp" and method.ranks.world_size == 1:
        say("fsdp has nothing to shard in one process: `torchrun --nproc-per-node N -m napkin ...` starts several")
    say(describe_checkpoints(plan))


def _print_outcome(
    run: RunFolder, outcome: Outcome, lines: TrainingLines, written: list[str], *, as_json: bool
) -> None:
    if as_json:
        stopped_by = None if outcome.interrupted_by is None else outcome.interrupted_by.name
        state = {"run": run.path, "step": outcome.step, "stopped_by": stopped_by, **lines.as_json(outcome.step)}
        print_json({**state, "checkpoint": outcome.checkpoint, "table": outcome.table})
        return
    if outcome.step == outcome.first_step:
        done = "nothing was done" if outcome.interrupted_by is None else "no step was completed"
        if written and outcome.interrupted_by is None:
            done = f"nothing was left to train; its books, which were not closed, are now: {' and '.join(written)}"
        say(f"{run.path} is at step {outcome.step:,} of {lines.steps:,}: {done}")
    else:
        _print_trained(run, outcome, lines)
    if outcome.interrupted_by is None:
        say(f"report: {run.path / REPORT_FILE}")


def _print_trained(run: RunFolder, outcome: Outcome, lines: TrainingLines) -> None:
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
    measured = read_json(run.path / MEASUREMENT_FILE, MeasurementFile)
    if measured is not None and measured.ranks:
        plan = read_json(run.path / "plan.json", PlanFile)
        planned = plan.pipeline_peak_bytes if plan else ()
        for line in rank_lines(measured.ranks, measured.straggler, pipeline_peak_bytes=planned):
            say(line)
    say(f"trained {trained}, in {format_seconds(measurement.seconds)}; checkpoint: {outcome.checkpoint}")
    _print_validation(lines)


def _print_validation(lines: TrainingLines) -> None:
    if (found := lines.validation()) is not None:
        say(found)
