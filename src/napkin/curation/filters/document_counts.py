"""The statistics of a text and what C4 keeps of it, compiled or plain.

Compiled functions need room beside the text: up to 50 bytes of address space per byte of it. Only the used part becomes
resident: all of it where words have one letter, a quarter in ordinary text. Room for texts up to 4 MB is kept for the
next one, per thread.

C4's lines are here in their plain form, to which the one pass of `compiled/scan.py` is held.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from napkin.curation.filters.compiled import FILTERS
from napkin.curation.filters.text_counts import (
    REPEATED_N_GRAMS,
    TOP_N_GRAMS,
    Line,
    Repetition,
    TextStatistics,
    character_classes,
    count_sentences,
    lines_of,
    plain_statistics,
)
from napkin.errors import NapkinError

REASONS = ("a very long word", "no punctuation at the end", "few words", "javascript", "policy")
"""Why a line is removed, in the order in which the reasons are looked for."""
POLICY_PHRASES = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")
"""The phrases of the dataset's c4_utils.py."""
END_MARKS = (".", "?", "!", '"', "”")


@dataclass(slots=True)
class C4Lines:
    """The lines of a text that C4 keeps, and counts of the others."""

    text: str
    """The lines that stay, without white space at their ends, separated by line feeds."""
    removed: dict[str, int]
    """Counts of removed lines by reason."""
    sentences: int
    """Sentences in the lines that stay."""
    lorem_ipsum: int
    """Lines with these words, of those that end sentences."""
    curly_bracket: int
    """Lines with a curly bracket, of those that end sentences and are not about JavaScript."""


def plain_c4_lines(text: str, min_line_words: int, max_word_characters: int) -> C4Lines:
    """Apply C4's rules to lines; the plain form."""
    counts = C4Lines("", dict.fromkeys(REASONS, 0), 0, 0, 0)
    kept: list[Line] = []
    for line in lines_of(text):
        # Only ASCII letters are folded.
        folded = line.text.encode("utf-8", "surrogatepass").lower().decode("utf-8", "surrogatepass")
        reason = _removal_reason(line, folded, min_line_words, max_word_characters)
        if reason not in REASONS[:3]:
            counts.lorem_ipsum += "lorem ipsum" in folded
            counts.curly_bracket += reason != "javascript" and "{" in folded
        if reason:
            counts.removed[reason] += 1
        else:
            kept.append(line)
    counts.text = "\n".join(line.text for line in kept)
    counts.sentences = sum(map(count_sentences, kept))
    return counts


def _removal_reason(line: Line, folded: str, min_line_words: int, max_word_characters: int) -> str:
    """The first reason to remove a line; nothing if it stays."""
    ends_sentence = line.text.endswith(END_MARKS) and not line.text.endswith("...")
    checks = (
        max(map(len, line.words)) > max_word_characters,
        not ends_sentence,
        len(line.words) < min_line_words,
        "javascript" in folded,
        any(phrase in folded for phrase in POLICY_PHRASES),
    )
    return next((reason for reason, holds in zip(REASONS, checks, strict=True) if holds), "")


MODULES = ("scan", "repetition")
MAX_BYTES = 2**31 - 1
"""Places in a text are int32."""
# Importing numba and loading machine code takes half a second, building it some ten: as much as plain Python takes for
# so many bytes.
_MIN_BYTES_CACHED = 2**20
_MIN_BYTES_NOT_CACHED = 2**24
_KEPT_BYTES = 2**22

_bytes_counted_plainly = 0
_threads = threading.local()


def text_statistics(text: str, *, repetition: Repetition = "all") -> TextStatistics:
    """All counts of a text, of repetition those that are asked for. By machine code once that is worth loading."""
    if use_compiled(len(text)):
        return compiled_statistics(text, repetition=repetition)
    return plain_statistics(text, repetition=repetition)


def expect_bytes(n_bytes: int) -> None:
    """Say that so many bytes of text will be counted, so that machine code is loaded now if they are worth it."""
    global _bytes_counted_plainly
    _bytes_counted_plainly += n_bytes


def use_compiled(n_characters: int, modules: tuple[str, ...] = MODULES) -> bool:
    """True if a text of that size is read by machine code of these modules; texts that were not add up."""
    global _bytes_counted_plainly
    if FILTERS.is_loaded(modules):
        return True
    _bytes_counted_plainly += n_characters
    if _bytes_counted_plainly < _MIN_BYTES_CACHED:
        return False
    if _bytes_counted_plainly < _MIN_BYTES_NOT_CACHED and FILTERS.not_cached(modules):
        return False
    FILTERS.load(*modules)
    return True


def compiled_statistics(text: str, *, repetition: Repetition = "all") -> TextStatistics:
    """`plain_statistics` by machine code. Raises NapkinError for a text of more than MAX_BYTES bytes."""
    FILTERS.load(*MODULES)
    from napkin.curation.filters.compiled import scan

    room, counts = _scan(text)
    statistics = TextStatistics(line_feeds=text.count("\n"))
    for name, count in zip(scan.FIELDS, counts, strict=False):
        setattr(statistics, name, count)
    statistics.stop_words = statistics.stop_words.bit_count()
    if repetition == "lines":
        _add_repeated_lines(statistics, room)
    elif repetition == "all":
        _add_repetition(statistics, room)
    return statistics


def c4_lines(text: str, min_line_words: int, max_word_characters: int) -> C4Lines:
    """Apply C4's rules to the lines of a text, by machine code once that is worth loading."""
    if use_compiled(len(text)):
        return compiled_c4_lines(text, min_line_words, max_word_characters)
    return plain_c4_lines(text, min_line_words, max_word_characters)


