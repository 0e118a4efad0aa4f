"""`napkin law fit` in its forms: a law of all runs, of the best sizes among them, and of repeated tokens."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from napkin.cli.commands import Command
from napkin.cli.common.files import refuse_existing
from napkin.cli.common.forms import Form, Forms
from napkin.cli.common.options import command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.cli.law.tables import ChosenRuns, LawName, RunsOptions, print_optima, read_runs, span
from napkin.errors import NapkinError
from napkin.units import format_count, format_share, parse_count

if TYPE_CHECKING:
    from napkin.scaling.isoflop import SizeLaw
    from napkin.scaling.law_fit import LawFit, LeftOut

_SHOWN_INFLUENCE = 5

fit = Forms(
    "law fit",
    "napkin.cli.law",
    Command("fit a law to all runs", "fit:fit_all"),
    {
        "sizes": Form(
            Command("fit power laws to the best sizes (approaches 1 and 2)", "fit:fit_sizes"),
            ("--approach=1", "--approach=2"),
        ),
        "repetitions": Form(
            Command("say what repeated tokens are worth", "fit:fit_repetitions"), ("--law=data-constrained",)
        ),
    },
)


@dataclass(frozen=True)
class BudgetsOptions(RunsOptions):
    """For laws that have optima."""

    flops: tuple[str, ...] = ()
    """Budgets to give the best size for, such as 1e23; none is 10 and 100 times the largest run."""

    def read(self) -> tuple[ChosenRuns, list[float]]:
        """The runs, and the budgets in FLOPs."""
        # Before the runs, whose reader may print notes: an error is one line.
        budgets = [float(parse_count(each)) for each in self.flops]
        chosen = read_runs(self)
        largest = max(run.compute for run in chosen.runs)
        return chosen, budgets or [10 * largest, 100 * largest]


@dataclass(frozen=True)
class FitOptions(BudgetsOptions):
    """Fit a scaling law to finished runs: coefficients with 90% intervals, residuals, what single runs change, and the
    best size and tokens for more FLOPs. Other fits, with options of their own: the best sizes of each budget, as in
    approaches 1 and 2 of Hoffmann et al. 2022, napkin law fit sizes; what repeated tokens are worth, napkin law fit
    repetitions."""

    law: LawName = "chinchilla"
    """chinchilla: E + A/N^alpha + B/D^beta; gadre: with one exponent; kaplan: (A/N^kappa + B/D)^alpha_D; kaplan-n, -d,
    -c: a power of parameters, tokens or FLOPs with a floor."""
    approach: Literal[3] = 3
    """Approach 3 of Hoffmann et al. 2022 fits the law to all runs; --approach 1 and 2 are napkin law fit sizes."""
    delta: float | None = None
    """Residuals of the log loss beyond this count linearly; None is 0.001, more where runs scatter widely or are
    few."""
    out: str | None = None
    """Write the law to this file, for `napkin law predict`; it must not exist."""
    page: str | None = None
    """HTML file to write, with pictures; an earlier page of this command is replaced, no other file is."""


@command("law fit", FitOptions)
def fit_all(options: FitOptions) -> None:
    if options.out is not None:
        refuse_existing(Path(options.out))
    chosen, budgets = options.read()
    from napkin.scaling.law_fit import fit_law, leave_one_out, refit_with

    with progress_line("fitting"):
        fitted = fit_law(chosen.runs, options.law, delta=options.delta)
        beside = refit_with(fitted, chosen.dropped) if chosen.dropped else None
        influence = leave_one_out(fitted)
    if below := fitted.below_floor:
        shown = ", ".join(run.name for run in below[:5]) + (" ..." if len(below) > 5 else "")
        notify(
            f"note: {len(below)} of the runs have a loss below the fitted floor, {shown}: it cannot hold for them; "
            "look whether their loss is of the same text"
        )
    if options.page is not None:
        from napkin.scaling.law_page import write_law_page

        write_law_page(Path(options.page), fitted, chosen.name, influence[:_SHOWN_INFLUENCE], budgets)
    if options.out is not None:
        fitted.law.write(options.out)
    if options.json:
        print_json(
            {
                **fitted.as_values(budgets),
                "diverged": list(chosen.diverged),
                "notes": list(chosen.notes),
                "dropped": [run.source for run in chosen.dropped],
                "with_dropped": None
                if beside is None
                else {
                    group: {name: interval.estimate for name, interval in found.items()}
                    for group, found in beside.law.coefficients.items()
                },
                "left_out": [
                    {
                        "run": each.run.source,
                        "error": each.error,
                        "shift": each.shift,
                        "coefficients": each.coefficients,
                    }
                    for each in influence
                ],
            }
        )
        return
    _print(chosen, fitted, beside, influence, budgets)
    for path in (options.out, options.page):
        if path is not None:
            say(f"wrote {path}")


def _print(
    chosen: ChosenRuns,
    fitted: "LawFit",
    beside: "LawFit | None",
    influence: "list[LeftOut]",
    budgets: list[float],
) -> None:
    law, form = fitted.law, fitted.law.form
    say(f"{form.name}: loss = {form.formula}  ({form.source})")
    _print_coefficients(fitted, beside)
    if beside is not None:
        losses = ", ".join(f"{run.loss:.2f}" for run in chosen.dropped[:8])
        after = beside.law.coefficients[law.groups[0]]
        changed = ", ".join(f"{name} {_five_digits(after[name].estimate)}" for name in law.coefficients[law.groups[0]])
        say(f"{len(chosen.dropped)} runs were left out (loss {losses}); with them: {changed}")
    _print_residuals(fitted)
    least, most = law.ranges["compute"]
    say(f"runs of {least:.3g} to {most:.3g} FLOPs; residuals are of the log loss, Huber's delta {fitted.delta:.2g}")
    say()
    _print_influence(influence[:_SHOWN_INFLUENCE])
    for group in law.groups:
        optima = law.optima(budgets, group=group)
        if optima:
            say()
            say("best size and tokens" + (f", {group}" if group else "") + ", with 6·N·D FLOPs:")
            print_optima(optima, most)


def _print_coefficients(fitted: "LawFit", beside: "LawFit | None" = None) -> None:
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
            row = [label, _five_digits(interval.estimate), _five_digits(interval.low), _five_digits(interval.high)]
            rows.append(row + ([_five_digits(beside.law.coefficients[group][name].estimate)] if beside else []))
    print_table(head, rows)


def _print_residuals(fitted: "LawFit") -> None:
    """A line on the scatter, and one on outliers."""
    scatter, rms = format_share(fitted.scatter), format_share(fitted.rms)
    say(f"{len(fitted.runs)} runs scatter about it by {scatter} (robust), rms {rms}")
    far = fitted.outliers
    if far:
        shown = ", ".join(run.name for run in far[:8]) + (" ..." if len(far) > 8 else "")
        say(
            f"{len(far)} of them by more than 5 times that: {shown}; such runs have little weight, and do not count in "
            "the scatter that is expected of a new run"
        )


def _print_influence(found: "Sequence[LeftOut]") -> None:
    """The runs whose leaving out moves the coefficients most."""
    rows = []
    for each in found:
        coefficients = ", ".join(f"{name} {_five_digits(value)}" for name, value in each.coefficients.items())
        rows.append(
            [each.run.name, f"{each.run.loss:.4f}", f"{100 * each.error:+.2f}%", f"{each.shift:.2f}", coefficients]
        )
    print_table(["left out", "loss", "off the others' law", "moves by", "the law is then"], rows, align="lrrrl")
    say("“moves by” is the largest change of a coefficient, in half widths of its interval.")


@dataclass(frozen=True)
class SizesOptions(BudgetsOptions):
    """Read the best size of each budget off the runs, and fit power laws of FLOPs to them: approaches 1 and 2 of
    Hoffmann et al. 2022."""

    approach: Literal[1, 2] = 2
    """1 is the envelope of the runs, 2 parabolas through the runs of each budget, with a measurement of their bias."""


@command("law fit sizes", SizesOptions)
def fit_sizes(options: SizesOptions) -> None:
    chosen, budgets = options.read()
    from napkin.scaling.isoflop import approach_1, approach_2, approach_2_bias
    from napkin.scaling.law_fit import fit_law

    groups = {run.group for run in chosen.runs}
    if len(groups) > 1:
        raise NapkinError(f"approach {options.approach} is for one training set, the file has {len(groups)}: split it")
    found = (approach_1 if options.approach == 1 else approach_2)(chosen.runs)
    bias = None
    if options.approach == 2:
        # Too few runs for approach 3 have no law to measure the bias with.
        with contextlib.suppress(NapkinError):
            bias = approach_2_bias(chosen.runs, fit_law(chosen.runs, draws=2).law, budgets[-1])
    if options.json:
        print_json({**found.as_values(budgets), "bias": None if bias is None else bias.as_values()})
        return
    _print_size_law(found, budgets)
    for note in found.notes:
        say(note)
    if bias is not None:
        say(
            f"bias: on losses without noise of the law that fits these runs, approach 2 finds an exponent of "
            f"{bias.found_exponent:.4f} where {bias.true_exponent:.4f} is true, and at {bias.flops:.3g} FLOPs a size "
            f"that is off by {100 * bias.relative:+.2f}%; the intervals do not hold that"
        )


def _print_size_law(found: "SizeLaw", budgets: Sequence[float]) -> None:
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
            [f"{name} ∝ C^a", _five_digits(exponent.estimate), _five_digits(exponent.low), _five_digits(exponent.high)]
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


@dataclass(frozen=True)
class RepetitionsOptions(RunsOptions):
    """Fit what repeated tokens are worth (Muennighoff et al. 2023), from runs with a column unique_tokens."""

    law: Literal["data-constrained"] = "data-constrained"
    """Its name among the laws."""
    delta: float | None = None
    """Residuals of the log loss beyond this count linearly; None is 0.001."""


@command("law fit repetitions", RepetitionsOptions)
def fit_repetitions(options: RepetitionsOptions) -> None:
    chosen = read_runs(options)
    from napkin.scaling.data_constrained import fit_data_constrained
    from napkin.scaling.law_forms import HUBER_DELTA

    with progress_line("fitting"):
        law = fit_data_constrained(chosen.runs, delta=HUBER_DELTA if options.delta is None else options.delta)
    if options.json:
        print_json(law.as_values())
        return
    say("data-constrained: loss = E + A/N'^alpha + B/D'^beta  (Muennighoff et al. 2023)")
    coefficients = {
        **law.base.coefficients[law.base.groups[0]],
        "R_D*": law.repeated_tokens,
        "R_N*": law.repeated_parameters,
    }
    print_table(
        ["", "estimate", "90% from", "to"],
        [[name, *map(_five_digits, (each.estimate, each.low, each.high))] for name, each in coefficients.items()],
    )
    worth = ", ".join(f"{each} epochs {format_share(law.worth(each).estimate)}" for each in (2, 4, 8, 16, 40))
    say(f"what a token is worth on average, of a new one: {worth}")


def _five_digits(value: float) -> str:
    """A coefficient: five significant digits."""
    return f"{value:#.5g}".rstrip(".") if 1e-4 <= abs(value) < 1e5 or value == 0 else f"{value:.4e}"
