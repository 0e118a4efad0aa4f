"""What the commands on laws print of coefficients, optima and single runs."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from napkin.cli.common.terminal import print_table, say
from napkin.units import format_count, format_share

if TYPE_CHECKING:
    from napkin.scaling.fitted_law import FittedLaw, Interval, Optimum
    from napkin.scaling.isoflop import SizeLaw
    from napkin.scaling.law_fit import LawFit, LeftOut


def five_digits(value: float) -> str:
    """A coefficient: five significant digits."""
    return f"{value:#.5g}".rstrip(".") if 1e-4 <= abs(value) < 1e5 or value == 0 else f"{value:.4e}"


def as_json(interval: "Interval") -> dict[str, float]:
    """An interval for programs."""
    return {"estimate": interval.estimate, "low": interval.low, "high": interval.high}


def print_coefficients(fitted: "LawFit", beside: "LawFit | None" = None) -> None:
    """A row per coefficient; `beside` is the same law with the dropped runs."""
    law = fitted.law
    head = ["", "estimate", "90% from", "to"] + (["with the dropped runs"] if beside else [])
    rows = []
    for group in law.groups:
        for name, interval in law.coefficients[group].items():
            shared = name in law.form.exponents or name == law.form.outer_exponent
            if shared and group != law.groups[0]:
                continue
            label = name if shared or not group else f"{name}, {group}"
            row = [label, five_digits(interval.estimate), five_digits(interval.low), five_digits(interval.high)]
            rows.append(row + ([five_digits(beside.law.coefficients[group][name].estimate)] if beside else []))
    print_table(head, rows)


def optimum_rows(law: "FittedLaw", group: str, budgets: Iterable[float]) -> "list[Optimum]":
    """The optima for budgets; none for laws of one variable."""
    if {*law.form.variables} != {"parameters", "tokens"}:
        return []
    return [law.optimum(flops, group=group) for flops in budgets]


def print_optima(optima: "Sequence[Optimum]", largest: float) -> None:
    """A row per budget."""
    print_table(
        ["FLOPs", "× largest run", "parameters", "90%", "tokens", "90%", "loss", "90%"],
        [
            [
                f"{each.flops:.3g}",
                f"{each.flops / largest:.3g}",
                format_count(each.parameters.estimate),
                span(each.parameters),
                format_count(each.tokens.estimate),
                span(each.tokens),
                f"{each.loss.estimate:.4f}",
                f"{each.loss.low:.4f} to {each.loss.high:.4f}",
            ]
            for each in optima
        ],
        align="rrrlrlrl",
    )


def print_influence(found: "Sequence[LeftOut]") -> None:
    """The runs whose leaving out moves the coefficients most."""
    rows = []
    for each in found:
        coefficients = ", ".join(f"{name} {five_digits(value)}" for name, value in each.coefficients.items())
        rows.append(
            [each.run.name, f"{each.run.loss:.4f}", f"{100 * each.error:+.2f}%", f"{each.shift:.2f}", coefficients]
        )
    print_table(["left out", "loss", "off the others' law", "moves by", "the law is then"], rows, align="lrrrl")
    say("“moves by” is the largest change of a coefficient, in half widths of its interval.")


def print_size_law(found: "SizeLaw", budgets: Sequence[float]) -> None:
    """Best sizes by budget, exponents, and optima."""
    what = "runs that none of as few FLOPs beats" if found.approach == 1 else "minima of parabolas, loss over log size"
    say(f"approach {found.approach}: {what}")
    print_table(
        ["FLOPs", "runs", "parameters", "tokens", "loss", "tokens/parameter"],
        [
            [
                f"{each.flops:.3g}",
                str(each.runs),
                format_count(each.parameters) + (" (edge)" if each.at_edge else ""),
                format_count(each.tokens),
                f"{each.loss:.4f}",
                f"{each.tokens / each.parameters:.3g}",
            ]
            for each in found.best
        ],
        align="rrrrrr",
    )
    say()
    rows = []
    for name, law in (("parameters", found.parameters), ("tokens", found.tokens)):
        exponent = law.exponents["flops"]
        rows.append(
            [f"{name} ∝ C^a", five_digits(exponent.estimate), five_digits(exponent.low), five_digits(exponent.high)]
        )
    print_table(["", "a", "90% from", "to"], rows)
    say()
    print_table(
        ["FLOPs", "parameters", "90%", "tokens", "90%"],
        [
            [
                f"{flops:.3g}",
                format_count(parameters.estimate),
                span(parameters),
                format_count(tokens.estimate),
                span(tokens),
            ]
            for flops, (parameters, tokens) in ((flops, found.optimum(flops)) for flops in budgets)
        ],
        align="rrlrl",
    )


def span(interval: "Interval") -> str:
    """An interval of counts."""
    return f"{format_count(interval.low)} to {format_count(interval.high)}"


def residual_summary(fitted: "LawFit") -> dict[str, Any]:
    """How the runs lie about the law."""
    from napkin.scaling.law_fit import outliers, scatter

    far = [run for run, beyond in zip(fitted.runs, outliers(fitted.residuals), strict=True) if beyond]
    return {"rms": fitted.rms, "scatter": scatter(fitted.residuals), "outliers": far}


def print_residuals(fitted: "LawFit") -> None:
    """A line on the scatter, and one on outliers."""
    summary = residual_summary(fitted)
    scatter, rms = (format_share(summary[name]) for name in ("scatter", "rms"))
    say(f"{len(fitted.runs)} runs scatter about it by {scatter} (robust), rms {rms}")
    far = summary["outliers"]
    if far:
        shown = ", ".join(run.name for run in far[:8]) + (" ..." if len(far) > 8 else "")
        say(
            f"{len(far)} of them by more than 5 times that: {shown}; such runs have little weight, and do not count in "
            "the scatter that is expected of a new run"
        )
