"""A task: questions with what is right, and how they are put to a model; and items as published benchmarks store them,
one function per format.

The prompts are those of lm-evaluation-harness 0.4 for the same data, so that scores compare.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from napkin.errors import NapkinError
from napkin.grading.instructions import read_instructions

Kind = Literal["choice", "pair", "last_word", "exact", "number", "math", "instructions"]
"""The likeliest of several continuations; the likelier of two whole texts; a continuation that the model would write; a
generated text that is equal to the answer; one whose final answer is that number, or says the same in LaTeX or plain;
one that follows instructions which a program can verify (`napkin.grading`)."""

KINDS: tuple[Kind, ...] = get_args(Kind)

GENERATED: tuple[Kind, ...] = ("exact", "number", "math", "instructions")
"""Kinds of tasks whose answers the model generates."""


@dataclass(frozen=True)
class Item:
    """One question of a task."""

    name: str
    """Unique in its task; two models are compared item by item, by name."""
    prompt: str
    """The prompt without examples and without the delimiter; empty for a pair."""
    choices: tuple[str, ...] = ()
    """Continuations; of a pair the good text and the bad one; none where the answer is generated."""
    right: int = 0
    """The number of the right choice, from 0."""
    answer: str = ""
    """The answer that a generated text must have."""
    shown: str = ""
    """The text after the prompt where the item is an example: its answer, or the reasoning that ends in it."""
    section: str = ""
    """A subject or phenomenon: examples are taken from the same section, and each section has a score of its own."""
    group: str = ""
    """Items of a group are not independent, such as rewordings of one question."""

    def __post_init__(self) -> None:
        if not self.choices:
            if not self.answer.strip():
                raise NapkinError("the answer is empty: give the text that is right")
            return
        if len(self.choices) < 2:
            raise NapkinError("there is one choice: give two or more")
        if not 0 <= self.right < len(self.choices):
            raise NapkinError(f"the answer is choice {self.right + 1} of {len(self.choices)}: name one that exists")
        for number, choice in enumerate(self.choices):
            if not choice.strip():
                raise NapkinError(f"choice {number + 1} is empty: a continuation needs text")
            if (first := self.choices.index(choice)) != number:
                shown = repr(choice if len(choice) <= 40 else f"{choice[:37]}...")
                raise NapkinError(
                    f"choices {first + 1} and {number + 1} are equal ({shown}): no model can tell them apart"
                )


@dataclass(frozen=True)
class Task:
    """Items of one kind, and how they are put to a model."""

    name: str
    kind: Kind
    items: tuple[Item, ...]
    dev: tuple[Item, ...] = ()
    """Items from which few-shot examples are taken."""
    description: str = ""
    """Stands before everything; {section} in it is the item's section."""
    delimiter: str = " "
    """Text between a prompt and its continuation."""
    separator: str = "\n\n"
    """The text between examples."""
    stop: tuple[str, ...] = ()
    """Texts before which a generated answer ends."""
    max_tokens: int = 256
    """Most tokens of a generated answer."""
    score: str = ""
    """The score that leads; empty is the usual one of the kind."""
    answer_context: str = "Answer:"
    """The text before a choice where its unconditional probability is asked for (Brown et al. 2020, section 2.4)."""
    left_out: tuple[str, ...] = ()
    """Errors of the items that were left out."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file that items were read from, by its name."""
    dev_files: dict[str, str] = field(default_factory=dict)
    """The same for the files of the dev items."""

    @property
    def is_generated(self) -> bool:
        return self.kind in GENERATED

    @property
    def sections(self) -> list[str]:
        return list(dict.fromkeys(item.section for item in self.items))


SCORES: dict[Kind, tuple[str, ...]] = {
    "choice": ("acc", "acc_norm", "acc_bytes", "acc_tokens", "brier"),
    "pair": ("acc",),
    "last_word": ("acc", "nats"),
    "instructions": ("prompt_strict", "prompt_loose"),
}
"""The scores of the items of a kind, the usual one first; of kinds that are not named, exact_match."""
PLAIN_SCORES = ("brier", "nats")
"""Scores that are not shares; of these, less is better."""


def scores_of(kind: Kind) -> tuple[str, ...]:
    """The scores that the items of a kind have, the usual one first."""
    return SCORES.get(kind, ("exact_match",))


LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FINAL_NUMBER = "####"
"""The mark before the answer of an item of GSM8K."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """A published format: the keys that identify its rows, and how they become a task."""

    name: str
    kind: Kind
    keys: frozenset[str]
    read: Callable[[Row, str], Item]
    """Makes an item of a row and its name. Raises KeyError, TypeError or NapkinError for one that is malformed."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values for the fields of `Task`."""
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


def read_lambada(row: Row, name: str) -> Item:
    """LAMBADA (Paperno et al. 2016): a passage whose last word is to be predicted."""
    words = text_of(row, "text").rstrip().rsplit(maxsplit=1)
    if len(words) < 2:
        raise NapkinError("the text has one word: a passage is needed before the last one")
    passage, word = words
    return Item(name, passage, answer=word, shown=word)


def read_ifeval(row: Row, name: str) -> Item:
    """IFEval (Zhou et al. 2023): a prompt with instructions that a program can verify."""
    names, arguments = row["instruction_id_list"], row["kwargs"]
    parameters = arguments if isinstance(arguments, list) else []
    if not isinstance(names, list) or len(parameters) != len(names) or not all(isinstance(p, dict) for p in parameters):
        raise NapkinError("instruction_id_list and kwargs are not lists of the same length")
    reference = json.dumps([list(pair) for pair in zip(names, parameters, strict=True)])
    read_instructions(reference)
    return Item(str(row.get("key", name)), text_of(row, "prompt"), answer=reference)


FORMATS = (
    Format(
        "IFEval",
        "instructions",
        frozenset({"prompt", "instruction_id_list", "kwargs"}),
        read_ifeval,
        {"max_tokens": 1280},
    ),
    Format(
        "LAMBADA",
        "last_word",
        frozenset({"text"}),
        read_lambada,
        matches=lambda row: not row.keys() & {"prompt", "question", "answer", "good"},
    ),
    Format("BLiMP", "pair", frozenset({"sentence_good", "sentence_bad"}), read_minimal_pair, {"delimiter": ""}),
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
    """A row's text. Raises NapkinError if the value is not a text."""
    value = row[key]
    if not isinstance(value, str):
        raise NapkinError(f"'{key}' is {type(value).__name__}: use text")
    return value


def texts_of(row: Row, key: str) -> list[str]:
    """A row's list of texts. Raises NapkinError if the value is not one."""
    values = row[key]
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise NapkinError(f"'{key}' is not a list of texts: use one")
    return values


def _at(choices: Sequence[str], right: int) -> str:
    """An index out of range is refused by Item."""
    return choices[right] if 0 <= right < len(choices) else ""


def _without_marks(text: str) -> str:
    """Remove the marks of WikiHow."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
