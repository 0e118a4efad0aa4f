"""The lines of a plan about failures: how many, the best checkpoint interval, and time and dollars with them; torch is
not imported."""

import math

from napkin.accounting.failures import NEARLY_BEST, PUBLISHED_DAYS, PUBLISHED_DEVICES, PUBLISHED_FAILURES, FailureModel
from napkin.runs.accounting_files import PlannedFailures
from napkin.units import format_count, format_seconds, format_three_digits

LONG_SECONDS = 86_400.0
FEW = 0.01


def failures_of_run(
    model: FailureModel,
    useful_seconds: float,
    *,
    interval_seconds: float | None = None,
    shortest_interval_seconds: float = 0.0,
    useful_dollars: float | None = None,
) -> PlannedFailures:
    """Failures over so many seconds of work, which cost `useful_dollars`.

    `interval_seconds` are those of work between two checkpoints, by default the best; the shortest is that of a step.
    """
    best = min(max(model.best_interval, shortest_interval_seconds), useful_seconds)
    longest = min(max(model.longest_interval, best), useful_seconds)
    interval = best if interval_seconds is None else interval_seconds
    seconds = model.expected_seconds(useful_seconds, interval)
    ends = math.isfinite(seconds)
    return PlannedFailures(
        mtbf_seconds=model.mtbf_seconds,
        restart_seconds=model.restart_seconds,
        pause_seconds=model.pause_seconds,
        write_seconds=model.write_seconds,
        interval_seconds=interval,
        best_interval_seconds=best,
        longest_interval_seconds=longest,
        goodput=model.goodput(interval),
        best_goodput=model.goodput(best),
        seconds=seconds if ends else None,
        interruptions=seconds / model.mtbf_seconds if ends else None,
        dollars=useful_dollars * seconds / useful_seconds if ends and useful_dollars is not None else None,
    )


def failures_are_worth_saying(seconds: float, n_devices: int, *, given: bool) -> bool:
    """True if a plan has lines on failures: on several devices, for more than a day, or because it was asked for."""
    return given or n_devices > 1 or seconds > LONG_SECONDS


def failure_lines(failures: PlannedFailures, *, given: bool) -> list[str]:
    """Lines below the plan of a recipe; `given` says whether the time between failures was."""
    every = f"one in {format_seconds(failures.mtbf_seconds)} {_source(given=given)}"
    if failures.interruptions is not None and failures.interruptions < FEW:
        return [f"failures: fewer than {FEW} expected, {every}"]
    best = _in_steps(failures.best_interval_steps, failures.best_interval_seconds)
    longest = _in_steps(failures.longest_interval_steps, failures.longest_interval_seconds)
    now = f"training.checkpoint_every = {failures.interval_steps:,} ({format_seconds(failures.interval_seconds)})"
    durable = f" and is durable {format_seconds(failures.write_seconds)} later" if failures.write_seconds else ""
    lines = [
        f"failures: {_expected(failures)}, {every}; {format_seconds(failures.restart_seconds)} for each restart",
        f"best checkpoint interval: {best}, by Young and Daly; up to {longest} cost at most {NEARLY_BEST:.0%} more "
        f"time; a checkpoint pauses training for {format_seconds(failures.pause_seconds)}{durable}",
        f"with failures: goodput {_percent(failures.goodput)} with {now}; {_with_failures(failures)}",
    ]
    if failures.goodput * (1 + NEARLY_BEST) < failures.best_goodput:
        far = "long" if failures.interval_seconds > failures.best_interval_seconds else "short"
        lines.append(
            f"training.checkpoint_every is too {far}: with {failures.best_interval_steps:,} the goodput is "
            f"{_percent(failures.best_goodput)}"
        )
    return lines


def failure_rows(failures: PlannedFailures, *, given: bool) -> list[tuple[str, str]]:
    """Lines of a plan by rule, each with its name."""
    every = f"one in {format_seconds(failures.mtbf_seconds)} {_source(given=given)}"
    interval, longest = format_seconds(failures.interval_seconds), format_seconds(failures.longest_interval_seconds)
    return [
        ("failures", f"{_expected(failures)}, {every}; {format_seconds(failures.restart_seconds)} for each restart"),
        (
            "goodput",
            f"{_percent(failures.goodput)} with a checkpoint every {interval}, at most {NEARLY_BEST:.0%} more time "
            f"with one every {longest}: {_with_failures(failures)}",
        ),
    ]


def _with_failures(failures: PlannedFailures) -> str:
    """Time and dollars with failures."""
    if failures.seconds is None:
        return "the run would not end"
    dollars = "" if failures.dollars is None else f", ${format_count(failures.dollars)}"
    return f"{format_seconds(failures.seconds)}{dollars} in all"


def _expected(failures: PlannedFailures) -> str:
    if failures.interruptions is None:
        return "more than can be counted"
    return f"{format_three_digits(failures.interruptions)} expected"


def _source(*, given: bool) -> str:
    if given:
        return "(given)"
    return f"(the rate of Llama 3: {PUBLISHED_FAILURES} in {PUBLISHED_DAYS} days on {PUBLISHED_DEVICES:,} H100)"


def _percent(goodput: float) -> str:
    return f"{100 * goodput:.2f}%"


def _in_steps(steps: int | None, seconds: float) -> str:
    return f"{steps:,} steps ({format_seconds(seconds)})" if steps is not None else format_seconds(seconds)
