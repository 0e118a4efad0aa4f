r"""Dividing a file into sections: at lines with only `<|endoftext|>`, and long ones into parts.

The file is read in blocks, and separators are found by `bytes.find`. A part ends where a line-by-line reader would end
it: after the first line, or `part_bytes` of a line, with which the section reaches `part_bytes`, the last 16 KiB are
searched for a split point (`find_split`), then for one in other scripts (`find_any_split`). A text without either is
cut between two characters, which bounds the memory that it takes; only there may its tokens differ from those of the
whole. White space is not cut.

The plain twin, line by line, is tests/oracles/line_reader.py.
"""

import os
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from napkin.tokenizer.text_input import find_any_split, find_split

SEPARATOR_LINE = b"<|endoftext|>"
# Most files are small: a larger first read would allocate and free memory for each of them.
FIRST_BLOCK_BYTES = 2**16
BLOCK_BYTES = 2**20
# The largest distance from the end of a part to its split point.
_SPLIT_WINDOW_BYTES = 2**14
# Without its line end, a separator at the end of a block cannot be told from the beginning of a longer line.
_UNDECIDED_BYTES = len(SEPARATOR_LINE) + 1
_LINE_FEED, _CARRIAGE_RETURN = b"\n\r"
_PRINTABLE = re.compile(rb"[!-~]")


class Section(NamedTuple):
    """The text between two separator lines, or a part of it."""

    offset: int
    data: bytes
    of_whole_file: bool
    """True for a part that is the whole file, as far as known when it is read."""
    continues: bool


def is_one_section(first_block: bytes, size_bytes: int, part_bytes: int | None) -> bool:
    """True if what has been read of a file of `size_bytes` is known to be all of it, and a single section. False where
    that is not cheaply found, as for larger files."""
    is_whole = len(first_block) == size_bytes and size_bytes < min(FIRST_BLOCK_BYTES, part_bytes or FIRST_BLOCK_BYTES)
    return is_whole and SEPARATOR_LINE not in first_block


def read_sections(
    descriptor: int, first_block: bytes, part_bytes: int | None, on_inline: Callable[[], None] | None = None
) -> Iterator[Section]:
    """The sections of an open file, of which `first_block` has been read already.

    `on_inline` is called after the last one if there is a separator that is not a line of its own, and so is text.
    """
    sections = _Sections(descriptor, first_block, part_bytes)
    yield from sections.read()
    if sections.has_inline and on_inline is not None:
        on_inline()


def has_text(data: bytes) -> bool:
    """True if UTF-8, perhaps cut within a character, has anything but white space."""
    return _PRINTABLE.search(data) is not None or bool(data.decode(errors="ignore").strip())


def choose_split(data: bytes) -> int | None:
    """The place at which the part that begins with `data` ends; None if all of it is white space."""
    window = max(len(data) - _SPLIT_WINDOW_BYTES, 1)
    for find in (find_split, find_any_split):
        split = find(data, window)
        if split is not None:
            return split
    split = _last_character_end(data)
    return split if has_text(data[:split]) else None


def _last_character_end(data: bytes) -> int:
    for n_bytes in range(1, min(len(data), 5)):
        first = data[-n_bytes]
        if first & 0xC0 != 0x80:
            length = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return len(data) - n_bytes if n_bytes < length else len(data)
    return len(data)


