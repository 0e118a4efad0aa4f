"""The shared part of `napkin train`, `resume` and `tune`: a run is trained, reconciled and reported, with a line after
each step and a summary at the end.
"""

import contextlib
import math
import shlex
from pathlib import Path

from napkin.accounting.pricing import loop_overhead
from napkin.accounting.rank_seconds import rank_lines
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, output_may_be_lost, print_json, print_rich, say
from napkin.cli.plan.output import print_plan
from napkin.data.mixing import TokenMixture
from napkin.errors import NapkinError
from napkin.files import read_bytes
from napkin.json_files import read_json
from napkin.planning.step.plan_file import describe_checkpoints
from napkin.report.headline import reconcile_table
from napkin.report.page import REPORT_FILE, live_report, write_report
from napkin.runs.accounting_files import MEASUREMENT_FILE, MeasurementFile, PlanFile
from napkin.runs.metrics import METRICS_FILE, StepMetrics, read_metrics_record
from napkin.runs.run_folder import RunFolder
from napkin.training.method import Method
from napkin.training.pretraining import Pretraining
from napkin.training.run import Outcome, train_run
from napkin.training.signals import catch_interruption
from napkin.units import format_bytes, format_count, format_seconds, format_three_digits


def train_and_report(method: Method, run: RunFolder, *, as_json: bool) -> int:
    """Train a run of any kind with its lines on the terminal, write the report, and return the exit status."""
    if not method.ranks.is_rank_zero:
        # Only rank 0 prints.
        followed = train_run(method, run)
        return 0 if followed.interrupted_by is None else 128 + followed.interrupted_by
    steps = method.recipe.training.steps
    if isinstance(method, Pretraining):
        tokens_per_step, train_tokens = method.recipe.tokens_per_step, method.train_tokens
        lines = PretrainingLines(run.path, steps=steps, tokens_per_step=tokens_per_step, train_tokens=train_tokens)
    else:
        lines = TrainingLines(run.path, steps=steps)
    if not as_json and (plan := method.plan) is not None:
        print_plan(plan)
        if method.recipe.training.parallelism == "fsdp" and method.ranks.world_size == 1:
            say("fsdp has nothing to shard in one process: `torchrun --nproc-per-node N -m napkin ...` starts several")
        say(describe_checkpoints(plan))
    before = _files_of_the_end(run)
    with progress_line(f"training {run.path}") as line:
        with live_report(run.path, notify) as live:

            def on_step(metrics: StepMetrics) -> None:
                line(metrics.step, steps, lines.of_step(metrics))
                live()

            outcome = train_run(method, run, on_step=on_step, on_message=notify)
        line.retitle("writing the report")
        damaged: NapkinError | None = None
        # A signal comes too late to stop anything: the books are closed first.
        with catch_interruption():
            try:
                write_report(run.path, training=False)
            except NapkinError as error:
                # A file that was damaged while the run trained does not hide what the run has done.
                damaged = error
    written = [name for name, content in _files_of_the_end(run).items() if content != before[name]]
    # If it was interrupted, the terminal may be what was lost.
    with contextlib.nullcontext() if outcome.interrupted_by is None else output_may_be_lost():
        if as_json:
            stopped_by = None if outcome.interrupted_by is None else outcome.interrupted_by.name
            state = {"run": run.path, "step": outcome.step, "stopped_by": stopped_by, **lines.as_json(outcome.step)}
            print_json({**state, "checkpoint": outcome.checkpoint, "table": outcome.table})
        else:
            _print_outcome(run, outcome, lines, written)
    if damaged is not None:
        notify(f"the run is trained and saved, but its report is not written: {damaged}")
    if outcome.interrupted_by is None:
        return 0 if damaged is None else 2
    resume = f"napkin resume {shlex.quote(str(run.path))}"
    notify(f"{outcome.interrupted_by.name}: checkpoint saved; continue with: {resume}")
    return 128 + outcome.interrupted_by


def _files_of_the_end(run: RunFolder) -> dict[str, bytes | None]:
    """The files that the end of a run writes, by name; None where there is none yet."""
    paths = [run.path / MEASUREMENT_FILE, run.path / REPORT_FILE]
    return {path.name: read_bytes(path) if path.exists() else None for path in paths}


def _print_outcome(run: RunFolder, outcome: Outcome, lines: "TrainingLines", written: list[str]) -> None:
    measurement, trained = outcome.measurement, lines.trained(outcome.step)
    if outcome.step == outcome.first_step:
        done = "nothing was done" if outcome.interrupted_by is None else "no step was completed"
        if written and outcome.interrupted_by is None:
            done = f"nothing was left to train; its books, which were not closed, are now: {' and '.join(written)}"
        say(f"{run.path} is at step {outcome.step:,} of {lines.steps:,}: {done}")
    elif measurement is None:
        say(f"trained {trained}, too few to be metered; checkpoint: {outcome.checkpoint}")
    else:
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
    if outcome.step != outcome.first_step and (validation := lines.validation()) is not None:
        say(validation)
    if outcome.interrupted_by is None:
        say(f"report: {run.path / REPORT_FILE}")


