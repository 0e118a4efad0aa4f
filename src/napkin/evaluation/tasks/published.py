"""Items as published benchmarks store them, one function per format, and how each is put to a model.

The prompts are those of lm-evaluation-harness 0.4 for the same data, so that scores compare.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from napkin.errors import NapkinError
from napkin.evaluation.tasks.item import Item, Kind

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FINAL_NUMBER = "####"
"""What stands before the answer of an item of GSM8K."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """A published format: the keys by which its rows are known, and what a task of them is."""

    name: str
    kind: Kind
    keys: frozenset[str]
    read: Callable[[Row, str], Item]
    """Makes an item of a row and its name. Raises KeyError, TypeError or NapkinError for one that is malformed."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Task`."""
    matches: Callable[[Row], bool] = lambda row: True


def read_minimal_pair(row: Row, name: str) -> Item:
    """BLiMP (Warstadt et al. 2020)."""
    section = str(row.get("UID", ""))
    return Item(
        str(row.get("pairID", name)) if not section else f"{section}/{row.get('pairID', name)}",
        "",
        (text_of(row, "sentence_good"), text_of(row, "sentence_bad")),
        section=section,
    )


def read_gsm8k(row: Row, name: str) -> Item:
    """GSM8K (Cobbe et al. 2021): reasoning, then `####` and the number."""
    reasoning = text_of(row, "answer")
    answer = reasoning.rpartition(FINAL_NUMBER)[2].strip()
    return Item(name, f"Question: {text_of(row, 'question')}\nAnswer:", answer=answer, shown=reasoning)


def read_hellaswag(row: Row, name: str) -> Item:
    """HellaSwag (Zellers et al. 2019)."""
    if "ctx_a" in row and "ctx_b" in row:
        context = f"{text_of(row, 'ctx_a')} {text_of(row, 'ctx_b').capitalize()}"
    else:
        context = text_of(row, "ctx")
    prompt = f"{text_of(row, 'activity_label')}: {context}" if "activity_label" in row else context
    choices = tuple(_without_marks(each) for each in texts_of(row, "endings"))
    right = int(row["label"])
    return Item(name, _without_marks(prompt), choices, right, shown=_at(choices, right))


def read_arc(row: Row, name: str) -> Item:
    """ARC (Clark et al. 2018), as first published or as a table of the Hugging Face hub."""
    question, listed = row["question"], row.get("choices")
    if isinstance(question, Mapping):
        question, listed = question["stem"], question["choices"]
    if isinstance(listed, Mapping):
        pairs = list(zip(listed["label"], listed["text"], strict=True))
    else:
        pairs = [(each["label"], each["text"]) for each in listed or ()]
    labels, choices = [str(label) for label, _ in pairs], tuple(str(text) for _, text in pairs)
    key = str(row["answerKey"])
    if key not in labels:
        raise NapkinError(f"the answer is {key!r}, the choices are {', '.join(labels)}: name one of them")
    right = labels.index(key)
    return Item(str(row.get("id", name)), f"Question: {question}\nAnswer:", choices, right, shown=_at(choices, right))


def read_mmlu(cells: Sequence[str], name: str, section: str) -> Item:
    """MMLU (Hendrycks et al. 2021): a row of a CSV file without headings: question, choices, letter."""
    question, *choices, letter = cells
    letter = letter.strip()
    if letter not in LETTERS[: len(choices)] or not letter:
        raise NapkinError(f"the answer is {letter!r}: use a letter from A to {LETTERS[len(choices) - 1]}")
    return lettered(name, question, choices, LETTERS.index(letter), section)


def lettered(name: str, question: str, choices: Sequence[str], right: int, section: str) -> Item:
    """An item whose choices stand in the prompt and whose continuations are their letters."""
    letters = tuple(LETTERS[: len(choices)])
    listed = "".join(f"{letter}. {choice}\n" for letter, choice in zip(letters, choices, strict=True))
    return Item(name, f"{question.strip()}\n{listed}Answer:", letters, right, shown=letters[right], section=section)


MMLU_DESCRIPTION = "The following are multiple choice questions (with answers) about {section}.\n\n"

FORMATS = (
    Format(
        "BLiMP",
        "pair",
        frozenset({"sentence_good", "sentence_bad"}),
        read_minimal_pair,
        {"delimiter": ""},
    ),
    Format(
        "GSM8K",
        "number",
        frozenset({"question", "answer"}),
        read_gsm8k,
        {"stop": ("Question:", "</s>", "<|im_end|>")},
        lambda row: FINAL_NUMBER in str(row["answer"]),
    ),
    Format("HellaSwag", "choice", frozenset({"endings", "label"}), read_hellaswag, {"score": "acc_norm"}),
    Format("ARC", "choice", frozenset({"question", "answerKey"}), read_arc, {"score": "acc_norm"}),
)


def format_of(row: Row) -> Format | None:
    """The published format that a row has; None for one of napkin's own."""
    return next((each for each in FORMATS if each.keys <= row.keys() and each.matches(row)), None)


def text_of(row: Row, key: str) -> str:
    """A row's text. Raises NapkinError where it is none."""
    value = row[key]
    if not isinstance(value, str):
        raise NapkinError(f"'{key}' is {type(value).__name__}: use text")
    return value


def texts_of(row: Row, key: str) -> list[str]:
    """A row's list of texts. Raises NapkinError where it is none."""
    values = row[key]
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise NapkinError(f"'{key}' is not a list of texts: use one")
    return values


def _at(choices: Sequence[str], right: int) -> str:
    """Item refuses the index, where it is none."""
    return choices[right] if 0 <= right < len(choices) else ""


def _without_marks(text: str) -> str:
    """Without the marks of WikiHow."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
