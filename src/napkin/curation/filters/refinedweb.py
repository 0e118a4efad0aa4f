"""RefinedWeb's corrections of lines (Penedo et al. 2023, arXiv:2306.01116, section 3.2 and appendix G.2).

The paper names the kinds of lines and gives examples; the lists of words are ours: extraction leaves counters of social
networks, buttons and menus, each on a line of its own.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from napkin.curation.filters.thresholds import check_fractions, share
from napkin.curation.record import Record, TraceEntry
from napkin.curation.stage import Dropped

_COUNTER = re.compile(
    r"\W*[0-9][0-9.,]{0,15} ?[KkMm]?\s{1,3}"
    r"(?:likes?|shares?|comments?|views?|followers?|following|retweets?|reposts?|replies|reply|votes?|upvotes?|downloads?"
    r"|subscribers?|reactions?|plays?|posts?|reviews?|ratings?|points?|bookmarks?|quotes?)\W*",
    re.IGNORECASE,
)
_MAX_COUNTER = 60
"""Characters of a line that may be a counter."""
_MAX_EDITED_WORDS = 10
_BEGINNING = re.compile(r"(?:sign[ -]?in|log[ -]?in|sign[ -]?up|skip to (?:main )?content)\b", re.IGNORECASE)
_END = re.compile(r"(?:read more|continue reading|show more|see more|learn more)\s?(?:\.\.\.|…)?$", re.IGNORECASE)
_ANYWHERE = re.compile(r"items? in (?:your )?cart|add to cart|share this|all rights reserved", re.IGNORECASE)


def line_defect(line: str, max_upper: float = 0.5) -> str:
    """Why a line, with no white space at its ends, is none of prose; nothing if it may be."""
    # Punctuation is neither: a line `3.14 | 2.72` is numbers only.
    letters = sum(map(str.isalpha, line))
    if letters == 0 and any(map(str.isdecimal, line)):
        return "numbers only"
    if len(line) <= _MAX_COUNTER and _COUNTER.fullmatch(line):
        return "counter"
    words = line.split(maxsplit=_MAX_EDITED_WORDS)
    if len(words) == 1:
        return "one word"
    if letters and sum(map(str.isupper, line)) > max_upper * letters:
        return "upper case"
    if len(words) <= _MAX_EDITED_WORDS and (_BEGINNING.match(line) or _END.search(line) or _ANYWHERE.search(line)):
        return "button or menu"
    return ""


@dataclass(frozen=True)
class RefinedWeb:
    """Remove lines of menus, counters and headings by RefinedWeb's rules; drop documents with many of them.

    Removed are lines of mainly capitals, of numbers only, counters (3 likes), single words, and short lines that are
    buttons or menus. In the paper a document is dropped when the lines hold more than 5% of its words.
    """

    name: ClassVar[str] = "refinedweb"

    max_removed_words: float = 0.05
    """Fraction of a document's words in lines to be removed, at most; 1 removes lines and never drops."""
    max_upper: float = 0.5
    """Fraction of a line's letters that are capitals, at most."""

    def __post_init__(self) -> None:
        check_fractions(max_removed_words=self.max_removed_words, max_upper=self.max_upper)

    def apply(self, record: Record) -> Record | Dropped:
        """The record without the lines, if they are few."""
        kept: list[str] = []
        removed: Counter[str] = Counter()
        words = removed_words = 0
        for line in record.text.split("\n"):
            stripped = line.strip()
            defect = line_defect(stripped, self.max_upper) if stripped else ""
            n = len(stripped.split())
            words += n
            if defect:
                removed[defect] += 1
                removed_words += n
            else:
                kept.append(line)
        fraction = share(removed_words, words)
        if fraction > self.max_removed_words:
            return Dropped("words in removed lines", f"{fraction:.4g} > {self.max_removed_words:.4g}")
        if removed:
            record.text = "\n".join(kept)
        found = ", ".join(f"{defect}: {count}" for defect, count in sorted(removed.items()))
        record.trace.append(TraceEntry(self.name, f"lines removed: {found}" if found else ""))
        return record