class _Sections:
    """`buffer` begins at `base` in the file; the section being read begins at `start` in the buffer, and the line that
    contains this place begins at `line_start`, which may be before the buffer. Text up to `tried` has been tried to be
    split.
    """

    def __init__(self, descriptor: int, first_block: bytes, part_bytes: int | None) -> None:
        self.descriptor = descriptor
        self.buffer = first_block
        self.at_end = not first_block
        self.part_bytes = self.wanted = part_bytes
        self.base = self.start = self.searched = self.line_start = self.tried = 0
        self.block_bytes = min(FIRST_BLOCK_BYTES, BLOCK_BYTES)
        self.divided = self.continues = self.has_inline = False

    def read(self) -> Iterator[Section]:
        while True:
            separator = self._next_separator()
            end = len(self.buffer) if separator is None else separator[0]
            if self.wanted is not None and end >= (least := max(self.start + self.wanted, self.tried + 1)):
                trial = self._trial_end(least)
                if trial is not None:
                    section = self._part(trial)
                    if section is not None:
                        yield section
                    continue
            if separator is not None:
                self.divided = True
                section = self._section(end)
                self.start = self.searched = self.line_start = separator[1]
                self.continues, self.wanted = False, self.part_bytes
                yield section
            elif self.at_end:
                yield self._section(end)
                return
            else:
                self._read_more()

    def _next_separator(self) -> tuple[int, int] | None:
        """The begin and the end of the next separator line that is wholly in the buffer."""
        buffer, n_bytes = self.buffer, len(self.buffer)
        place = self.searched
        while (place := buffer.find(SEPARATOR_LINE, place)) >= 0:
            end = place + len(SEPARATOR_LINE)
            if place == self.line_start or (place and buffer[place - 1] == _LINE_FEED):
                if end == n_bytes:
                    if self.at_end:
                        return place, end
                    break
                if buffer[end] == _LINE_FEED:
                    return self._found(place, end + 1)
                if buffer[end] == _CARRIAGE_RETURN:
                    if end + 1 == n_bytes and not self.at_end:
                        break
                    if buffer[end + 1 : end + 2] == b"\n":
                        return self._found(place, end + 2)
            self.has_inline = True
            place = end
        self.searched = max(self.searched, n_bytes - _UNDECIDED_BYTES)
        return None

    def _found(self, begin: int, end: int) -> tuple[int, int]:
        # This is asked again after each part of the section before it.
        self.searched = begin
        return begin, end

    def _trial_end(self, least: int) -> int | None:
        """The end of the line, or piece of a line, that reaches the place `least`; None if it has not been read yet."""
        assert self.part_bytes is not None
        last = least - 1
        begin = self.buffer.rfind(b"\n", self.start, last) + 1 or self.line_start
        pieces = -(-(last + 1 - begin) // self.part_bytes)
        end = begin + pieces * self.part_bytes
        line_end = self.buffer.find(b"\n", last, end) + 1
        if line_end:
            return line_end
        if end <= len(self.buffer):
            return end
        return len(self.buffer) if self.at_end else None

    def _part(self, trial: int) -> Section | None:
        """The next part of the section, which may not go beyond `trial`; None if it cannot be split yet."""
        self.tried = trial
        data = self.buffer[self.start : trial]
        split = choose_split(data)
        if split is None:
            # Doubling keeps the repeated searches linear.
            assert self.wanted is not None
            self.wanted = max(2 * self.wanted, 1)
            return None
        section = Section(self.base + self.start, data[:split], not self.divided, self.continues)
        line_start = self.buffer.rfind(b"\n", self.start, self.start + split) + 1
        self.line_start = line_start or self.line_start
        self.start += split
        self.searched = max(self.searched, self.start)
        self.continues, self.wanted = True, self.part_bytes
        return section

    def _section(self, end: int) -> Section:
        return Section(self.base + self.start, self.buffer[self.start : end], not self.divided, self.continues)

    def _read_more(self) -> None:
        dropped = self.start
        self.base += dropped
        self.searched -= dropped
        self.line_start -= dropped
        self.tried -= dropped
        self.start = 0
        self.buffer = self.buffer[dropped:]
        # Read as much again as there is already, so that a long section is not copied for each block.
        block = os.read(self.descriptor, max(self.block_bytes, len(self.buffer)))
        self.block_bytes = min(2 * self.block_bytes, BLOCK_BYTES)
        if block:
            self.buffer += block
        else:
            self.at_end = True
