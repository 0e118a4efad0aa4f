"""The top of the page: the state of the run, warnings, and its key figures."""

import math
from typing import NamedTuple

from napkin.report.comparison import recipe_values
from napkin.report.overfitting import Evaluated, evaluations, lowest, overfitting
from napkin.runs.run_record import RunRecord
from napkin.units import format_bytes, format_seconds, format_share, format_three_digits

CORRECT = "held-out correct"
"""The figure of an evaluation in reinforcement learning: the share of answers with the whole reward."""


class KeyFigure(NamedTuple):
    """A key figure, with its name and a detail to compare it with."""

    label: str
    value: str
    detail: str = ""


def status_of(run: RunRecord, *, training: bool | None = None) -> str:
    """A sentence on the state of the run; `training` is whether a process is training it, None if that is not known."""
    plan = run.plan
    device = f" on {plan.device.name}" if plan else ""
    if not run.metrics:
        if not plan:
            return "Nothing is planned or logged yet."
        return f"{plan.steps:,} steps of {plan.tokens_per_step:,} tokens planned{device}; none is logged yet."
    last = run.metrics[-1]
    read = "" if last.epochs is None else f", {format_three_digits(last.epochs)} epochs"
    if plan and training:
        return f"Training, step {last.step:,} of {plan.steps:,}{read}{device}."
    if plan and last.step < plan.steps and training is False:
        return f"Stopped at step {last.step:,} of {plan.steps:,}{read}{device}: no process is training it."
    if plan and last.step < plan.steps:
        return f"At step {last.step:,} of {plan.steps:,}{read}{device}: still in training, or interrupted."
    return f"{last.step:,} steps over {last.tokens:,} tokens{read}{device}."


def warnings_of(run: RunRecord, *, training: bool | None = None) -> list[str]:
    """A sentence per problem: damaged metrics, a loss that is not finite, overfitting, FLOPs that are not counted, a
    plan that does not fit."""
    warnings, plan = [*run.problems], run.plan
    # While a process writes it, the last line may be incomplete for a moment.
    if run.incomplete is not None and not training:
        warnings.append(f"{run.incomplete}.")
    if run.recipe_was_changed:
        warnings.append("The recipe below was changed after the run had been created.")
    lost = [logged.step for logged in run.metrics if math.isnan(logged.loss)]
    if lost:
        steps = f"{len(lost):,} of {len(run.metrics):,} logged steps"
        warnings.append(f"The loss was not finite at {steps}, first at step {lost[0]:,}.")
    if found := overfitting(run.metrics):
        warnings.append(f"The run is overfitted: {found}.")
    if plan and plan.unknown_operators:
        names = ", ".join(plan.unknown_operators)
        warnings.append(f"The FLOPs of these operators are unknown and are missing from the count: {names}.")
    if plan and not plan.fits:
        warnings.append(
            f"The plan does not fit into the {format_bytes(plan.device.memory_bytes)} of {plan.device.name}."
        )
    return warnings


def key_figures(run: RunRecord) -> list[KeyFigure]:
    """The final loss or held-out reward, bits per byte, time and MFU; of a run that has not begun, the planned memory
    and time."""
    if not run.metrics and not run.measurement and not run.evaluation:
        return _planned_figures(run)
    return [*(_reward_figures(run) or _loss_figure(run)), *_bits_figure(run), *_time_figure(run), *_mfu_figure(run)]


def _planned_figures(run: RunRecord) -> list[KeyFigure]:
    plan = run.plan
    if plan is None:
        return []
    peak, verdict = sum(plan.peak_by_category.values(), 0.0), "fits" if plan.fits else "does not fit"
    seconds_per_step = plan.seconds / max(1, plan.steps)
    return [
        KeyFigure("peak memory", format_bytes(peak), f"{verdict} in {format_bytes(plan.device.memory_bytes)}"),
        KeyFigure("time", format_seconds(plan.seconds), f"{format_seconds(seconds_per_step)} per step"),
    ]


