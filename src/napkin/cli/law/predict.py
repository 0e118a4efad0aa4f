"""`napkin law predict` says what a law expects, `napkin law compare` which law holds."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from napkin.cli.common.options import command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.cli.law.tables import LawName, RunsOptions, Sources, print_optima, read_runs
from napkin.errors import NapkinError
from napkin.units import format_count, format_share, parse_count

if TYPE_CHECKING:
    from napkin.scaling.fitted_law import FittedLaw
    from napkin.scaling.law_comparison import LawComparison


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
    """Which one, where the runs have several; None is all."""
    law: LawName = "chinchilla"
    """Law to fit, where runs are given."""


@command("law predict", PredictOptions)
def predict(options: PredictOptions) -> None:
    params, tokens, flops = (
        None if each is None else float(_positive(each, name))
        for each, name in ((options.params, "params"), (options.tokens, "tokens"), (options.flops, "flops"))
    )
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


def _positive(text: str, name: str) -> int:
    count = parse_count(text)
    if count < 1:
        raise NapkinError(f"--{name} is {text}: use 1 or more")
    return count


def _law(options: PredictOptions) -> "FittedLaw":
    if len(options.runs) == 1 and options.runs[0].endswith(".json") and not Path(options.runs[0]).is_dir():
        from napkin.scaling.fitted_law import read_law

        return read_law(options.runs[0])
    from napkin.scaling.law_fit import fit_law

    chosen = read_runs(options)
    with progress_line("fitting"):
        return fit_law(chosen.runs, options.law).law


def _print_optimum(law: "FittedLaw", groups: tuple[str, ...], flops: float, *, as_program: bool) -> None:
    found = {group: law.optimum(flops, group=group) for group in groups}
    if as_program:
        print_json(
            {
                "law": law.form.name,
                "flops": flops,
                "extrapolation": law.extrapolation(flops),
                "optima": {
                    group: {name: asdict(getattr(each, name)) for name in ("parameters", "tokens", "loss")}
                    for group, each in found.items()
                },
            }
        )
        return
    for group, each in found.items():
        if group:
            say(f"{group}:")
        print_optima([each], law.ranges["compute"][1])
        ratio = each.tokens.estimate / each.parameters.estimate
        say(f"{ratio:.3g} tokens per parameter")


def _print_loss(law: "FittedLaw", groups: tuple[str, ...], params: float, tokens: float, *, as_program: bool) -> None:
    found = {group: law.predict(params, tokens, group=group) for group in groups}
    flops = 6 * params * tokens
    if as_program:
        print_json(
            {
                "law": law.form.name,
                "parameters": params,
                "tokens": tokens,
                "flops": flops,
                "extrapolation": law.extrapolation(flops),
                "losses": {group: asdict(each) for group, each in found.items()},
            }
        )
        return
    rows = [
        [
            *([group] if len(law.groups) > 1 else []),
            f"{each.estimate:.4f}",
            f"{each.low:.4f} to {each.high:.4f}",
            f"±{100 * each.relative:.2g}%",
        ]
        for group, each in found.items()
    ]
    head = [*(["training set"] if len(law.groups) > 1 else []), "loss", "90%", "half width"]
    print_table(head, rows, align="l" * (len(head) - 3) + "rlr")
    say(
        f"{format_count(params)} parameters, {format_count(tokens)} tokens, {flops:.3g} FLOPs: "
        f"{law.extrapolation(flops):.3g} × the largest run"
    )


@dataclass(frozen=True)
class CompareOptions(RunsOptions):
    """Fit each law to the runs of least compute, and predict the others: which law holds, and whether its intervals
    do."""

    share: float = 0.7
    """The share of the runs, those of least compute, that laws are fitted to."""


@command("law compare", CompareOptions)
def compare(options: CompareOptions) -> None:
    chosen = read_runs(options)
    from napkin.scaling.law_comparison import compare_laws

    with progress_line("fitting"):
        found = compare_laws(chosen.runs, share=options.share)
    if options.json:
        print_json(
            {**asdict(found), "scores": [{**asdict(each), "errors": each.errors.tolist()} for each in found.scores]}
        )
        return
    _print_comparison(found)


def _print_comparison(found: "LawComparison") -> None:
    say(
        f"fitted to the {found.fitted} runs of least compute, predicting the {found.predicted} others, up to "
        f"{found.extrapolation:.3g} × the compute:"
    )
    print_table(
        ["law", "median error", "worst", "bias", "in 90% interval", "half width", "median of fitted", "loss ="],
        [
            [
                each.law,
                format_share(each.median_error),
                format_share(each.worst_error),
                f"{100 * each.bias:+.2f}%",
                format_share(each.coverage),
                format_share(each.half_width),
                format_share(each.in_sample),
                each.formula,
            ]
            for each in found.scores
        ],
        align="lrrrrrrl",
    )
    best = found.scores[0]
    say(f"{best.law} holds best: {format_share(best.median_error)} median error on runs that it has not seen")
    if found.tied:
        say(f"these runs cannot tell it apart from {', '.join(found.tied)}")
    for name, reason in found.failed.items():
        say(f"{name}: {reason}")
