"""A model as the judge of two answers to one prompt: each pair is shown twice, with either answer first.

The judge reads both answers and a question, and its verdict is the likelier of the two letters, by their
log-probabilities: no text is drawn, and nothing has to be found in one. A judge that heeds the position prefers the
same letter both times; the two votes then cancel.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from napkin.errors import NapkinError
from napkin.evaluation.pairwise import Vote, Winner
from napkin.evaluation.tasks.published import text_of
from napkin.evaluation.tasks.results import ItemLog, ItemResult
from napkin.evaluation.tasks.running import TaskModel
from napkin.evaluation.tasks.task_file import json_rows, read_text
from napkin.files import StrPath

TEMPLATE = (
    "Here are a prompt and two answers to it.\n\nPrompt:\n{prompt}\n\nAnswer A:\n{first}\n\nAnswer B:\n{second}\n\n"
    "Which answer is better, A or B?\nThe better answer is"
)
LETTERS = (" A", " B")
_BATCH = 16
"""Prompts per batch."""


@dataclass(frozen=True)
class Comparison:
    """A prompt and the answers of two models."""

    item: str
    prompt: str
    answers: tuple[str, str]


def read_comparisons(paths: Sequence[StrPath]) -> list[Comparison]:
    """Read the answers of two models, JSONL of prompt and answer each, which belong together by their id, or prompt.

    Raises NapkinError for a file that is not of this form, and where the two have no prompt in common.
    """
    first, second = (_answers(path) for path in paths)
    found = [
        Comparison(name, prompt, (answer, second[name][1]))
        for name, (prompt, answer) in first.items()
        if name in second and second[name][0] == prompt
    ]
    if not found:
        raise NapkinError(f"'{paths[0]}' and '{paths[1]}' have no prompt in common: give answers to the same prompts")
    return found


def _answers(path: StrPath) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for line, row in json_rows(path, read_text(path)):
        try:
            prompt = text_of(row, "prompt")
            name, answer = str(row.get("id", prompt)), text_of(row, "answer")
        except (KeyError, NapkinError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise NapkinError(f"'{path}' line {line}: {what}: give prompt and answer") from None
        if name in found:
            raise NapkinError(f"'{path}' line {line}: a second answer to {name[:40]!r}: give one of each, or an id")
        found[name] = (prompt, answer)
    return found


def judged_votes(
    model: TaskModel,
    comparisons: Sequence[Comparison],
    names: tuple[str, str],
    log: ItemLog,
    *,
    template: str = TEMPLATE,
    tie_margin: float = 0.0,
    chat: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Vote]:
    """Return two votes for each comparison, in their order: the first model's answer first, then the second's. What is
    in the log is not judged again.

    Where the probabilities of the letters differ by no more than `tie_margin`, the vote is a tie. Raises NapkinError
    for a template without a place for the prompt or an answer, and for answers that exceed the judge's context.
    """
    missing = [each for each in ("{prompt}", "{first}", "{second}") if each not in template]
    if missing:
        raise NapkinError(f"the judge's template has no {missing[0]}: give each of prompt, first and second its place")
    letters = LETTERS if not chat else tuple(letter.strip() for letter in LETTERS)
    rest = [each for each in comparisons if each.item not in log.done]
    for start in range(0, len(rest), _BATCH):
        progress(len(comparisons) - len(rest) + start, len(comparisons))
        batch = rest[start : start + _BATCH]
        pairs = []
        for each in batch:
            for first, second in (each.answers, each.answers[::-1]):
                context = _context(model, template, each, first, second, chat=chat)
                pairs += [(context, model.encode(letter)) for letter in letters]
        logprobs = model.logprobs(pairs)
        log.add(
            [
                ItemResult(each.item, "", "", {}, logprobs=tuple(logprobs[4 * number : 4 * number + 4]))
                for number, each in enumerate(batch)
            ]
        )
    progress(len(comparisons), len(comparisons))
    votes = []
    for each in comparisons:
        logprobs = log.done[each.item].logprobs
        for shown, letters_of in ((names, logprobs[:2]), (names[::-1], logprobs[2:])):
            # The probability of the first letter among the two.
            chance = 1 / (1 + math.exp(min(700.0, letters_of[1] - letters_of[0])))
            winner: Winner = "tie" if abs(2 * chance - 1) <= tie_margin else "a" if chance > 0.5 else "b"
            votes.append(Vote(shown[0], shown[1], winner, each.item))
    return votes


def _context(
    model: TaskModel, template: str, each: Comparison, first: str, second: str, *, chat: bool
) -> tuple[int, ...]:
    # One after another, so that braces in a text stay unchanged.
    parts = {"{prompt}": each.prompt, "{first}": first, "{second}": second}
    text = "".join(parts.get(piece, piece) for piece in _pieces(template))
    ids = model.encode_chat([("user", text)]) if chat else [*model.start_ids, *model.encode(text)]
    if len(ids) >= model.context_length:
        raise NapkinError(
            f"prompt and answers of {each.item[:40]!r} have {len(ids)} tokens, the judge's context is "
            f"{model.context_length}: use a judge with a longer one, or leave such answers out"
        )
    return tuple(ids) or tuple(model.document_ids)


def _pieces(template: str) -> list[str]:
    pieces, rest = [], template
    while rest:
        places = {name: rest.find(name) for name in ("{prompt}", "{first}", "{second}") if name in rest}
        if not places:
            return [*pieces, rest]
        name = min(places, key=lambda each: places[each])
        pieces += [rest[: places[name]], name]
        rest = rest[places[name] + len(name) :]
    return pieces


def format_vote(vote: Vote) -> str:
    """A vote as a line of JSON, which `read_votes` reads."""
    return json.dumps({"a": vote.a, "b": vote.b, "winner": vote.winner, "item": vote.item}) + "\n"
