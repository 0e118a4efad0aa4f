"""Multiple choice: the answer is a letter."""

import re

from napkin.errors import NapkinError
from napkin.grading.mathematics.final_answer import MOST_ANSWER, final_answer

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
    found = final_answer(answer)
    label = None if found is None else split_label(found)
    return None if label is None or names_a_choice(label[1]) else label[0].upper()


def names_a_choice(text: str) -> bool:
    """Whether the text behind a letter names another choice: B) or (C)."""
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
