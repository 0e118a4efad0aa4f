"""`napkin evaluate compare A.json B.json`: two models on the same items; of several tasks, which difference is real."""

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.cli.evaluate.tasks import shown_score
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.evaluation.bits_per_byte import BitsResult

CONFIDENCE = 0.95
"""The level of all intervals that are printed."""


@dataclass(frozen=True)
class CompareOptions(JsonOption):
    """Say how two models differ on the same items or windows, by the results that evaluations of them have written: the
    paired difference, its 95% interval, and whether so many items can tell them apart; of several tasks, which
    differences are real once all are counted."""

    results: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="A.json B.json")] = ()
    """Two results of tasks, or two of bits per byte; two folders of results, or runs, whose tasks are compared one by
    one; or several pairs A.json B.json."""
    score: str | None = None
    """The score of a task that is compared; None is the one that leads the first result."""


@command("evaluate compare", CompareOptions)
def compare_command(options: CompareOptions) -> None:
    paths = options.results
    if len(paths) < 2 or len(paths) % 2:
        raise NapkinError(f"{len(paths)} result{'s' * (len(paths) != 1)} to compare: name two, or several pairs")
    if len(paths) > 2 or Path(paths[0]).is_dir():
        _compare_tasks(options)
        return
    from napkin.evaluation.bits_per_byte import read_bits_result
    from napkin.evaluation.resampling import resampled_difference
    from napkin.evaluation.tasks.published import PLAIN_SCORES
    from napkin.evaluation.tasks.results import common_scores, read_result
    from napkin.evaluation.uncertainty import paired_difference

    of_bits = [read_bits_result(Path(path)) for path in paths]
    if any(of_bits):
        _compare_bits(paths, of_bits, json=options.json)
        return
    first, second = (read_result(Path(path)) for path in paths)
    score = options.score or str(first.task.get("score"))
    scores = common_scores(first, second, score)
    found, resampled = paired_difference(*scores), resampled_difference(*scores)
    if options.json:
        print_json({"score": score, **asdict(found), "resampled": resampled})
        return
    gap, unit = functools.partial(_gap, score), "" if score in PLAIN_SCORES else " points"
    for letter, path, result in (("A", paths[0], first), ("B", paths[1], second)):
        estimate = result.scores[score]
        say(
            f"{letter}  {score} {shown_score(score, estimate.mean)} ± {shown_score(score, estimate.standard_error)}  "
            f"{result.model.get('name')}  {path}"
        )
    if first.model.get("weights_sha256") == second.model.get("weights_sha256"):
        say("both are of the same weights")
    for name, value in first.task.items():
        if name not in ("files", "items", "sample") and value != second.task.get(name):
            say(f"not the same: {name} is {value!r} for A, {second.task.get(name)!r} for B")
    say(
        f"A - B: {gap(found.difference)}{unit}, 95% from {gap(found.low)} to {gap(found.high)}; "
        f"standard error {shown_score(score, found.standard_error)}, "
        f"{shown_score(score, found.unpaired_standard_error)} if the items "
        "had not been the same"
    )
    groups = "" if found.groups == found.items else f" in {found.groups:,} groups"
    say(
        f"p = {found.p_value:.3g} ({found.test}); {found.items:,} items{groups}, "
        f"of which {found.discordance:.1%} differ"
    )
    tried = (
        "all signs of the differences" if resampled.exact else f"{resampled.draws:,} random signs of the differences"
    )
    say(
        f"by resampling: 95% from {gap(resampled.low)} to {gap(resampled.high)} (bootstrap, "
        f"{resampled.draws:,} samples), p = {resampled.p_value:.3g} ({tried})"
    )
    if found.low <= 0 <= found.high:
        say(
            f"These {found.items:,} items cannot tell the two apart: at this disagreement they find differences of "
            f"{shown_score(score, found.detectable)} and more in four of five repetitions."
        )


def _gap(score: str, value: float) -> str:
    """A difference in points of a hundred, unless the score is not a share."""
    from napkin.evaluation.tasks.published import PLAIN_SCORES

    return f"{value:+.4f}" if score in PLAIN_SCORES else f"{100 * value:+.2f}"


def _compare_tasks(options: CompareOptions) -> None:
    """Compare tasks one by one, and say which differences are real when all of them are looked at."""
    from napkin.evaluation.resampling import holm_adjusted, resampled_difference
    from napkin.evaluation.tasks.results import common_scores, matching_results, read_result

    paths = [Path(each) for each in options.results]
    folders = [each for each in paths if each.is_dir()]
    if len(folders) not in (0, len(paths)) or (folders and len(paths) != 2):
        raise NapkinError("folders and results are mixed: name two folders, or results in pairs")
    pairs = matching_results(*paths) if folders else list(zip(paths[::2], paths[1::2], strict=True))
    rows = []
    for number, (path, other) in enumerate(pairs):
        first, second = read_result(path), read_result(other)
        score = options.score or str(first.task.get("score"))
        scores = common_scores(first, second, score)
        rows.append(
            {
                "task": str(first.task.get("name")),
                "score": score,
                "first": str(path),
                "second": str(other),
                "items": len(scores[0]),
                "mean_first": sum(scores[0]) / len(scores[0]),
                "mean_second": sum(scores[1]) / len(scores[1]),
                **asdict(resampled_difference(*scores, seed=number)),
            }
        )
    for row, adjusted in zip(rows, holm_adjusted([row["p_value"] for row in rows]), strict=True):
        row |= {"adjusted_p_value": adjusted, "real": adjusted < 1 - CONFIDENCE}
    if options.json:
        print_json({"comparisons": rows})
        return
    print_table(
        ("task", "items", "A", "B", "A - B", "95%", "p", "p of all", ""),
        [
            (
                f"{row['task']} {row['score']}",
                f"{row['items']:,}",
                shown_score(row["score"], row["mean_first"]),
                shown_score(row["score"], row["mean_second"]),
                _gap(row["score"], row["difference"]),
                f"{_gap(row['score'], row['low'])} to {_gap(row['score'], row['high'])}",
                f"{row['p_value']:.3g}",
                f"{row['adjusted_p_value']:.3g}",
                "real" if row["real"] else "",
            )
            for row in rows
        ],
    )
    say(
        f"Intervals are the bootstrap's, p the randomization test's, `p of all` adjusted for {len(rows):,} "
        f"comparison{'s' * (len(rows) != 1)} by Holm's procedure: where it is below 5%, the difference is called real."
    )


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
