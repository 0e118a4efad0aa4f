"""`napkin evaluate compare A.json B.json`: two models on the same items."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.terminal import print_json, say
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.evaluation.bits_per_byte import BitsResult
    from napkin.evaluation.tasks.results import TaskResult
    from napkin.evaluation.uncertainty import PairedDifference


@dataclass(frozen=True)
class CompareOptions(JsonOption):
    """Say how two models differ on the same items or windows, by the results that evaluations of them have written: the
    paired difference, its 95% interval, and whether so many items can tell them apart."""

    results: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="A.json B.json")] = ()
    """Two results of tasks, or two of bits per byte."""
    score: str | None = None
    """The score of a task that is compared; None is the one that leads the first result."""


@command("evaluate compare", CompareOptions)
def compare_command(options: CompareOptions) -> None:
    paths = options.results
    if len(paths) != 2:
        raise NapkinError(f"{len(paths)} result{'s' * (len(paths) != 1)} to compare: name two")
    from napkin.evaluation.bits_per_byte import read_bits_result
    from napkin.evaluation.tasks.results import compare_results, read_result

    of_bits = [read_bits_result(Path(path)) for path in paths]
    if any(of_bits):
        _compare_bits(paths, of_bits, json=options.json)
        return
    first, second = (read_result(Path(path)) for path in paths)
    score = options.score or str(first.task.get("score"))
    found = compare_results(first, second, score)
    if options.json:
        print_json({"score": score, **asdict(found)})
        return
    for letter, path, result in (("A", paths[0], first), ("B", paths[1], second)):
        estimate = result.scores[score]
        say(
            f"{letter}  {score} {_percent(estimate.mean)} ± {_percent(estimate.standard_error)}  "
            f"{result.model.get('name')}  {path}"
        )
    _say_differences(first, second)
    _say_found(found)


def _compare_bits(paths: Sequence[str], results: "Sequence[BitsResult | None]", *, json: bool) -> None:
    from napkin.evaluation.bits_per_byte import compare_bits

    first, second = results
    if first is None or second is None:
        raise NapkinError("one result is of bits per byte, the other of a task: compare two of a kind")
    found = compare_bits(first, second)
    if json:
        print_json(found)
        return
    for letter, path, result in (("A", paths[0], first), ("B", paths[1], second)):
        bits = result.bits
        say(f"{letter}  {bits.bits_per_byte:.4f} ± {bits.standard_error:.4f} bits per byte  {path}")
    reach = 1.96 * found.standard_error
    say(
        f"A - B: {found.difference:+.4f} bits per byte, 95% from {found.difference - reach:+.4f} to "
        f"{found.difference + reach:+.4f}; p = {found.p_value:.3g}"
    )


def _say_differences(first: "TaskResult", second: "TaskResult") -> None:
    """Name what differs besides the model."""
    ignored = ("files", "items", "sample")
    names = [name for name in first.task if name not in ignored and first.task[name] != second.task.get(name)]
    if first.model.get("weights_sha256") == second.model.get("weights_sha256"):
        say("both are of the same weights")
    for name in names:
        say(f"not the same: {name} is {first.task[name]!r} for A, {second.task.get(name)!r} for B")


def _say_found(found: "PairedDifference") -> None:
    say(
        f"A - B: {_points(found.difference)} points, 95% from {_points(found.low)} to {_points(found.high)}; "
        f"standard error {_percent(found.standard_error)}, {_percent(found.unpaired_standard_error)} if the items "
        "had not been the same"
    )
    groups = "" if found.groups == found.items else f" in {found.groups:,} groups"
    say(
        f"p = {found.p_value:.3g} ({found.test}); {found.items:,} items{groups}, "
        f"of which {found.discordance:.1%} differ"
    )
    if found.low <= 0 <= found.high:
        say(
            f"These {found.items:,} items cannot tell the two apart: at this disagreement they find differences of "
            f"{_percent(found.detectable)} and more in four of five repetitions."
        )


def _percent(value: float) -> str:
    return f"{100 * value:.2f}%"


def _points(value: float) -> str:
    return f"{100 * value:+.2f}"
