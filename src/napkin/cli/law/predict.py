"""`napkin law predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.cli.law.runs import LawName, Sources, read_runs
from napkin.cli.law.tables import as_json, print_optima
from napkin.errors import NapkinError
from napkin.units import format_count, parse_count

if TYPE_CHECKING:
    from napkin.scaling.fitted_law import FittedLaw


@dataclass(frozen=True)
class PredictOptions(JsonOption):
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
    drop_highest: int = 0
    """Leave out so many runs of highest loss."""
    loss_column: str | None = None
    """Column of the loss in the CSV file."""


@command("law predict", PredictOptions)
def main(options: PredictOptions) -> None:
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

    chosen = read_runs(options.runs, loss_column=options.loss_column, drop_highest=options.drop_highest)
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
                    group: {name: as_json(getattr(each, name)) for name in ("parameters", "tokens", "loss")}
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
                "losses": {group: as_json(each) for group, each in found.items()},
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
