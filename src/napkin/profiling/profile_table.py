"""The table of a profile: planned and measured seconds of each operator, module or phase, and what is in no row."""

from collections.abc import Iterator

from napkin.profiling.step_profile import By, Figures, StepProfile
from napkin.units import format_bytes, format_rate, format_seconds, format_share

HEADINGS = ("calls", "planned", "measured", "share", "FLOP/s", "bytes/s", "of its roof")
ALL = "in operators"
STEP = "step"


def table_rows(profile: StepProfile, by: By, *, most: int) -> list[tuple[str, ...]]:
    """The rows, each with its name first: the `most` longest, the others together, all, what is outside, the step.

    A module without a name is everything outside of modules.
    """
    sums = profile.by(by)
    names = list(sums)
    shown, rest = names[:most], names[most:]
    rows = [_row(profile, name or "(outside of modules)", sums[name]) for name in shown]
    if rest:
        together = Figures()
        for name in rest:
            together = together + sums[name]
        rows.append(_row(profile, f"{len(rest)} others", together))
    return [*rows, *_totals(profile)]


def _totals(profile: StepProfile) -> Iterator[tuple[str, ...]]:
    yield _row(profile, ALL, profile.total)
    for name, seconds in profile.outside_by(lambda row: row.name).items():
        share = format_share(seconds / profile.seconds)
        yield name, "", "", format_seconds(seconds), share, "", "", ""
    planned = format_seconds(profile.price.seconds) if profile.price else ""
    flops, touched = profile.total.flops / profile.seconds, profile.total.bytes_touched / profile.seconds
    yield STEP, "", planned, format_seconds(profile.seconds), "100%", format_rate(flops), _bytes_rate(touched), ""


def _row(profile: StepProfile, name: str, figures: Figures) -> tuple[str, ...]:
    roof = figures.roof_share
    return (
        name,
        f"{figures.calls:,.0f}" if figures.calls == round(figures.calls) else f"{figures.calls:,.1f}",
        format_seconds(figures.planned_seconds) if profile.price else "",
        format_seconds(figures.seconds),
        format_share(figures.seconds / profile.seconds),
        format_rate(figures.flops_per_second) if figures.flops_per_second else "",
        _bytes_rate(figures.bytes_per_second),
        f"{format_share(roof)} {figures.bound}" if roof else "",
    )


def _bytes_rate(rate: float) -> str:
    return f"{format_bytes(rate)}/s" if rate else ""


def statements(profile: StepProfile) -> list[str]:
    """What a reader should know about the figures, a sentence each."""
    n_steps = len(profile.profiled_seconds)
    whole = f"{format_seconds(profile.seconds)}, the mean of {n_steps} step{'s' * (n_steps > 1)}"
    lines = [
        f"{format_share(profile.explained)} of {whole}, is in operators.",
        f"Under the profiler a step takes {_signed(profile.overhead)} ({len(profile.plain_seconds)} steps without it).",
    ]
    if profile.device_type == "cpu":
        lines.append(
            "The seconds of a call include what torch takes to make it; Python is all that runs between calls, such as "
            "modules, custom autograd functions and the optimizer's loop."
        )
    else:
        lines.append("The seconds of an operator are those of its kernels; the device waits where none runs.")
    if profile.planned_ledger is not None:
        lines.append("The planned seconds are those of the run's plan, which has no row for what is between operators.")
    elif profile.price is not None:
        lines.append("The planned seconds are those of each operator of the recorded step, run alone on this machine.")
    if profile.roofs is not None:
        peaks = ", ".join(f"{format_rate(rate)} in {name}" for name, rate in profile.roofs.peaks.items())
        memory = f"{format_bytes(profile.roofs.bandwidth)}/s to main memory"
        lines.append(f"The roofs, as measured on this machine: {', '.join(filter(None, [peaks, memory]))}.")
    return lines


def _signed(overhead: float) -> str:
    if abs(overhead) < 0.001:
        return "as long as without it"
    return f"{format_share(abs(overhead))} {'longer' if overhead > 0 else 'less'}"
