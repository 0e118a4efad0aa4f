"""The page of a fitted law: coefficients, the runs about it, residuals, what single runs change, best sizes."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from markupsafe import Markup

from napkin.files import atomic_write_text, refuse_unmarked
from napkin.report.templates import WITHOUT_CHARTS, render
from napkin.report.xy_picture import COLOURS, Series, xy_svg
from napkin.scaling.fitted_law import FittedLaw, Interval
from napkin.scaling.law_fit import LawFit, LeftOut
from napkin.units import format_count, format_share

GENERATOR = b'<meta name="generator" content="napkin law">'
_SHADES = ("blue", "vermilion", "green", "purple", "orange", "sky", "grey")
_BEYOND = 100.0
"""The curve of best losses is drawn up to so many times the largest run."""
_MOST_DRAWN = 3000
"""Points per picture; of more runs, as many at equal distances in FLOPs."""


def write_law_page(
    path: Path, fitted: LawFit, name: str, influence: Sequence[LeftOut], budgets: Sequence[float]
) -> Path:
    """Write the page to `path`, replacing an earlier one, and return the path.

    `name` is of the runs, for the title; `influence` are runs left out, those that matter most; `budgets` are FLOPs for
    the table of best sizes. Raises NapkinError where `path` is anything but such a page.
    """
    refuse_unmarked(path, GENERATOR, "a page that `napkin law fit` wrote")
    law = fitted.law
    pictures = {"runs": Markup(runs_picture(fitted)), "residuals": Markup(residuals_picture(fitted))}
    head = ["left out", "loss", "off the others' law", "moves by", *(influence[0].coefficients if influence else ())]
    tables = {"influence": [head]}
    for each in influence:
        off = f"{100 * each.error:+.2f}%"
        coefficients = (f"{value:.5g}" for value in each.coefficients.values())
        tables["influence"].append([each.run.name, f"{each.run.loss:.4f}", off, f"{each.shift:.2f}", *coefficients])
    if {*law.form.variables} == {"parameters", "tokens"}:
        tables["optima"] = _optima_table(law, budgets)
    sections = {
        "law": "The law",
        "runs": "Loss over FLOPs",
        "residuals": "Residuals",
        "influence": "Runs that matter most",
        "optima": "Best size and tokens",
    }
    least, most = law.ranges["compute"]
    page = render(
        "law.html",
        colours=COLOURS,
        title=f"{law.form.name}: {name}",
        sections={key: title for key, title in sections.items() if key in ("law", *pictures, *tables)},
        formula=law.form.formula,
        source=law.form.source,
        statements=[
            f"{len(fitted.runs)} runs of {least:.3g} to {most:.3g} FLOPs scatter about it by "
            f"{format_share(fitted.scatter)}."
        ],
        coefficients=[
            [f"{name}, {group}" if group else name, *(f"{value:.5g}" for value in (each.estimate, each.low, each.high))]
            for group in law.groups
            for name, each in law.coefficients[group].items()
        ],
        pictures=pictures,
        tables=tables,
        **WITHOUT_CHARTS,
    )
    atomic_write_text(path, page, overwrite=True)
    return path


def runs_picture(fitted: LawFit) -> str:
    """The loss of the runs over FLOPs and, for laws of parameters and tokens, the best loss with its 90% interval."""
    series = []
    for shade, group in zip(itertools.cycle(_SHADES), fitted.law.groups, strict=False):
        if {*fitted.law.form.variables} == {"parameters", "tokens"}:
            series += _best_losses(fitted.law, group, shade)
        series.append(_points(fitted, group, shade, np.array([run.loss for run in fitted.runs])))
    return xy_svg(series, title="Loss of the runs over FLOPs", x_label="FLOPs", y_label="loss, nats per token")


def residuals_picture(fitted: LawFit) -> str:
    """A picture of each run's residual over FLOPs."""
    off = 100 * np.expm1(fitted.residuals)
    series = [
        _points(fitted, group, shade, off)
        for shade, group in zip(itertools.cycle(_SHADES), fitted.law.groups, strict=False)
    ]
    return xy_svg(
        series, title="Residuals over FLOPs", x_label="FLOPs", y_label="off the law, %", log_y=False, height=300
    )


def _points(fitted: LawFit, group: str, shade: str, y: np.ndarray) -> Series:
    chosen = [index for index, run in enumerate(fitted.runs) if run.group == group]
    chosen.sort(key=lambda index: fitted.runs[index].compute)
    step = max(1, -(-len(chosen) * len(fitted.law.groups) // _MOST_DRAWN))
    chosen = chosen[::step]
    runs = [fitted.runs[index] for index in chosen]
    names = tuple(
        f"{format_count(run.parameters)} parameters, {format_count(run.tokens)} tokens: {run.loss:.4f}" for run in runs
    )
    return Series(group or "runs", np.array([run.compute for run in runs]), y[chosen], shade, "points", None, names)


def _best_losses(law: FittedLaw, group: str, shade: str) -> list[Series]:
    least, most = law.ranges["compute"]
    budgets = np.geomspace(least, most * _BEYOND, 40)
    best = [law.optimum(float(flops), group=group).loss for flops in budgets]
    low, high = np.array([each.low for each in best]), np.array([each.high for each in best])
    label = f"best, {group}" if group else "best loss, 90% interval"
    return [
        Series("", budgets, low, shade, "band", high),
        Series(label, budgets, np.array([each.estimate for each in best]), shade, "line"),
    ]


def _optima_table(law: FittedLaw, budgets: Sequence[float]) -> list[list[str]]:
    def span(interval: Interval) -> str:
        return f"{format_count(interval.low)} to {format_count(interval.high)}"

    rows = [["FLOPs", "× largest run", "parameters", "90%", "tokens", "90%", "loss", "90%"]]
    for group in law.groups:
        for flops in budgets:
            best = law.optimum(flops, group=group)
            rows.append(
                [
                    f"{flops:.3g}" + (f", {group}" if group else ""),
                    f"{law.extrapolation(flops):.3g}",
                    format_count(best.parameters.estimate),
                    span(best.parameters),
                    format_count(best.tokens.estimate),
                    span(best.tokens),
                    f"{best.loss.estimate:.4f}",
                    f"{best.loss.low:.4f} to {best.loss.high:.4f}",
                ]
            )
    return rows
