"""`napkin law fit`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from napkin.cli.common.files import refuse_existing
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.cli.law.runs import ChosenRuns, FittedName, Sources, read_runs
from napkin.cli.law.tables import (
    as_json,
    five_digits,
    optimum_rows,
    print_coefficients,
    print_influence,
    print_optima,
    print_residuals,
    print_size_law,
    residual_summary,
)
from napkin.errors import NapkinError
from napkin.units import format_share, parse_count

if TYPE_CHECKING:
    from napkin.scaling.isoflop import Bias, SizeLaw
    from napkin.scaling.law_fit import LawFit, LeftOut

_SHOWN_INFLUENCE = 5


@dataclass(frozen=True)
class FitOptions(JsonOption):
    """Fit a scaling law to finished runs: coefficients with 90% intervals, residuals, what single runs change, and the
    best size and tokens for more FLOPs."""

    runs: Sources = ()
    """A CSV file with columns for parameters, tokens (or FLOPs) and loss, folders of runs, or `example`: Chinchilla's
    runs. Runs whose loss is not a finite number are left out."""
    law: FittedName = "chinchilla"
    """chinchilla: E + A/N^alpha + B/D^beta; gadre: with one exponent; kaplan: (A/N^kappa + B/D)^alpha_D; kaplan-n, -d,
    -c: a power of parameters, tokens or FLOPs with a floor; data-constrained: what repeated tokens are worth, from a
    column unique_tokens."""
    approach: Literal[1, 2, 3] = 3
    """Of Hoffmann et al. 2022: 1 is the envelope of the runs, 2 parabolas through the runs of each budget, 3 fits the
    law to all runs."""
    drop_highest: int = 0
    """Leave out so many runs of highest loss, and say what they change."""
    delta: float | None = None
    """Residuals of the log loss beyond this count linearly; None is 0.001, more where runs scatter widely or are
    few."""
    flops: tuple[str, ...] = ()
    """Budgets to give the best size for, such as 1e23; none is 10 and 100 times the largest run."""
    loss_column: str | None = None
    """Column of the loss in the CSV file; None is the one called loss, or the only one with it in its name."""
    out: str | None = None
    """Write the law to this file, for `napkin law predict`; it must not exist."""
    page: str | None = None
    """HTML file to write, with pictures; an earlier page of this command is replaced, no other file is."""


@command("law fit", FitOptions)
def main(options: FitOptions) -> None:
    if options.out is not None:
        refuse_existing(Path(options.out))
    budgets = [float(parse_count(each)) for each in options.flops]
    chosen = read_runs(options.runs, loss_column=options.loss_column, drop_highest=options.drop_highest)
    largest = max(run.compute for run in chosen.runs)
    budgets = budgets or [10 * largest, 100 * largest]
    if options.law == "data-constrained":
        _fit_repetitions(options, chosen)
        return
    if options.approach != 3:
        _fit_sizes(options, chosen, budgets)
        return
    from napkin.scaling.law_fit import fit_law, leave_one_out, refit_with

    with progress_line("fitting"):
        fitted = fit_law(chosen.runs, options.law, delta=options.delta)
        beside = refit_with(fitted, chosen.dropped) if chosen.dropped else None
        influence = leave_one_out(fitted)
    _tell_below_floor(fitted)
    if options.page is not None:
        from napkin.scaling.law_page import write_law_page

        write_law_page(Path(options.page), fitted, chosen.name, influence[:_SHOWN_INFLUENCE], budgets)
    if options.out is not None:
        fitted.law.write(options.out)
    if options.json:
        print_json(_as_json(chosen, fitted, beside, influence, budgets))
        return
    _print(chosen, fitted, beside, influence, budgets)
    for path in (options.out, options.page):
        if path is not None:
            say(f"wrote {path}")


def _tell_below_floor(fitted: "LawFit") -> None:
    floors = {group: found["E"].estimate for group, found in fitted.law.coefficients.items() if "E" in found}
    below = [run for run in fitted.runs if run.loss <= floors.get(run.group, 0.0)]
    if below:
        shown = ", ".join(run.name for run in below[:5]) + (" ..." if len(below) > 5 else "")
        notify(
            f"note: {len(below)} of the runs have a loss below the fitted floor, {shown}: it cannot hold for them; "
            "look whether their loss is of the same text"
        )


def _print(
    chosen: ChosenRuns,
    fitted: "LawFit",
    beside: "LawFit | None",
    influence: "list[LeftOut]",
    budgets: list[float],
) -> None:
    law, form = fitted.law, fitted.law.form
    say(f"{form.name}: loss = {form.formula}  ({form.source})")
    print_coefficients(fitted, beside)
    if beside is not None:
        losses = ", ".join(f"{run.loss:.2f}" for run in chosen.dropped[:8])
        changed = ", ".join(_changes(fitted, beside))
        say(f"{len(chosen.dropped)} runs were left out (loss {losses}); with them: {changed}")
    print_residuals(fitted)
    least, most = law.ranges["compute"]
    say(f"runs of {least:.3g} to {most:.3g} FLOPs; residuals are of the log loss, Huber's delta {fitted.delta:.2g}")
    say()
    print_influence(influence[:_SHOWN_INFLUENCE])
    for group in law.groups:
        optima = optimum_rows(law, group, budgets)
        if optima:
            say()
            say("best size and tokens" + (f", {group}" if group else "") + ", with 6·N·D FLOPs:")
            print_optima(optima, most)


def _changes(fitted: "LawFit", beside: "LawFit") -> list[str]:
    group = fitted.law.groups[0]
    before, after = fitted.law.coefficients[group], beside.law.coefficients[group]
    return [f"{name} {five_digits(after[name].estimate)}" for name in before]


def _as_json(
    chosen: ChosenRuns,
    fitted: "LawFit",
    beside: "LawFit | None",
    influence: "list[LeftOut]",
    budgets: list[float],
) -> dict[str, Any]:
    law, summary = fitted.law, residual_summary(fitted)
    return {
        "law": law.form.name,
        "formula": law.form.formula,
        "runs": len(fitted.runs),
        "diverged": list(chosen.diverged),
        "notes": list(chosen.notes),
        "delta": fitted.delta,
        "coefficients": {
            group: {name: as_json(interval) for name, interval in found.items()}
            for group, found in law.coefficients.items()
        },
        "dropped": [run.source for run in chosen.dropped],
        "with_dropped": None
        if beside is None
        else {
            group: {name: interval.estimate for name, interval in found.items()}
            for group, found in beside.law.coefficients.items()
        },
        "residuals": {
            "rms": summary["rms"],
            "scatter": summary["scatter"],
            "of_runs": fitted.residuals.tolist(),
            "outliers": [run.source for run in summary["outliers"]],
        },
        "ranges": {name: list(limits) for name, limits in law.ranges.items()},
        "left_out": [
            {"run": each.run.source, "error": each.error, "shift": each.shift, "coefficients": each.coefficients}
            for each in influence
        ],
        "optima": {
            group: [
                {
                    "flops": each.flops,
                    "extrapolation": law.extrapolation(each.flops),
                    "parameters": as_json(each.parameters),
                    "tokens": as_json(each.tokens),
                    "loss": as_json(each.loss),
                }
                for each in optimum_rows(law, group, budgets)
            ]
            for group in law.groups
        },
    }


def _fit_repetitions(options: FitOptions, chosen: ChosenRuns) -> None:
    """Muennighoff's law."""
    from napkin.scaling.data_constrained import fit_data_constrained
    from napkin.scaling.law_forms import HUBER_DELTA

    if options.approach != 3 or options.out is not None or options.page is not None:
        raise NapkinError("the law 'data-constrained' has approach 3 alone, no file and no page: leave these out")
    with progress_line("fitting"):
        law = fit_data_constrained(chosen.runs, delta=HUBER_DELTA if options.delta is None else options.delta)
    epochs = (2, 4, 8, 16, 40)
    if options.json:
        print_json(
            {
                "law": "data-constrained",
                "repeated_tokens": as_json(law.repeated_tokens),
                "repeated_parameters": as_json(law.repeated_parameters),
                "without_repetitions": {name: as_json(each) for name, each in law.base.coefficients[""].items()},
                "worth": {str(each): as_json(law.worth(each)) for each in epochs},
            }
        )
        return
    say("data-constrained: loss = E + A/N'^alpha + B/D'^beta  (Muennighoff et al. 2023)")
    coefficients = {
        **law.base.coefficients[law.base.groups[0]],
        "R_D*": law.repeated_tokens,
        "R_N*": law.repeated_parameters,
    }
    print_table(
        ["", "estimate", "90% from", "to"],
        [[name, *map(five_digits, (each.estimate, each.low, each.high))] for name, each in coefficients.items()],
    )
    worth = ", ".join(f"{each} epochs {format_share(law.worth(each).estimate)}" for each in epochs)
    say(f"what a token is worth on average, of a new one: {worth}")


