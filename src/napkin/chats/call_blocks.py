"""The division of an answer, as it grows, into plain text and blocks that may be calls of functions.

Each divider has `push`, which takes more of the answer and returns the parts that are certain by now, and `finish`,
which returns the rest. An answer is what a model writes, which may be anything: the work is linear in its length, and
what is kept is the part that is not yet certain.
"""

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Block:
    """A part of an answer that is more than text."""

    name: str
    content: str
    written: str = field(repr=False)
    """All of it as it stands in the answer."""

    def __str__(self) -> str:
        return self.written


@runtime_checkable
class Divider(Protocol):
    """Divides an answer that comes in pieces."""

    def push(self, text: str) -> list[str | Block]:
        """Add text, and return the parts of the answer that are certain by now."""
        ...

    def finish(self) -> list[str | Block]:
        """The rest, where no more text comes."""
        ...


def certain(text: str, marks: Collection[str], firsts: Collection[str]) -> int:
    """The place in a text up to which none of `marks`, which begin with `firsts`, can begin and go on behind it."""
    longest = max(map(len, marks), default=1) - 1
    for place in range(max(0, len(text) - longest), len(text)):
        if text[place] in firsts and any(mark.startswith(text[place:]) for mark in marks):
            return place
    return len(text)


@dataclass(frozen=True)
class Tag:
    """The texts between which a block is; with an empty `closes`, the block is `opens` alone."""

    name: str
    opens: str
    closes: str

    @classmethod
    def named(cls, name: str) -> "Tag":
        """`<NAME>` and `</NAME>`."""
        return cls(name, f"<{name}>", f"</{name}>")


class TaggedText:
    """Divides a text into plain text and blocks between tags; a tag that is not closed is text.

    >>> text = TaggedText([Tag.named("b")])
    >>> text.push("2 < 3 <b>yes</"), text.push("b>."), text.finish()
    (['2 < 3 '], [Block(name='b', content='yes'), '.'], [])
    """

    def __init__(self, tags: Iterable[Tag]) -> None:
        self._tags = {tag.opens: tag for tag in tags}
        self._firsts = {opens[0] for opens in self._tags}
        self._opens = re.compile("|".join(re.escape(each) for each in self._tags) or r"(?!)")
        self._held = ""
        self._open: Tag | None = None
        # The open block so far, in pieces, and its end, in which the closing tag may have begun.
        self._inside: list[str] = []
        self._tail = ""

    def push(self, text: str) -> list[str | Block]:
        text, self._held = self._held + text, ""
        parts, place = list[str | Block](), 0
        while place < len(text):
            if self._open is None:
                found = self._opens.search(text, place)
                if found is None:
                    end = certain(text, self._tags, self._firsts)
                    parts.append(text[place:end])
                    self._held = text[end:]
                    break
                parts.append(text[place : found.start()])
                place = found.end()
                tag = self._tags[found[0]]
                if tag.closes:
                    self._open, self._inside, self._tail = tag, [tag.opens], ""
                else:
                    parts.append(Block(tag.name, "", tag.opens))
                continue
            end = self._end(self._open.closes, text, place)
            self._inside.append(text[place : len(text) if end < 0 else end])
            if end < 0:
                break
            written = "".join(self._inside)
            content = written[len(self._open.opens) : -len(self._open.closes)]
            parts.append(Block(self._open.name, content, written))
            self._open, place = None, end
        return [each for each in parts if each != ""]

    def _end(self, closes: str, text: str, place: int) -> int:
        """The place behind the closing tag, which may have begun in the text before; -1 if it does not end here."""
        head = self._tail + text[place : place + len(closes) - 1]
        found = head.find(closes)
        if found >= 0:
            return place + found + len(closes) - len(self._tail)
        found = text.find(closes, place)
        if found >= 0:
            return found + len(closes)
        tail = self._tail + text[max(place, len(text) - len(closes)) :]
        self._tail = tail[max(0, len(tail) - len(closes) + 1) :]
        return -1

    def finish(self) -> list[str | Block]:
        if self._open is None:
            return [self._held] if self._held else []
        text, begin, end = "".join(self._inside), len(self._open.opens), 0
        parts, unclosed = list[str | Block](), {self._open.opens}
        while found := self._opens.search(text, begin):
            tag, begin = self._tags[found[0]], found.end()
            close = -1 if tag.opens in unclosed else text.find(tag.closes, begin)
            if close < 0:
                unclosed.add(tag.opens)
                continue
            content, begin = text[begin:close], close + len(tag.closes)
            parts += [text[end : found.start()], Block(tag.name, content, text[found.start() : begin])]
            end = begin
        return [each for each in (*parts, text[end:]) if each != ""]


