"""The texts of `napkin tokenizer train` and `napkin tokenizer encode`, split into training and validation, and what
their unknown words cost."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from napkin.cli.common.files import PART_BYTES, open_documents
from napkin.data.corpus import Side, divide_inline, split_into_sides
from napkin.data.curated_corpus import Document
from napkin.errors import NapkinError
from napkin.tokenizer.word_level import UNK, UnknownRate


@dataclass(frozen=True)
class TextOptions:
    """Which texts, and how they are split."""

    texts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT...")] = ()
    """Where the text is; at least one."""
    suffixes: tuple[str, ...] = ()
    """In folders, read only files that end so: --suffixes .py .md; none is all files."""
    validation_fraction: float = 0.05
    """Fraction of the documents, 0 to 1, that is held out for validation, chosen by a hash of each; of a single
    document, its last part; of one larger than 8 MB, the last part of each 8 MB. Give `train` and `encode` the same;
    0 holds nothing out and makes no validation.tokens."""


def require_texts(options: TextOptions, command: str) -> None:
    """Raise NapkinError if there are none."""
    if not options.texts:
        raise NapkinError(
            f"no TEXT is given: name a file, a folder, or stdlib: as in `napkin tokenizer {command} stdlib:`"
        )


def read_side(options: TextOptions, side: Side) -> Iterator[Document]:
    """The documents of one side of the split; raises NapkinError if there are none."""
    return (document for each, document in read_sides(options, [side]) if each == side)


def read_sides(
    options: TextOptions,
    sides: Sequence[Side],
    part_bytes: int | None = PART_BYTES,
    *,
    inline_boundaries: bool = False,
    on_inline: Callable[[Path], None] | None = None,
) -> Iterator[tuple[Side, Document]]:
    """The documents with the side of the split that each is on; raises NapkinError if one of `sides` has none.

    With `inline_boundaries` they are divided by `divide_inline`; `on_inline` as `read_documents`.
    """
    fraction = options.validation_fraction
    missing = set(sides)
    documents = open_documents(options.texts, options.suffixes, part_bytes, on_inline)
    if inline_boundaries:
        documents = divide_inline(documents)
    for side, document in split_into_sides(documents, fraction):
        missing.discard(side)
        yield side, document
    for side in sides:
        if side in missing:
            raise NapkinError(
                f"--validation-fraction {fraction} leaves no text for {side}: "
                "use more text, another fraction, or 0 to hold nothing out"
            )


def describe_unknown_words(cost: UnknownRate) -> str:
    """The fraction of the tokens that are UNK, and the fraction of the bytes that they lose."""
    return f"{cost.tokens:.1%} of the tokens are {UNK}, and {cost.bytes:.1%} of the bytes are lost in them"
