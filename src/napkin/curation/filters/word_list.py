"""Documents with words of a list, such as the bad words of C4 (Raffel et al. 2020, section 2.2), which users bring."""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from typing import ClassVar

from napkin.curation.filters.list_file import read_list
from napkin.curation.filters.thresholds import check_counts
from napkin.curation.record import Record
from napkin.curation.stage import Dropped

_TOKEN = re.compile(r"\w+")


@dataclass(frozen=True)
class WordList:
    """Drop documents with words or phrases of a list, whatever their case.

    A phrase stands between characters that are neither letters nor digits; its words may have any of
    those between them.
    """

    name: ClassVar[str] = "word-list"
    reads: ClassVar[tuple[str, ...]] = ("file",)

    file: str
    """The list: a word or phrase per line, `#` begins a comment."""
    max_matches: int = 0
    """How often words of the list may stand in a document."""

    def __post_init__(self) -> None:
        check_counts(max_matches=self.max_matches)
        read_list(self.file)

    def apply(self, record: Record) -> Record | Dropped:
        """The record, if it has few words of the list."""
        found = matches_in(record.text, self.file)
        if len(found) > self.max_matches:
            return Dropped(f"words of {PurePath(self.file).name}", ", ".join(dict.fromkeys(found[:5])))
        return record


def matches_in(text: str, file: str) -> list[str]:
    """The words and phrases of a list that stand in a text, as often as they do."""
    phrases = _by_first_word(file)
    words = _TOKEN.findall(text.lower())
    found: list[str] = []
    for i, word in enumerate(words):
        here = [phrase for phrase in phrases.get(word, ()) if tuple(words[i : i + len(phrase)]) == phrase]
        found += map(" ".join, here)
    return found


@lru_cache(maxsize=16)
def _by_first_word(file: str) -> dict[str, list[tuple[str, ...]]]:
    phrases: dict[str, list[tuple[str, ...]]] = {}
    for entry in read_list(file):
        words = tuple(_TOKEN.findall(entry))
        if words:
            phrases.setdefault(words[0], []).append(words)
    return phrases
