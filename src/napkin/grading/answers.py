"""Simple grading: a choice's letter, a text that is equal but for white space, or a match of a regular expression."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from napkin.errors import NapkinError, NotJudged
from napkin.grading.mathematics.final_answer import MOST_ANSWER, final_answer
from napkin.tokenizer.pre_tokenization import compile_expression, shown

if TYPE_CHECKING:
    import regex


_WORDS = re.compile(r"\\(?:text(?:bf|rm|it|sf|normal)?|math(?:rm|bf)|mbox)\s*\{([^{}]*)\}|\*\*")
_SPACE = re.compile(r"\\[ ,;:!]|\\q?quad(?![a-zA-Z])|~|\s+")
# B, (B), B., (B) Paris, B) Paris, B: Paris.
_LABEL = re.compile(
    r"\(?\s*(?:\(\s*(?P<closed>[A-Za-z])\s*\)|(?P<letter>[A-Za-z])\s*(?P<mark>[).:]?))\)?[.:]?(?P<rest>.*)", re.DOTALL
)
_OTHER = re.compile(r"\([A-Z]\)|\b[B-Z]\b[.):]?|\bA[.):]|\b(?:or|and|not)\b")


def choice_score(answer: str, reference: str) -> float:
    """1 if the final answer is the letter of the reference, alone or before its text.

    >>> choice_score("The answer is (B).", "B"), choice_score("B) Paris", "B"), choice_score("A or B", "B")
    (1.0, 1.0, 0.0)
    """
    letter = chosen_letter(answer)
    return float(letter is not None and letter == reference.strip().strip("()").upper())


def chosen_letter(answer: str) -> str | None:
    """The letter that a text chooses as its final answer; None if it chooses none, or names several."""
    answered = final_answer(answer)
    label = None if answered is None else split_label(answered)
    return None if label is None or names_a_choice(label[1]) else label[0].upper()


def names_a_choice(text: str) -> bool:
    """True if the text behind a letter names another choice: B) or (C)."""
    return _OTHER.search(text) is not None


def split_label(answer: str) -> tuple[str, str] | None:
    r"""The letter of a choice and the text behind it, which may be empty; None for what is not such an answer.

    >>> split_label(r"\textbf{(C)}\ 12"), split_label("(B)"), split_label("B) Paris"), split_label("AB")
    (('C', '12'), ('B', ''), ('B', 'Paris'), None)
    """
    flat = _SPACE.sub(" ", _WORDS.sub(r"\1", answer[:MOST_ANSWER])).strip()
    match = _LABEL.fullmatch(flat) if len(answer) <= MOST_ANSWER else None
    if match is None:
        return None
    rest, is_marked = match["rest"], bool(match["closed"] or match["mark"])
    # (C)x is a product, \textbf{(C)}12 a choice.
    if rest and not (is_marked and (rest[0] == " " or answer.lstrip().startswith("\\"))):
        return None
    return match["closed"] or match["letter"], rest.strip()


def check_choice_reference(reference: str) -> None:
    """Raises NapkinError for a reference that is not a letter."""
    if re.fullmatch(r"\(?[A-Za-z]\)?", reference.strip()) is None:
        raise NapkinError(f"the reference {reference[:40]!r} is not a choice: give its letter")


def exact_score(answer: str, reference: str) -> float:
    """1 if the texts are equal where runs of white space count as one space and those at the ends not at all.

    >>> exact_score(" to  be ", "to be"), exact_score("To be", "to be")
    (1.0, 0.0)
    """
    return float(answer.split() == reference.split())


def format_score(answer: str, reference: str, *, tags: Sequence[str]) -> float:
    """1 if the answer consists of these tags, in this order, each once, with only white space between them.

    The reference is not read. A tag may not stand within another one, nor be empty.

    >>> format_score("<think>2+2</think> <answer>4</answer>", "", tags=["think", "answer"])
    1.0
    >>> format_score("So: <think>2+2</think> <answer>4</answer>", "", tags=["think", "answer"])
    0.0
    """
    rest = answer
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        inside, closed, after = rest.lstrip().removeprefix(opening).partition(closing)
        if not (rest.lstrip().startswith(opening) and closed and inside.strip()):
            return 0.0
        if any(f"<{each}>" in inside or f"</{each}>" in inside for each in tags):
            return 0.0
        rest = after
    return float(not rest.strip())


def read_tags(text: str) -> list[str]:
    """The tags of a format, written with commas between them. Raises NapkinError for what cannot be tags."""
    tags = [each.strip() for each in text.split(",")]
    for tag in tags:
        if re.fullmatch(r"[A-Za-z_][\w-]{0,63}", tag) is None or tags.count(tag) > 1:
            raise NapkinError(f"'format:{text[:80]}' is not a format: name different tags, such as format:think,answer")
    return tags


MOST_SECONDS = 1.0
"""The limit of a match: some expressions try exponentially many ways on a text that is made for it."""
MOST_CHARACTERS = 100_000
"""The longest answer that can match."""


def regex_score(answer: str, reference: str) -> float:
    """1 if the answer, without white space at its ends, matches the expression from end to end.

    Raises NotJudged where that takes too long.
    """
    answer = answer.strip()
    if len(answer) > MOST_CHARACTERS:
        return 0.0
    try:
        return float(_compiled(reference).fullmatch(answer, timeout=MOST_SECONDS) is not None)
    except (TimeoutError, MemoryError):
        raise NotJudged(f"the pattern {shown(reference)!r} takes longer than {MOST_SECONDS:g} s") from None


def check_regex_reference(reference: str) -> None:
    """Raises NapkinError for what is not an expression, or beyond the bounds of what is compiled."""
    _compiled(reference)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    import regex

    try:
        return compile_expression(pattern)
    except (regex.error, RecursionError, MemoryError, OverflowError, KeyError, ValueError) as error:
        raise NapkinError(
            f"the reference {shown(pattern)!r} is not a regular expression ({error}): correct it"
        ) from None