def compiled_c4_lines(text: str, min_line_words: int, max_word_characters: int) -> C4Lines:
    """`plain_c4_lines` by machine code. Raises NapkinError for a text of more than MAX_BYTES bytes."""
    FILTERS.load(*MODULES)
    from napkin.curation.filters.compiled import scan

    room, counts = _scan(text, (min_line_words, max_word_characters))
    kept = room.arrays["kept"][: max(counts[scan.C4_BYTES] - 1, 0)]
    return C4Lines(
        text=kept.tobytes().decode("utf-8", "surrogatepass"),
        removed=dict(zip(REASONS, counts[scan.C4_LINES + 1 : scan.N_COUNTS], strict=True)),
        sentences=counts[scan.C4_SENTENCES],
        lorem_ipsum=counts[scan.C4_LOREM_IPSUM],
        curly_bracket=counts[scan.C4_CURLY_BRACKET],
    )


@dataclass(slots=True)
class _Room:
    """Memory of the compiled functions, for texts up to `n_bytes`, and the text that was scanned last."""

    n_bytes: int
    scanned: str | None = None
    encoded: bytes = b""
    """The text as UTF-8, and bytes that are read with its last word."""
    counts: list[int] = field(default_factory=list)
    arrays: dict[str, NDArray[Any]] = field(init=False)
    addresses: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        n_words = self.n_bytes // 2 + 1
        slots = 1 << (2 * n_words - 1).bit_length()
        self.arrays = {
            "words": np.empty(3 * n_words, np.int32),
            "lines": np.empty(4 * n_words, np.int32),
            "kept": np.empty(self.n_bytes + 1, np.uint8),
            "numbers": np.empty(6 * (n_words + 1), np.int32),
            "keys": np.empty(slots, np.uint64),
            "values": np.empty(slots, np.int32),
            "counts": np.zeros(64, np.int64),
        }
        self.addresses = {name: array.ctypes.data for name, array in self.arrays.items()}

    def cleared_counts(self) -> NDArray[np.int64]:
        """The counts, set to 0."""
        self.arrays["counts"][:] = 0
        return self.arrays["counts"]


def _room_for(n_bytes: int) -> _Room:
    kept: _Room | None = getattr(_threads, "room", None)
    if kept is not None and kept.n_bytes >= n_bytes:
        return kept
    room = _Room(max(2**16, 1 << n_bytes.bit_length()) if n_bytes <= _KEPT_BYTES else n_bytes)
    if n_bytes <= _KEPT_BYTES:
        _threads.room = room
    return room


def _scan(text: str, c4: tuple[int, int] | None = None) -> tuple[_Room, list[int]]:
    """The counts of a text, and its words and lines in a room. Stages that follow one another often read one text."""
    from napkin.curation.filters.compiled import scan

    kept: _Room | None = getattr(_threads, "room", None)
    if kept is not None and kept.scanned is text and c4 is None:
        return kept, kept.counts
    encoded = text.encode("utf-8", "surrogatepass")
    n_bytes = len(encoded)
    if n_bytes > MAX_BYTES:
        raise NapkinError(f"a text has {n_bytes} bytes, filters read {MAX_BYTES} at most: split it")
    room = _room_for(n_bytes)
    counts, at = room.cleared_counts(), room.addresses
    room.scanned, room.encoded = None, encoded + bytes(8)
    scan.scan_text(
        _address(room.encoded),
        n_bytes,
        character_classes().ctypes.data,
        at["words"],
        at["lines"],
        at["kept"] if c4 else 0,
        *(c4 or (0, 0)),
        at["counts"],
    )
    room.scanned, room.counts = text, counts.tolist()
    return room, room.counts


def _add_repeated_lines(statistics: TextStatistics, room: _Room) -> None:
    from napkin.curation.filters.compiled import repetition
    from napkin.tokenizer.numba.fields import KEY, MULTIPLIER

    found, at = room.cleared_counts(), room.addresses
    tables = at["keys"], at["values"], KEY, MULTIPLIER, at["counts"]
    text = _address(room.encoded)
    repetition.count_repeated_lines(text, at["words"], at["lines"], statistics.lines, *tables)
    _set_repeated_lines(statistics, found.tolist())


def _set_repeated_lines(statistics: TextStatistics, counts: list[int]) -> None:
    from napkin.curation.filters.compiled import repetition

    statistics.repeated_lines = counts[repetition.REPEATED_LINES]
    statistics.repeated_line_characters = counts[repetition.LINE_CHARACTERS]


def _add_repetition(statistics: TextStatistics, room: _Room) -> None:
    from napkin.curation.filters.compiled import repetition
    from napkin.tokenizer.numba.fields import KEY, MULTIPLIER

    found, at = room.cleared_counts(), room.addresses
    repetition.count_repetition(
        _address(room.encoded),
        at["words"],
        statistics.words,
        at["lines"],
        statistics.lines,
        at["numbers"],
        at["keys"],
        at["values"],
        KEY,
        MULTIPLIER,
        at["counts"],
    )
    counts = found.tolist()
    _set_repeated_lines(statistics, counts)
    statistics.repeated_paragraphs = counts[repetition.REPEATED_PARAGRAPHS]
    statistics.repeated_paragraph_characters = counts[repetition.PARAGRAPH_CHARACTERS]
    for k, n in enumerate(TOP_N_GRAMS):
        statistics.top_n_gram_characters[n] = counts[repetition.TOP + k]
    for k, n in enumerate(REPEATED_N_GRAMS):
        statistics.repeated_n_gram_characters[n] = counts[repetition.REPEATED + k]


def _address(encoded: bytes) -> int:
    return np.frombuffer(encoded, np.uint8).ctypes.data
