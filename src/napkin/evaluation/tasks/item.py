"""A task: questions with what is right, and how they are put to a model."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from napkin.errors import NapkinError

Kind = Literal["choice", "pair", "exact", "number", "math"]
"""The likeliest of several continuations; the likelier of two whole texts; a generated text that is equal to the
answer; one whose final answer is that number, or says the same in LaTeX or plain (`napkin.grading`)."""

KINDS: tuple[Kind, ...] = get_args(Kind)

GENERATED: tuple[Kind, ...] = ("exact", "number", "math")
"""Kinds whose answers the model writes."""


@dataclass(frozen=True)
class Item:
    """One question."""

    name: str
    """Unique in its task; two models are compared item by item, by name."""
    prompt: str
    """What the model is asked, without examples and without the delimiter; empty for a pair."""
    choices: tuple[str, ...] = ()
    """Continuations; of a pair the good text and the bad one; none where the answer is generated."""
    right: int = 0
    """Which of the choices, from 0."""
    answer: str = ""
    """What a generated answer must be."""
    shown: str = ""
    """What stands after the prompt where the item is an example: its answer, or the reasoning that ends in it."""
    section: str = ""
    """A subject or phenomenon: examples are of the same one, and its score is told by itself."""
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
                raise NapkinError(
                    f"choices {first + 1} and {number + 1} are equal ({_short(choice)}): no model can tell them apart"
                )


@dataclass(frozen=True)
class Task:
    """Items of one kind, and how they are put to a model."""

    name: str
    kind: Kind
    items: tuple[Item, ...]
    dev: tuple[Item, ...] = ()
    """Items that examples are taken from."""
    description: str = ""
    """Stands before everything; {section} in it is the item's section."""
    delimiter: str = " "
    """Between a prompt and its continuation."""
    separator: str = "\n\n"
    """Between examples."""
    stop: tuple[str, ...] = ()
    """Texts before which a generated answer ends."""
    max_tokens: int = 256
    """Of a generated answer."""
    score: str = ""
    """The score that leads; empty is the usual one of the kind."""
    answer_context: str = "Answer:"
    """What stands before a choice where its unconditional probability is asked for (Brown et al. 2020, section 2.4)."""
    left_out: tuple[str, ...] = ()
    """What was wrong with the items that were left out."""
    files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each file that items were read from, by its name."""
    dev_files: dict[str, str] = field(default_factory=dict)
    """... of those of the dev items."""

    @property
    def is_generated(self) -> bool:
        """Whether the model writes the answers."""
        return self.kind in GENERATED

    @property
    def sections(self) -> list[str]:
        """In the order of the items."""
        return list(dict.fromkeys(item.section for item in self.items))


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