class TrainingLines:
    """The lines of a run of any kind; `of_step` is called after each step."""

    FIGURES = ("reward", "accuracy", "held-out reward", "held-out accuracy")
    """Metrics that a method of tuning is judged by; the live line shows them."""

    def __init__(self, run: Path, *, steps: int) -> None:
        self.steps = steps
        self._last: StepMetrics | None = None
        # A resumed run was evaluated before.
        self._evaluated = {
            logged.step: logged.validation_loss
            for logged in read_metrics_record(run / METRICS_FILE).metrics
            if logged.validation_loss is not None
        }

    def of_step(self, metrics: StepMetrics) -> str:
        """The live line; what matters most comes first, because a narrow terminal cuts off the rest."""
        if self._last is None:
            # The file may hold evaluations of steps that are repeated.
            self._evaluated = {step: loss for step, loss in self._evaluated.items() if step < metrics.step}
        self._last = metrics
        if metrics.validation_loss is not None:
            self._evaluated[metrics.step] = metrics.validation_loss
        mark = f" (spike, {metrics.spike:.0f}σ)" if metrics.spike is not None else ""
        parts = [f"step {metrics.step}/{self.steps}", f"loss {metrics.loss:.3f}{mark}"]
        if self._evaluated:
            last = max(self._evaluated)
            parts.append(f"val {self._evaluated[last]:.3f}@{last}")
        figures = metrics.figures or {}
        parts += [f"{name} {figures[name]:.3f}" for name in self.FIGURES if figures.get(name) is not None]
        if (epochs := self._epochs(metrics)) is not None:
            parts.append(f"{format_three_digits(epochs)} epochs")
        parts.append(f"{format_count(metrics.tokens_per_second)} tok/s")
        if not math.isnan(metrics.mfu):
            parts.append(f"MFU {metrics.mfu:.0%}")
        return "  ".join([*parts, format_bytes(metrics.bytes)])

    def _epochs(self, metrics: StepMetrics) -> float | None:
        return metrics.epochs

    def trained(self, step: int) -> str:
        """Steps, tokens and epochs up to `step`, the last one of this process."""
        if self._last is None:
            return f"{step:,} steps"
        epochs = "" if self._last.epochs is None else f", {format_three_digits(self._last.epochs)} epochs"
        return f"{step:,} steps, {format_count(self._last.tokens)} tokens{epochs}"

    def validation(self) -> str | None:
        """The last validation loss and the lowest one; None where there was no evaluation."""
        if not self._evaluated:
            return None
        last, best = max(self._evaluated), min(self._evaluated, key=lambda step: (self._evaluated[step], step))
        line = f"validation loss {self._evaluated[last]:.4f} at step {last:,}"
        if best == last:
            return f"{line}, the lowest" if len(self._evaluated) > 1 else line
        return f"{line}; the lowest was {self._evaluated[best]:.4f} at step {best:,}"

    def as_json(self, step: int) -> dict[str, float | None]:
        """Epochs and validation losses for programs."""
        return {
            "epochs": None if self._last is None else self._last.epochs,
            "validation_loss": self._evaluated[max(self._evaluated)] if self._evaluated else None,
            "lowest_validation_loss": min(self._evaluated.values(), default=None),
        }


class PretrainingLines(TrainingLines):
    """The lines of pre-training, whose tokens follow from the number of steps."""

    def __init__(self, run: Path, *, steps: int, tokens_per_step: int, train_tokens: TokenMixture) -> None:
        super().__init__(run, steps=steps)
        self._tokens_per_step, self._train_tokens = tokens_per_step, train_tokens

    def _epochs(self, metrics: StepMetrics) -> float | None:
        return self._train_tokens.epochs(metrics.tokens)

    def trained(self, step: int) -> str:
        """Steps, tokens and epochs up to `step`."""
        tokens, text = step * self._tokens_per_step, format_count(self._train_tokens.n_tokens)
        epochs = format_three_digits(self._train_tokens.epochs(tokens))
        return f"{step:,} steps, {format_count(tokens)} tokens, {epochs} epochs of {text} tokens"

    def as_json(self, step: int) -> dict[str, float | None]:
        """Also where this process has made no step."""
        return {**super().as_json(step), "epochs": self._train_tokens.epochs(step * self._tokens_per_step)}