class WholeAnswer:
    """Takes an answer for one block as long as `may_be` does not deny it; one that is not is divided otherwise.

    `may_be` is given the beginning of the answer, without white space before it: True if the answer has to be read to
    its end, None if more of it is needed to tell.
    """

    _MOST_BEGINNING = 300

    def __init__(self, may_be: Callable[[str], bool | None], otherwise: Divider) -> None:
        self._may_be, self._otherwise = may_be, otherwise
        self._pieces: list[str] = []
        self._begins = ""
        self._is_held: bool | None = None

    def push(self, text: str) -> list[str | Block]:
        if self._is_held is False:
            return self._otherwise.push(text)
        self._pieces.append(text)
        if self._is_held is None:
            self._begins = self._begins + text if self._begins else text.lstrip()
            self._is_held = self._may_be(self._begins) if self._begins else None
            if self._is_held is None and len(self._begins) > self._MOST_BEGINNING:
                self._is_held = False
        if self._is_held is False:
            return self._otherwise.push("".join(self._pieces))
        return []

    def finish(self) -> list[str | Block]:
        if self._is_held is False:
            return self._otherwise.finish()
        whole = "".join(self._pieces)
        return [Block("", whole, whole)] if whole else []


class JsonEnd:
    """Finds where a list or an object of JSON ends, in text that comes in pieces and begins with it."""

    _OUTSIDE, _INSIDE = re.compile(r'["\[\]{}]'), re.compile(r'["\\]')

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._is_escaped = False

    def push(self, text: str, place: int) -> int:
        """The place behind the value in more text; -1 if it does not end here."""
        if self._is_escaped and place < len(text):
            self._is_escaped, place = False, place + 1
        while found := (self._INSIDE if self._in_string else self._OUTSIDE).search(text, place):
            place = found.end()
            if found[0] == '"':
                self._in_string = not self._in_string
            elif found[0] == "\\":
                self._is_escaped = place == len(text)
                place += 1
            else:
                self._depth += 1 if found[0] in "[{" else -1
                if self._depth == 0:
                    return place
        return -1


class MarkedJson:
    """Divides an answer into text and blocks of a mark, a head, and a list or an object of JSON, which ends the block.

    `head_length` is given what follows the mark: the number of characters before the JSON, None while more is needed to
    tell, -1 if this is not a block.
    """

    _MOST_HEAD = 300

    def __init__(self, mark: str, head_length: Callable[[str], int | None]) -> None:
        self._mark, self._head_length = mark, head_length
        self._held = ""
        self._end: JsonEnd | None = None
        self._pieces: list[str] = []

    def push(self, text: str) -> list[str | Block]:
        text, self._held = self._held + text, ""
        parts, place = list[str | Block](), 0
        while place < len(text):
            if self._end is None:
                found = text.find(self._mark, place)
                end = certain(text, (self._mark,), self._mark[0]) if found < 0 else found
                parts.append(text[place:end])
                place = end
                head = text[place + len(self._mark) : place + len(self._mark) + self._MOST_HEAD]
                begin = None if found < 0 else self._head_length(head)
                if begin is None and len(head) < self._MOST_HEAD:
                    self._held = text[place:]
                    break
                if begin is None or begin < 0:
                    parts.append(self._mark)
                    place += len(self._mark)
                    continue
                self._pieces = [text[place : place + len(self._mark) + begin]]
                place += len(self._pieces[0])
                self._end = JsonEnd()
            end = self._end.push(text, place)
            self._pieces.append(text[place : len(text) if end < 0 else end])
            if end < 0:
                break
            written = "".join(self._pieces)
            parts.append(Block(self._mark, written[len(self._mark) :], written))
            self._end, place = None, end
        return [each for each in parts if each != ""]

    def finish(self) -> list[str | Block]:
        rest = self._held if self._end is None else "".join(self._pieces)
        return [rest] if rest else []


