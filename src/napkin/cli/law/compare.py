"""`napkin law compare`."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.cli.law.runs import Sources, read_runs
from napkin.units import format_share

if TYPE_CHECKING:
    from napkin.scaling.law_comparison import LawComparison


@dataclass(frozen=True)
class CompareOptions(JsonOption):
    """Fit each law to the runs of least compute, and predict the others: which law holds, and whether its intervals
    do."""

    runs: Sources = ()
    """A CSV file with columns for parameters, tokens (or FLOPs) and loss, folders of runs, or `example`."""
    share: float = 0.7
    """The share of the runs, those of least compute, that laws are fitted to."""
    drop_highest: int = 0
    """Leave out so many runs of highest loss."""
    loss_column: str | None = None
    """Column of the loss in the CSV file."""


@command("law compare", CompareOptions)
def main(options: CompareOptions) -> None:
    chosen = read_runs(options.runs, loss_column=options.loss_column, drop_highest=options.drop_highest)
    from napkin.scaling.law_comparison import compare_laws

    with progress_line("fitting"):
        found = compare_laws(chosen.runs, share=options.share)
    if options.json:
        print_json(
            {**asdict(found), "scores": [{**asdict(each), "errors": each.errors.tolist()} for each in found.scores]}
        )
        return
    _print(found)


def _print(found: "LawComparison") -> None:
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