def _reward_figures(run: RunRecord) -> list[KeyFigure]:
    """The figures of reinforcement learning, whose loss says little."""
    found = [
        (logged.step, logged.figures[CORRECT])
        for logged in run.metrics
        if logged.figures and logged.figures.get(CORRECT) is not None
    ]
    if not found:
        return []
    (first, before), (last, after) = found[0], found[-1]
    at = f"at step {last:,}; {format_share(before or 0.0)} at step {first:,}"
    return [KeyFigure("right held-out answers", format_share(after or 0.0), at)]


def _loss_figure(run: RunRecord) -> list[KeyFigure]:
    if run.evaluation:
        of_all = f"of all {run.evaluation.tokens:,} tokens, perplexity {format_three_digits(run.evaluation.perplexity)}"
        found, sample = evaluations(run.metrics), sample_of(run)
        if found and "tuning.method" not in recipe_values(run.recipe):
            of_sample = f"of a sample of {sample:,}" if sample else "in other windows"
            of_all += f"; validation loss {found[-1].loss:.3f}, {of_sample}, at step {found[-1].step:,}"
        return [KeyFigure("held-out loss", f"{run.evaluation.loss:.3f}", of_all)]
    if found := evaluations(run.metrics):
        return [KeyFigure("validation loss", f"{found[-1].loss:.3f}", _validation_detail(found))]
    for logged in reversed(run.metrics):
        if not math.isnan(logged.loss):
            return [KeyFigure("training loss", f"{logged.loss:.3f}", f"at step {logged.step:,}")]
    return []


def sample_of(run: RunRecord) -> int | None:
    """Tokens of the held-out text in which the validation losses of a run's steps are measured; None where these are of
    all that is held out, as in tuning or of a short text, or the recipe does not say.
    """
    recipe = recipe_values(run.recipe)
    tokens = recipe.get("training.evaluation_tokens")
    if not isinstance(tokens, int) or "tuning.method" in recipe:
        return None
    return None if run.evaluation and run.evaluation.tokens <= tokens else tokens


def _validation_detail(found: list[Evaluated]) -> str:
    last, best = found[-1], lowest(found)
    at = f"at step {last.step:,}"
    if best is None or best.loss == last.loss:
        return at
    return f"{at}; lowest {best.loss:.3f} at step {best.step:,}"


def _bits_figure(run: RunRecord) -> list[KeyFigure]:
    if not (found := run.evaluation):
        return []
    compressors = (
        f"xz {format_three_digits(found.xz_bits_per_byte)}, gzip {format_three_digits(found.gzip_bits_per_byte)}"
    )
    return [KeyFigure("bits per byte", format_three_digits(found.bits_per_byte), compressors)]


def _time_figure(run: RunRecord) -> list[KeyFigure]:
    # Either may be incomplete: the metrics end before the last checkpoint, and the meter covers one process.
    metered = sum(run.measurement.seconds.values(), 0.0) if run.measurement else 0.0
    if not run.metrics:
        return [KeyFigure("time", format_seconds(metered))] if run.measurement else []
    last = run.metrics[-1]
    spent = format_seconds(max(last.seconds, metered))
    if not run.plan or not last.step or last.step >= run.plan.steps:
        return [KeyFigure("time", spent, f"{last.step:,} steps")]
    left = last.seconds / last.step * (run.plan.steps - last.step)
    return [KeyFigure("time", spent, f"about {format_seconds(left)} to go")]


def _mfu_figure(run: RunRecord) -> list[KeyFigure]:
    mfu, measured = run.mfu, run.measurement
    if mfu is None:
        return []
    if measured and measured.mfu == mfu:
        return [
            KeyFigure("MFU", format_share(mfu), "" if measured.hfu is None else f"HFU {format_share(measured.hfu)}")
        ]
    return [KeyFigure("MFU", format_share(mfu), "over the logged steps")]