class ChannelMessages:
    """Divides an answer in OpenAI's harmony format, which is a sequence of messages.

    A message is a header, `<|message|>`, a content and a mark at its end. Its header says to whom it is and on which
    channel; one to a function is a block, by the function's name. The content of messages on the channel `analysis` is
    text if a call follows it or if nothing does; before other messages it is left out, as the model's own chat template
    does. An answer that does not begin with a header is text.
    """

    _ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
    _ENDED = re.compile("|".join(re.escape(each) for each in _ENDS))
    _HEADS = ("<|start|>", "<|channel|>", "to=")
    _CONTENT = "<|message|>"
    _MOST_HEADER = 1000
    _CHANNEL, _RECIPIENT = re.compile(r"<\|channel\|>\s*(\w+)"), re.compile(r"\bto=(\S+?)(?=<\||\s|$)")

    def __init__(self) -> None:
        self._held = ""
        self._header: str | None = None
        """The header of the message whose content comes; None while it is not whole."""
        self._channel = self._recipient = ""
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._is_text_before = False

    def push(self, text: str) -> list[str | Block]:
        text, self._held = self._held + text, ""
        parts, place = list[str | Block](), 0
        while place < len(text):
            if self._header is None:
                begin = self._begin(text, place)
                if begin is None:
                    self._held = text[place:]
                    break
                parts += self._begun(text[place:begin])
                if begin == place:
                    # One character further, so that what only looks like a header is not looked at again.
                    parts += self._more(text[place])
                    begin += 1
                place = begin
                continue
            found = self._ENDED.search(text, place)
            end = found.start() if found else max(place, certain(text, self._ENDS, "<"))
            parts += self._more(text[place:end])
            if found is None:
                self._held = text[end:]
                break
            # What begins the next message belongs to its header.
            place = found.start() if found[0] == "<|start|>" else found.end()
            parts += self._ended("" if found[0] == "<|start|>" else found[0])
        return [each for each in parts if each != ""]

    def finish(self) -> list[str | Block]:
        parts = [self._held] if self._header is None else [*self._more(self._held), *self._ended("")]
        return [each for each in ("".join(self._thoughts), *parts) if each != ""]

    def _begin(self, text: str, place: int) -> int | None:
        """The place behind a header, which is empty where there is none; None if more is needed to tell."""
        header = text[place : place + self._MOST_HEADER]
        end = header.find(self._CONTENT)
        begins = header.lstrip()
        if not any(begins.startswith(each) or each.startswith(begins) for each in self._HEADS):
            return place
        if end >= 0:
            return place + end + len(self._CONTENT)
        return None if len(header) < self._MOST_HEADER else place

    def _begun(self, header: str) -> list[str | Block]:
        channel, recipient = self._CHANNEL.search(header), self._RECIPIENT.search(header)
        self._header, self._content = header, []
        self._channel, self._recipient = channel[1] if channel else "", recipient[1] if recipient else ""
        if self._recipient or self._channel == "analysis":
            return []
        self._thoughts = []
        return ["\n\n"] if self._is_text_before and header else []

    def _more(self, text: str) -> list[str | Block]:
        if self._recipient:
            self._content.append(text)
        elif self._channel == "analysis":
            self._thoughts.append(text)
        else:
            self._is_text_before = self._is_text_before or bool(text)
            return [text]
        return []

    def _ended(self, mark: str) -> list[str | Block]:
        header, self._header = self._header or "", None
        if not self._recipient:
            return [] if header else [mark]
        content, thoughts = "".join(self._content), "".join(self._thoughts)
        self._thoughts = []
        return [thoughts, Block(self._recipient.removeprefix("functions."), content, header + content + mark)]
