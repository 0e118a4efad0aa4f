"""Multiple choice: the answer is a letter."""

import re

from napkin.alignment.rewards.mathematics.final_answer import final_answer
from napkin.errors import NapkinError

# B, (B), B., (B) Paris, B) Paris, B: Paris; with \text{} or ** around the letter.
_CHOICE = re.compile(
    r"(?:\\text(?:bf)?\{|\*\*)?\(?([A-Za-z])(?:[).:}]|\*\*)*+(?P<rest>(?:(?<=[.:)*}])\s.*)?)", re.DOTALL
)
_OTHER = re.compile(r"\([A-Z]\)|\b[B-Z]\b[.):]?|\bA[.):]|\b(?:or|and|not)\b")


def choice_reward(answer: str, reference: str) -> float:
    """1 if the final answer is the letter of the reference, alone or before its text.

    >>> choice_reward("The answer is (B).", "B"), choice_reward("B) Paris", "B"), choice_reward("A or B", "B")
    (1.0, 1.0, 0.0)
    """
    letter = chosen_letter(answer)
    return float(letter is not None and letter == reference.strip().strip("()").upper())


def chosen_letter(answer: str) -> str | None:
    """The letter that a text chooses as its final answer; None if it chooses none, or names several."""
    found = final_answer(answer)
    match = None if found is None else _CHOICE.fullmatch(found)
    if match is None or _OTHER.search(match["rest"]):
        return None
    return match[1].upper()


def check_choice_reference(reference: str) -> None:
    """Raises NapkinError for a reference that is not a letter."""
    if re.fullmatch(r"\(?[A-Za-z]\)?", reference.strip()) is None:
        raise NapkinError(f"the reference {reference[:40]!r} is not a choice: give its letter")
