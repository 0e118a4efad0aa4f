"""`napkin law fit` in its forms: a law of all runs, of the best sizes among them, and of repeated tokens; `napkin law
predict` says what a law expects, `napkin law compare` which law holds.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from napkin.cli.common.files import refuse_existing
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.errors import NapkinError
from napkin.units import format_count, format_share, parse_count

if TYPE_CHECKING:
    from napkin.scaling.fitted_law import FittedLaw, Interval, Optimum
    from napkin.scaling.law_fit import LawFit, LeftOut
    from napkin.scaling.observations import Observation


LawName = Literal["chinchilla", "gadre", "kaplan", "kaplan-n", "kaplan-d", "kaplan-c"]

Sources = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CSV|RUN ...")]


@dataclass(frozen=True)
class RunsOptions(JsonOption):
    """Options of commands that read finished runs."""

    runs: Sources = ()
    """A CSV file with columns for parameters, tokens (or FLOPs) and loss, folders of runs, or `example`: Chinchilla's
    runs. Runs whose loss is not a finite number are left out."""
    drop_highest: int = 0
    """Leave out this many runs with the highest loss."""
    loss_column: str | None = None
    """Column of the loss in the CSV file; None is the one called loss, or the only one with it in its name."""


@dataclass(frozen=True)
class ChosenRuns:
    """The runs that a law is fitted to, and those that were left out on request."""

    runs: "list[Observation]"
    dropped: "list[Observation]"
    diverged: tuple[str, ...]
    notes: tuple[str, ...]
    name: str


def read_runs(options: RunsOptions) -> ChosenRuns:
    """Read a CSV file, run folders or, as "example", Chinchilla's runs; runs that are left out are named in a
    message."""
    from napkin.scaling.observations import EXAMPLE, read_observations, read_run_observations
    from napkin.scaling.observations import drop_highest as without_highest

    sources, drop_highest = options.runs, options.drop_highest
    if not sources:
        raise NapkinError("no runs are given: name a CSV file, folders of runs, or `example` for Chinchilla's runs")
    if drop_highest < 0:
        raise NapkinError(f"--drop-highest is {drop_highest}: use 0 or more")
    example = list(sources) == ["example"] and not Path("example").exists()
    if example or (len(sources) == 1 and not Path(sources[0]).is_dir()):
        observations = read_observations(EXAMPLE if example else sources[0], loss=options.loss_column)
    else:
        files = [each for each in sources if not Path(each).is_dir()]
        if files:
            raise NapkinError(f"'{files[0]}' is not a folder: name one CSV file alone, or folders of runs")
        if options.loss_column is not None:
            raise NapkinError("--loss-column is for CSV files: leave it out for runs")
        observations = read_run_observations(sources)
    if drop_highest >= len(observations.runs):
        raise NapkinError(f"--drop-highest is {drop_highest}, there are {len(observations.runs)} runs: leave some")
    kept, dropped = without_highest(observations.runs, drop_highest)
    for note in observations.notes:
        notify(f"note: {note}")
    if observations.diverged:
        shown = _first(observations.diverged, 5)
        notify(f"note: {len(observations.diverged)} left out, as the loss is not a finite number: {shown}")
    return ChosenRuns(
        kept, dropped, observations.diverged, observations.notes, "example" if example else ", ".join(sources)
    )


def print_optima(optima: "Sequence[Optimum]", largest: float) -> None:
    """A row per budget."""
    rows = [
        [
            f"{each.flops:.3g}",
            f"{each.flops / largest:.3g}",
            *(format_count(each.parameters.estimate), span(each.parameters)),
            *(format_count(each.tokens.estimate), span(each.tokens)),
            *(f"{each.loss.estimate:.4f}", f"{each.loss.low:.4f} to {each.loss.high:.4f}"),
        ]
        for each in optima
    ]
    headings = ["FLOPs", "× largest run", "parameters", "90%", "tokens", "90%", "loss", "90%"]
    print_table(headings, rows, align="rrrlrlrl")


def span(interval: "Interval") -> str:
    """An interval of counts."""
    return f"{format_count(interval.low)} to {format_count(interval.high)}"


_SHOWN_INFLUENCE = 5


@dataclass(frozen=True)
class BudgetsOptions(RunsOptions):
    """Options for laws that have optima."""

    flops: tuple[str, ...] = ()
    """Budgets to give the best size for, such as 1e23; none is 10 and 100 times the largest run."""

    def read(self) -> tuple[ChosenRuns, list[float]]:
        """The runs, and the budgets in FLOPs."""
        # Checked before the runs are read, whose reader may print notes: an error is one line.
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
        notify(
            f"note: {len(below)} of the runs have a loss below the fitted floor, "
            f"{_first([run.name for run in below], 5)}: it cannot hold for them; look whether their loss is of the "
            "same text"
        )
    if options.page is not None:
        from napkin.scaling.law_page import write_law_page

        write_law_page(Path(options.page), fitted, chosen.name, influence[:_SHOWN_INFLUENCE], budgets)
    if options.out is not None:
        fitted.law.write(options.out)
    if options.json:
        with_dropped = beside and {
            group: {name: interval.estimate for name, interval in coefficients.items()}
            for group, coefficients in beside.law.coefficients.items()
        }
        left_out = [
            {"run": each.run.source, **{name: getattr(each, name) for name in ("error", "shift", "coefficients")}}
            for each in influence
        ]
        dropped = [run.source for run in chosen.dropped]
        chosen_values = {"diverged": list(chosen.diverged), "notes": list(chosen.notes), "dropped": dropped}
        print_json({**fitted.as_values(budgets), **chosen_values, "with_dropped": with_dropped, "left_out": left_out})
        return
    _print(chosen, fitted, beside, influence[:_SHOWN_INFLUENCE], budgets)
    for path in (options.out, options.page):
        if path is not None:
            say(f"wrote {path}")


def _print(
    chosen: ChosenRuns, fitted: "LawFit", beside: "LawFit | None", influence: "list[LeftOut]", budgets: list[float]
) -> None:
    law, form = fitted.law, fitted.law.form
    say(f"{form.name}: loss = {form.formula}  ({form.source})")
    rows = []
    for group in law.groups:
        for name, interval in law.coefficients[group].items():
            shared = name in form.exponents or name == form.outer_exponent
            if not shared or group == law.groups[0]:
                label = name if shared or not group else f"{name}, {group}"
                with_dropped = [_five_digits(beside.law.coefficients[group][name].estimate)] if beside else []
                rows.append([label, *_with_interval(interval), *with_dropped])
    print_table(["", "estimate", "90% from", "to", *["with the dropped runs"] * bool(beside)], rows)
    if beside is not None:
        losses = ", ".join(f"{run.loss:.2f}" for run in chosen.dropped[:8])
        after = beside.law.coefficients[law.groups[0]]
        changed = ", ".join(f"{name} {_five_digits(after[name].estimate)}" for name in law.coefficients[law.groups[0]])
        say(f"{len(chosen.dropped)} runs were left out (loss {losses}); with them: {changed}")
    scatter, rms = format_share(fitted.scatter), format_share(fitted.rms)
    say(f"{len(fitted.runs)} runs scatter about it by {scatter} (robust), rms {rms}")
    if far := fitted.outliers:
        say(
            f"{len(far)} of them by more than 5 times that: {_first([run.name for run in far], 8)}; such runs have "
            "little weight, and do not count in the scatter that is expected of a new run"
        )
    for line in _discrepancy(fitted):
        say(line)
    least, most = law.ranges["compute"]
    say(f"runs of {least:.3g} to {most:.3g} FLOPs; residuals are of the log loss, Huber's delta {fitted.delta:.2g}")
    say()
    rows = []
    for each in influence:
        coefficients = ", ".join(f"{name} {_five_digits(value)}" for name, value in each.coefficients.items())
        moved = [f"{100 * each.error:+.2f}%", f"{each.shift:.2f}"]
        rows.append([each.run.name, f"{each.run.loss:.4f}", *moved, coefficients])
    print_table(["left out", "loss", "off the others' law", "moves by", "the law is then"], rows, align="lrrrl")
    say("“moves by” is the largest change of a coefficient, in half widths of its interval.")
    for group in law.groups:
        if optima := law.optima(budgets, group=group):
            say()
            say("best size and tokens" + (f", {group}" if group else "") + ", with 6·N·D FLOPs:")
            print_optima(optima, most)


def _discrepancy(fitted: "LawFit") -> Iterator[str]:
    """The sentences on how far the law errs beyond its runs, and what its intervals make of that."""
    from napkin.scaling.rolling_origin import rolling_error

    rate = fitted.law.rate
    estimate, low, high = (f"{100 * math.log(2) * each:.2g}%" for each in (rate.estimate, rate.low, rate.high))
    if fitted.origins:
        errors = rolling_error(fitted.origins)
        yield (
            f"fitted to the runs up to each of {errors.origins} budgets, it predicted those beyond, up to "
            f"{errors.farthest:.3g} × the FLOPs, with {100 * errors.median:.2g}% median error, nine in ten within "
            f"{100 * errors.most:.2g}%"
        )
    yield (
        f"its own error beyond the runs, in intervals of losses, is taken to grow by {estimate} ({low} to {high}) per "
        "doubling of FLOPs"
    )


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
    fitted = (approach_1 if options.approach == 1 else approach_2)(chosen.runs)
    bias = None
    if options.approach == 2:
        # Too few runs for approach 3 have no law to measure the bias with.
        with contextlib.suppress(NapkinError):
            bias = approach_2_bias(chosen.runs, fit_law(chosen.runs, draws=2).law, budgets[-1])
    if options.json:
        print_json({**fitted.as_values(budgets), "bias": None if bias is None else bias.as_values()})
        return
    what = "runs that none of as few FLOPs beats" if fitted.approach == 1 else "minima of parabolas, loss over log size"
    say(f"approach {fitted.approach}: {what}")
    rows = [
        [
            f"{each.flops:.3g}",
            str(each.runs),
            format_count(each.parameters) + (" (edge)" if each.at_edge else ""),
            format_count(each.tokens),
            f"{each.loss:.4f}",
            f"{each.tokens / each.parameters:.3g}",
        ]
        for each in fitted.best
    ]
    print_table(["FLOPs", "runs", "parameters", "tokens", "loss", "tokens/parameter"], rows, align="rrrrrr")
    say()
    laws = (("parameters", fitted.parameters), ("tokens", fitted.tokens))
    exponents = [[f"{name} ∝ C^a", *_with_interval(law.exponents["flops"])] for name, law in laws]
    print_table(["", "a", "90% from", "to"], exponents)
    say()
    rows = []
    for flops in budgets:
        parameters, tokens = ([format_count(interval.estimate), span(interval)] for interval in fitted.optimum(flops))
        loss = fitted.best_loss(flops)
        losses = ["-", "-"] if loss is None else [f"{loss.estimate:.4f}", f"{loss.low:.4f} to {loss.high:.4f}"]
        rows.append([f"{flops:.3g}", *parameters, *tokens, *losses])
    print_table(["FLOPs", "parameters", "90%", "tokens", "90%", "loss", "90%"], rows, align="rrlrlrl")
    if fitted.loss is not None:
        say(f"losses are by {fitted.loss.form.formula} through those of the best sizes")
    for note in fitted.notes:
        say(note)
    if bias is not None:
        say(
            f"bias: on losses without noise of the law that fits these runs, approach 2 finds an exponent of "
            f"{bias.found_exponent:.4f} where {bias.true_exponent:.4f} is true, and at {bias.flops:.3g} FLOPs a size "
            f"that is off by {100 * bias.relative:+.2f}%; the intervals do not hold that"
        )


@dataclass(frozen=True)
class RepetitionsOptions(RunsOptions):
    """Fit what repeated tokens are worth (Muennighoff et al. 2023), from runs with a column unique_tokens."""

    law: Literal["data-constrained"] = "data-constrained"
    """Name of the law."""
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
    rows = [[name, *_with_interval(each)] for name, each in coefficients.items()]
    print_table(["", "estimate", "90% from", "to"], rows)
    worth = ", ".join(f"{each} epochs {format_share(law.worth(each).estimate)}" for each in (2, 4, 8, 16, 40))
    say(f"what a token is worth on average, of a new one: {worth}")


def _first(names: Sequence[str], n: int) -> str:
    return ", ".join(names[:n]) + (" ..." if len(names) > n else "")


def _with_interval(interval: "Interval") -> list[str]:
    return [_five_digits(value) for value in (interval.estimate, interval.low, interval.high)]


def _five_digits(value: float) -> str:
    """A coefficient: five significant digits."""
    return f"{value:#.5g}".rstrip(".") if 1e-4 <= abs(value) < 1e5 or value == 0 else f"{value:.4e}"


@dataclass(frozen=True)
class PredictOptions(RunsOptions):
    """Predict the loss of a model with --params and --tokens, or the best size and tokens for --flops; with 90%
    intervals."""

    runs: Sources = ()
    """A law that `napkin law fit --out` wrote (.json), or what it is fitted to: a CSV file, folders of runs, or
    `example`."""
    params: str | None = None
    """Parameters, such as 70B."""
    tokens: str | None = None
    """Tokens, such as 1.4T."""
    flops: str | None = None
    """FLOPs of the training, such as 1e23; with --params alone, tokens are FLOPs/(6·parameters), and the other way
    round."""
    training_set: str | None = None
    """Training set whose runs are read, where there are several; None is all."""
    law: LawName = "chinchilla"
    """Law to fit, where runs are given."""


@command("law predict", PredictOptions)
def predict(options: PredictOptions) -> None:
    params, tokens, flops = (_positive(options, name) for name in ("params", "tokens", "flops"))
    if params is None and tokens is None and flops is None:
        raise NapkinError("there is nothing to predict for: give --params and --tokens, or --flops")
    if params is not None and tokens is not None and flops is not None:
        raise NapkinError("--params, --tokens and --flops are one too many, as FLOPs are 6·N·D: leave one out")
    if flops is None and (params is None or tokens is None):
        raise NapkinError(f"--{'tokens' if tokens is None else 'params'} is missing: give it, or --flops")
    law = _law(options)
    groups = law.groups if options.training_set is None else (law.group(options.training_set),)
    if params is None and tokens is None:
        assert flops is not None
        _print_optimum(law, groups, flops, as_program=options.json)
        return
    if flops is not None:
        params, tokens = (params, flops / (6 * params)) if params is not None else (flops / (6 * (tokens or 1)), tokens)
    assert params is not None
    assert tokens is not None
    _print_loss(law, groups, params, tokens, as_program=options.json)


def _positive(options: PredictOptions, name: str) -> float | None:
    text = getattr(options, name)
    if text is None:
        return None
    count = parse_count(text)
    if count < 1:
        raise NapkinError(f"--{name} is {text}: use 1 or more")
    return float(count)


def _law(options: PredictOptions) -> "FittedLaw":
    if len(options.runs) == 1 and options.runs[0].endswith(".json") and not Path(options.runs[0]).is_dir():
        from napkin.scaling.fitted_law import read_law

        return read_law(options.runs[0])
    from napkin.scaling.law_fit import fit_law

    chosen = read_runs(options)
    with progress_line("fitting"):
        return fit_law(chosen.runs, options.law).law


def _print_optimum(law: "FittedLaw", groups: tuple[str, ...], flops: float, *, as_program: bool) -> None:
    by_group = {group: law.optimum(flops, group=group) for group in groups}
    if as_program:
        optima = {
            group: {name: asdict(getattr(each, name)) for name in ("parameters", "tokens", "loss")}
            for group, each in by_group.items()
        }
        about = {"law": law.form.name, "flops": flops, "extrapolation": law.extrapolation(flops)}
        print_json({**about, "optima": optima})
        return
    for group, each in by_group.items():
        if group:
            say(f"{group}:")
        print_optima([each], law.ranges["compute"][1])
        ratio = each.tokens.estimate / each.parameters.estimate
        say(f"{ratio:.3g} tokens per parameter")


def _print_loss(law: "FittedLaw", groups: tuple[str, ...], params: float, tokens: float, *, as_program: bool) -> None:
    by_group = {group: law.predict(params, tokens, group=group) for group in groups}
    flops = 6 * params * tokens
    if as_program:
        about = {"law": law.form.name, "parameters": params, "tokens": tokens, "flops": flops}
        losses = {group: asdict(each) for group, each in by_group.items()}
        print_json({**about, "extrapolation": law.extrapolation(flops), "losses": losses})
        return
    several = len(law.groups) > 1
    rows = []
    for group, each in by_group.items():
        figures = [f"{each.estimate:.4f}", f"{each.low:.4f} to {each.high:.4f}", f"±{100 * each.relative:.2g}%"]
        rows.append([*[group] * several, *figures])
    head = [*["training set"] * several, "loss", "90%", "half width"]
    print_table(head, rows, align="l" * several + "rlr")
    say(
        f"{format_count(params)} parameters, {format_count(tokens)} tokens, {flops:.3g} FLOPs: "
        f"{law.extrapolation(flops):.3g} × the largest run"
    )


@dataclass(frozen=True)
class CompareOptions(RunsOptions):
    """Fit each law to the runs of least compute, and predict the others: which law holds, and whether its intervals
    do; and the error of each from budget to budget, by rolling the origin."""

    share: float = 0.7
    """The share of the runs, those of least compute, that laws are fitted to."""


@command("law compare", CompareOptions)
def compare(options: CompareOptions) -> None:
    chosen = read_runs(options)
    from napkin.scaling.law_fit import compare_laws

    with progress_line("fitting"):
        comparison = compare_laws(chosen.runs, share=options.share)
    if options.json:
        print_json(
            {
                **asdict(comparison),
                "scores": [{**asdict(each), "errors": each.errors.tolist()} for each in comparison.scores],
            }
        )
        return
    say(
        f"fitted to the {comparison.fitted} runs of least compute, predicting the {comparison.predicted} others, up to "
        f"{comparison.extrapolation:.3g} × the compute:"
    )
    rows = [
        [
            each.law,
            *map(format_share, (each.median_error, each.worst_error)),
            f"{100 * each.bias:+.2f}%",
            *map(format_share, (each.coverage, each.half_width, each.in_sample)),
            "-" if each.rolling is None else format_share(each.rolling.median),
            "-" if each.rolling is None else format_share(each.rolling.most),
            each.formula,
        ]
        for each in comparison.scores
    ]
    headings = ["law", "median error", "worst", "bias", "in 90% interval", "half width", "median of fitted"]
    print_table([*headings, "rolling", "9 in 10", "loss ="], rows, align="lrrrrrrrrl")
    best = comparison.scores[0]
    if best.rolling is not None:
        say(
            f"rolling: fitted to the runs up to each of {best.rolling.origins} budgets, predicting those beyond; its "
            "median error, and what nine in ten are within"
        )
    say(f"{best.law} holds best: {format_share(best.median_error)} median error on runs that it has not seen")
    if comparison.tied:
        say(f"these runs cannot tell it apart from {', '.join(comparison.tied)}")
    for name, reason in comparison.failed.items():
        say(f"{name}: {reason}")
