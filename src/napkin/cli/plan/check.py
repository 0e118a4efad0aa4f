"""`napkin check FILE.py`: the gradient of a program in every arrangement that must not change it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.options import JsonOption, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.units import format_three_digits

if TYPE_CHECKING:
    from napkin.hooks.gradient_check import GradientCheck


@dataclass(frozen=True)
class CheckOptions(JsonOption):
    """Compute the gradient of the same examples in one micro-batch, in another order, with more padding, in several
    micro-batches, packed and on several ranks. It must be the same, up to rounding, which is measured; where it is not,
    say what is different and why. The exit status is 1 then.

    The file defines build(), which returns the model, and loss(model, batch), the mean loss of a micro-batch, or
    loss(model, batch, tokens), its part of a sum over that many tokens; or gradients(model, examples, arrangement), a
    loop of its own; or trainer(**arguments), which passes them on to the TrainingArguments of the Trainer that it
    returns. It is code that runs with your rights."""

    program: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE.py")]
    """A Python file, or FILE.py:NAME for one of several programs in it."""
    examples: int = 8
    """Number of examples to compare, a multiple of 4, chosen among the first thousand from the shortest to the
    longest."""
    ranks: int = 2
    """Processes of this machine that compute a batch together; 1 leaves them out."""
    arrangement: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An arrangement to compare: again, alone, permuted, padding, micro-batches, packed or ranks. Can be given several
    times; all by default."""
    without_dropout: Switch = False
    """Set all dropout of the model to 0 first: with dropout, no two steps are the same."""


@command("check", CheckOptions)
def main(options: CheckOptions) -> int:
    with progress_line(f"checking {options.program}") as line:
        from napkin.hooks.gradient_check import check

        result = check(
            options.program,
            examples=options.examples,
            ranks=options.ranks,
            arrangements=options.arrangement,
            without_dropout=options.without_dropout,
            progress=line.retitle,
        )
    if options.json:
        print_json(result.as_values())
    else:
        _print(result)
    return 0 if result.equal else 1


def _print(found: "GradientCheck") -> None:
    rows = [
        (
            result.name,
            f"{result.difference:.1e}",
            f"{result.bound:.1e}",
            format_three_digits(result.factor),
            "differs" if result.differs else "same",
        )
        for result in found.results
    ]
    print_table(("arrangement", "difference", "of rounding", "factor", "gradient"), rows)
    for cause in found.causes:
        say(cause)
    for name, why in found.not_offered.items():
        say(f"{name}: not compared, {why}")
    for note in found.notes:
        say(note)
    what = f", {found.normalisation}," if found.normalisation else ""
    if found.equal:
        say(f"the gradient of {found.examples} examples{what} is the same in all arrangements")
