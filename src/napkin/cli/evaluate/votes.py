"""`napkin evaluate votes FILE`: ratings and win rates from pairwise votes; `napkin evaluate judge MODEL`: votes of a
model."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from napkin.cli.common.files import refuse_existing
from napkin.cli.common.options import JsonOption, Switch, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import notify, print_json, print_table, say
from napkin.cli.evaluate.tasks import items_beside, log_of, percent
from napkin.errors import NapkinError
from napkin.files import atomic_write_text, read_bounded

if TYPE_CHECKING:
    from napkin.evaluation.pairwise import WinRate

_MOST_BOOTSTRAP = 100_000
_MOST_TEMPLATE = 2**20


@dataclass(frozen=True)
class VoteOptions(JsonOption):
    """Rate models by votes between pairs of their answers: Bradley and Terry's strengths with intervals, Elo ratings,
    and the win rate of two models with the position bias of who voted."""

    votes: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="VOTES.jsonl ...")] = ()
    """Files of votes, JSONL: a, b, winner (a, b or tie; a was shown first), and item if votes share a question."""
    models: tuple[str, ...] = ()
    """The two models of the win rate; the two with the most votes between them if none are named."""
    bootstrap: int = 0
    """Make intervals from so many samples of items with replacement, such as 1000; 0 takes the Fisher information, in
    which all votes are independent."""
    seed: int = 0
    """Seed of the samples, and of the orders of Elo's ratings."""


@command("evaluate votes", VoteOptions)
def votes_command(options: VoteOptions) -> None:
    if not options.votes:
        raise NapkinError("no file of votes is named: give JSONL of a, b and winner")
    if not (options.bootstrap == 0 or 100 <= options.bootstrap <= _MOST_BOOTSTRAP):
        raise NapkinError(f"--bootstrap is {options.bootstrap}: use 0, or 100 to {_MOST_BOOTSTRAP:,} samples")
    if len(options.models) not in (0, 2):
        raise NapkinError(f"--models names {len(options.models)}: name two")
    if options.seed < 0:
        raise NapkinError(f"--seed is {options.seed}: use 0 or more")
    from napkin.evaluation.pairwise import most_compared, ratings_of, read_votes, win_rate

    votes = [vote for path in options.votes for vote in read_votes(path)]
    first, second = options.models or most_compared(votes)
    won = win_rate(votes, first, second)
    try:
        ratings, complaint = ratings_of(votes, bootstrap=options.bootstrap, seed=options.seed), None
    except NapkinError as error:
        # A model that never lost has a win rate all the same.
        ratings, complaint = None, str(error)
    if options.json:
        print_json({"votes": len(votes), "ratings": ratings, "no_ratings_because": complaint, "win_rate": won})
        return
    if ratings is not None:
        print_table(
            ("model", "rating", "± s.e.", "95% from", "to", "Elo", "votes", "won"),
            [
                (
                    each.model,
                    f"{each.rating:.0f}",
                    f"{each.standard_error:.0f}",
                    f"{each.low:.0f}",
                    f"{each.high:.0f}",
                    f"{each.elo:.0f}",
                    f"{each.votes:,}",
                    percent(each.wins / each.votes),
                )
                for each in ratings.models
            ],
        )
        say(f"Ratings are Bradley and Terry's; intervals by {ratings.intervals}.")
    else:
        notify(str(complaint))
    _say_win_rate(won)


def _say_win_rate(won: "WinRate") -> None:
    rate, bias = won.rate, won.first_wins
    say(
        f"{won.model} against {won.other}: preferred {percent(rate.mean)} ± {percent(rate.standard_error)} of the "
        f"time, 95% from {percent(rate.low)} to {percent(rate.high)}; p = {won.p_value:.3g} (randomization test), "
        f"{rate.items:,} items"
    )
    agreed = (
        "" if won.consistent is None else f"; {percent(won.consistent)} of verdicts stay when positions are swapped"
    )
    say(
        f"The answer that is shown first is preferred {percent(bias.mean)} ± {percent(bias.standard_error)} of the "
        f"time; {won.both_positions:,} of {rate.items:,} items were judged in both positions{agreed}."
    )


@dataclass(frozen=True)
class JudgeOptions(JsonOption):
    """Let a model judge the answers of two others to the same prompts, each pair in both positions, and write its
    votes, which napkin evaluate votes reads. After an interruption the same command goes on."""

    judge: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="JUDGE")]
    """Folder of the run that judges, or a Hugging Face folder."""
    answers: tuple[str, ...] = ()
    """Two files of answers, JSONL: prompt, answer, and id if prompts repeat; required."""
    names: tuple[str, ...] = ()
    """The names of the two models; those of the files if none are given."""
    out: str = ""
    """File of votes to write, JSONL; required. It must not exist."""
    template: str | None = None
    """Text file of what the judge reads, with {prompt}, {first} and {second}; it is continued by A or B."""
    tie_margin: float = 0.0
    """Difference of the letters' probabilities up to which a vote is a tie."""
    chat: Switch = False
    """Put it as a message in the judge's chat template."""
    weights: Literal["auto", "fp32", "bf16"] = "fp32"
    """Number format of the weights; auto is bf16 where the device multiplies it natively."""


@command("evaluate judge", JudgeOptions)
def judge_command(options: JudgeOptions) -> None:
    if len(options.answers) != 2:
        raise NapkinError(f"--answers names {len(options.answers)} files: name two")
    if not options.out:
        raise NapkinError("no file to write is named: give --out VOTES.jsonl")
    if not 0 <= options.tie_margin < 1:
        raise NapkinError(f"--tie-margin is {options.tie_margin}: use 0 or more, below 1")
    names = options.names or tuple(Path(path).stem for path in options.answers)
    if len(names) != 2 or names[0] == names[1] or not all(names):
        raise NapkinError("the two models need two names: give --names FIRST SECOND")
    out = Path(options.out)
    refuse_existing(out)
    from napkin.evaluation.judging import TEMPLATE, format_vote, judged_votes, read_comparisons
    from napkin.evaluation.pairwise import win_rate
    from napkin.evaluation.tasks.task_file import digests

    comparisons = read_comparisons(options.answers)
    template = TEMPLATE
    if options.template is not None:
        template = read_bounded(options.template, _MOST_TEMPLATE, what="a template").decode("utf-8", "replace").rstrip()
    with progress_line("opening the judge"):
        from napkin.inference.loaded_model import load

        model = load(options.judge, weights=options.weights, on_message=notify)
    settings = {
        "judge": model.about(),
        "answers": [digests([Path(path)]) for path in options.answers],
        "template": template,
        "chat": options.chat,
    }
    with items_beside(out, settings, len(comparisons), "pairs") as log:
        with progress_line("judging") as line:
            votes = judged_votes(
                model,
                comparisons,
                (names[0], names[1]),
                log,
                template=template,
                tie_margin=options.tie_margin,
                chat=options.chat,
                progress=lambda done, total: line(done, total, f"{done:,}/{total:,} pairs"),
            )
        atomic_write_text(out, "".join(map(format_vote, votes)))
        log_of(out).unlink()
    won = win_rate(votes, names[0], names[1])
    if options.json:
        print_json({"votes": len(votes), "out": str(out), "judge": model.about(), "win_rate": asdict(won)})
        return
    _say_win_rate(won)
    say(f"wrote {len(votes):,} votes to {out}", wrap=False)