def _fit_sizes(options: FitOptions, chosen: ChosenRuns, budgets: list[float]) -> None:
    """Approaches 1 and 2."""
    from napkin.scaling.isoflop import approach_1, approach_2

    if options.out is not None or options.page is not None:
        raise NapkinError(f"approach {options.approach} has no file and no page: leave out --out and --page")
    groups = {run.group for run in chosen.runs}
    if len(groups) > 1:
        raise NapkinError(f"approach {options.approach} is for one training set, the file has {len(groups)}: split it")
    found = (approach_1 if options.approach == 1 else approach_2)(chosen.runs)
    bias = _bias(chosen, found, budgets[-1]) if options.approach == 2 else None
    if options.json:
        print_json(_sizes_as_json(found, budgets, bias))
        return
    print_size_law(found, budgets)
    for note in found.notes:
        say(note)
    if bias is not None:
        say(
            f"bias: on losses without noise of the law that fits these runs, approach 2 finds an exponent of "
            f"{bias.found_exponent:.4f} where {bias.true_exponent:.4f} is true, and at {bias.flops:.3g} FLOPs a size "
            f"that is off by {100 * bias.relative:+.2f}%; the intervals do not hold that"
        )


def _bias(chosen: ChosenRuns, found: "SizeLaw", flops: float) -> "Bias | None":
    from napkin.scaling.isoflop import approach_2_bias
    from napkin.scaling.law_fit import fit_law

    try:
        return approach_2_bias(chosen.runs, fit_law(chosen.runs, draws=2).law, flops)
    except NapkinError:
        # Too few runs for approach 3.
        return None


def _sizes_as_json(found: "SizeLaw", budgets: list[float], bias: "Bias | None") -> dict[str, Any]:
    from dataclasses import asdict

    optima = [(flops, *found.optimum(flops)) for flops in budgets]
    return {
        "approach": found.approach,
        "best": [asdict(each) for each in found.best],
        "exponents": {
            "parameters": as_json(found.parameters.exponents["flops"]),
            "tokens": as_json(found.tokens.exponents["flops"]),
        },
        "notes": list(found.notes),
        "optima": [
            {"flops": flops, "parameters": as_json(parameters), "tokens": as_json(tokens)}
            for flops, parameters, tokens in optima
        ],
        "bias": None if bias is None else {**asdict(bias), "relative": bias.relative},
    }
