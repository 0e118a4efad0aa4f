"""The top of the page of a run: its state, warnings and key figures; and the bars that the template makes of HTML.

The table rule | count | meter | meter/count for a terminal.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from napkin.accounting.quantities import QuantityRow, laid_out
from napkin.report.overfitting import evaluations, lowest, overfitting
from napkin.report.xy_picture import shade
from napkin.runs.accounting_files import Evaluation
from napkin.runs.run_record import RunRecord
from napkin.toml_files import parse_toml
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
        read = ", of those that were read" if run.left_out else ""
        steps = f"{len(lost):,} of {len(run.metrics):,} logged steps{read}"
        warnings.append(f"The loss was not finite at {steps}, first at step {lost[0]:,}.")
    if overfit := overfitting(run.metrics):
        warnings.append(f"The run is overfitted: {overfit}.")
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
    plan, evaluation, measured = run.plan, run.evaluation, run.measurement
    if not run.metrics and not measured and not evaluation:
        if plan is None:
            return []
        peak, verdict = sum(plan.peak_by_category.values(), 0.0), "fits" if plan.fits else "does not fit"
        per_step = format_seconds(plan.seconds / max(1, plan.steps))
        return [
            KeyFigure("peak memory", format_bytes(peak), f"{verdict} in {format_bytes(plan.device.memory_bytes)}"),
            KeyFigure("time", format_seconds(plan.seconds), f"{per_step} per step"),
        ]
    figures = [_reward_figure(run) or _loss_figure(run)]
    if evaluation:
        bits, xz, gzip = map(
            format_three_digits,
            (evaluation.bits_per_byte, evaluation.xz_bits_per_byte, evaluation.gzip_bits_per_byte),
        )
        figures.append(KeyFigure("bits per byte", bits, f"xz {xz}, gzip {gzip}"))
    figures.append(_time_figure(run))
    if run.mfu is not None:
        detail = "over the logged steps"
        if measured and measured.mfu == run.mfu:
            detail = "" if measured.hfu is None else f"HFU {format_share(measured.hfu)}"
        figures.append(KeyFigure("MFU", format_share(run.mfu), detail))
    return [figure for figure in figures if figure is not None]


def _reward_figure(run: RunRecord) -> KeyFigure | None:
    """The key figure of reinforcement learning, whose loss says little."""
    rewards = [
        (logged.step, logged.figures[CORRECT])
        for logged in run.metrics
        if logged.figures and logged.figures.get(CORRECT) is not None
    ]
    if not rewards:
        return None
    (first, before), (last, after) = rewards[0], rewards[-1]
    at = f"at step {last:,}; {format_share(before or 0.0)} at step {first:,}"
    return KeyFigure("right held-out answers", format_share(after or 0.0), at)


def _loss_figure(run: RunRecord) -> KeyFigure | None:
    evaluated = evaluations(run.metrics)
    if run.evaluation:
        of_all = f"of all {run.evaluation.tokens:,} tokens, perplexity {format_three_digits(run.evaluation.perplexity)}"
        if evaluated and "tuning.method" not in recipe_values(run.recipe):
            sample = sample_of(run)
            of_sample = f"of a sample of {sample:,}" if sample else "in other windows"
            of_all += f"; validation loss {evaluated[-1].loss:.3f}, {of_sample}, at step {evaluated[-1].step:,}"
        return KeyFigure("held-out loss", f"{run.evaluation.loss:.3f}", of_all)
    if best := lowest(evaluated):
        last = evaluated[-1]
        below = "" if best.loss == last.loss else f"; lowest {best.loss:.3f} at step {best.step:,}"
        return KeyFigure("validation loss", f"{last.loss:.3f}", f"at step {last.step:,}{below}")
    for logged in reversed(run.metrics):
        if not math.isnan(logged.loss):
            return KeyFigure("training loss", f"{logged.loss:.3f}", f"at step {logged.step:,}")
    return None


def recipe_values(text: str) -> dict[str, Any]:
    """The values of a recipe by "table.name"; empty where it is not TOML."""
    try:
        tables = parse_toml(text)
    except (ValueError, RecursionError):
        return {}

    def flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", value

    return dict(flat(tables, ""))


def sample_of(run: RunRecord) -> int | None:
    """Tokens of the held-out text in which the validation losses of a run's steps are measured; None where these are of
    all that is held out, as in tuning or of a short text, or the recipe does not say.
    """
    recipe = recipe_values(run.recipe)
    tokens = recipe.get("training.evaluation_tokens")
    if not isinstance(tokens, int) or "tuning.method" in recipe:
        return None
    return None if run.evaluation and run.evaluation.tokens <= tokens else tokens


def _time_figure(run: RunRecord) -> KeyFigure | None:
    # Either may be incomplete: the metrics end before the last checkpoint, and the meter covers one process.
    metered = sum(run.measurement.seconds.values(), 0.0) if run.measurement else 0.0
    if not run.metrics:
        return KeyFigure("time", format_seconds(metered)) if run.measurement else None
    last = run.metrics[-1]
    spent = format_seconds(max(last.seconds, metered))
    if not run.plan or not last.step or last.step >= run.plan.steps:
        return KeyFigure("time", spent, f"{last.step:,} steps")
    left = last.seconds / last.step * (run.plan.steps - last.step)
    return KeyFigure("time", spent, f"about {format_seconds(left)} to go")


class Segment(NamedTuple):
    """A part of a stacked bar."""

    colour: str
    percent: float


class StackedBar(NamedTuple):
    """Parts of a whole, side by side."""

    segments: list[Segment]
    outlined: bool
    """True if the whole bar is a limit that the parts are compared with; it is outlined."""
    description: str


class Bar(NamedTuple):
    """A bar with its name and figure."""

    name: str
    figure: str
    colour: str
    percent: float


def stacked_bar(parts: Mapping[str, float], description: str, *, limit: float | None = None) -> StackedBar:
    """Parts as one stacked bar in the colours of `shade`.

    With a `limit`, such as the free memory, 100% is the limit, unless the parts would be too small to see.
    """
    # A remainder such as "other" may be slightly negative.
    sizes = {part: max(0.0, size) for part, size in parts.items()}
    total = sum(sizes.values(), 0.0)
    outlined = bool(limit and 0.2 * limit <= total)
    full = max(total, limit or 0.0) if outlined else total
    segments = [Segment(shade(part), round(100 * size / (full or 1.0), 3)) for part, size in sizes.items()]
    return StackedBar(segments, outlined, description)


def bits_bars(evaluation: Evaluation) -> list[Bar]:
    """Bits per byte of held-out text for the model, xz and gzip; the longest bar has 100%."""
    bits = {
        "this model": evaluation.bits_per_byte,
        "xz -9": evaluation.xz_bits_per_byte,
        "gzip -9": evaluation.gzip_bits_per_byte,
    }
    longest = max(bits.values()) or 1.0
    return [
        Bar(name, format_three_digits(value), "grey" if index else "blue", round(100 * value / longest, 3))
        for index, (name, value) in enumerate(bits.items())
    ]


def reconcile_table(rows: Sequence[QuantityRow]) -> Table:
    """Lay rule, count and meter side by side for a terminal of 80 columns or more.

    The meter's columns are left out where no row has a meter (a plan). Notes stand below the figures, numbered, each
    once.
    """
    (first, *others), cells, notes = laid_out(rows)
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        # Notes are as wide as the table, and a plan's two columns would be too narrow.
        min_width=66,
        header_style="bold",
        caption=Text("\n".join(notes)) if notes else None,
        caption_justify="left",
        caption_style="dim",
    )
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    for quantity, *figures in cells:
        # Text, not markup: a "[" in a quantity's name is a bracket.
        table.add_row(Text(quantity), *figures)
    return table
