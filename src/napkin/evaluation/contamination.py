"""Find items of a task in a training text, however it is cased, spaced, wrapped, punctuated and marked up.

Of text and items only letters and digits remain, in lower case and without spaces, accents and tags of HTML, and those
of full width, of mathematical alphabets and the like as plain ones (Unicode's NFKD). Windows of 32 of these characters
are compared by hashes. Only a quarter of the windows is compared: those that a hash of their first eight characters
selects, the same ones in text and items. An item is contaminated where a share of its windows stands together in one
place of a document. Windows that several items share, such as "which of the following statements is true", do not
count.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from html import unescape
from itertools import chain
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from napkin.data.corpus import Document
from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError
from napkin.evaluation.tasks.published import Item
from napkin.tokenizer import Tokenizer

WINDOW = 32
"""Letters and digits; about six words of English."""
SHARE = 0.6
"""The fraction of an item's windows that has to be found together."""
MOST_ITEMS_OF_A_WINDOW = 3
SHORTEST = 48
"""The fewest letters and digits of an item; shorter ones cannot be told from other text."""

_BATCH_BYTES = 2**21
_KEPT_TAIL = 8192
"""Letters and digits of a part of a document that are looked at again with the next part."""
_TOKENS_AT_A_TIME = 2**20
_SELECTED_BITS = 2
_NOT_WORDS = re.compile(r"[\W_]+")
_NOT_ASCII = re.compile(rb"[\x80-\xff]+")
# Attributes must have values, or be known to need none, so that a comparison of two numbers is not taken for a tag.
_WITHOUT_VALUE = (
    rb"(?:allowfullscreen|async|autofocus|autoplay|checked|controls|default|defer|disabled|download|hidden|inert|ismap|"
    rb"itemscope|loop|multiple|muted|nomodule|noshade|novalidate|nowrap|open|readonly|required|reversed|selected)"
)
_ATTRIBUTE = (
    rb"""\s+(?:[a-zA-Z_:@][\w:.-]*\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s"'<>]+)|(?i:""" + _WITHOUT_VALUE + rb")(?=[\s/>]))"
)
_TAG = re.compile(rb"</?[a-zA-Z][a-zA-Z0-9-]*(?:" + _ATTRIBUTE + rb")*\s*/?>|<!--[^<>]*-->")
_REFERENCE = re.compile(rb"&(?:#\d{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,30});")
_AFFIXES = re.compile(r"\A\s*(?:question|problem|q)\s*:|\b(?:answer|a)\s*:\s*\Z", re.IGNORECASE)
_LISTED = re.compile(r"(?m)^\s*\(?[A-Z][.):]\)?\s")
_LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_LOWER = bytes(range(256)).lower()
_DELETED = bytes(set(range(256)) - set(_LETTERS))
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_FILTERS = ((21, 0), (24, 21))
"""Bits of a hash that index each filter, and the lowest of them: first a table that fits the processor's cache, then a
larger one for the hashes that pass it."""

Hashes = NDArray[np.uint64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Found:
    """An item that stands in the text."""

    item: str
    share: float
    """The fraction of its windows that stand together there."""
    document: str


@dataclass(frozen=True)
class Contamination:
    """The items of a task that were found in a text."""

    found: tuple[Found, ...]
    """Found items in the order of the task; for an item in several documents, the one with the largest share."""
    too_short: tuple[str, ...]
    """Names of items that are too short to be told from other text."""
    items: int
    documents: int
    bytes: int

    @property
    def contaminated(self) -> frozenset[str]:
        return frozenset(each.item for each in self.found)

    def clean(self, names: Sequence[str]) -> list[bool]:
        return [name not in self.contaminated for name in names]

    def as_values(self) -> dict[str, Any]:
        return {
            "items": self.items,
            "documents": self.documents,
            "bytes": self.bytes,
            "contaminated": [asdict(each) for each in self.found],
            "too_short": list(self.too_short),
        }


def find_contamination(items: Sequence[Item], documents: Iterable[Document], *, share: float = SHARE) -> Contamination:
    """Look for the questions of items, of pairs for the good text, in documents of a training text, whose parts follow
    each other; see `looked_for`.

    `share` is that of an item's windows that have to be found together, above 0 and at most 1. Raises NapkinError for
    another one, and where there are no items.
    """
    if not 0 < share <= 1:
        raise NapkinError(f"the share of windows is {share:g}: use a number above 0, at most 1")
    if not items:
        raise NapkinError("there are no items to look for: name a task with items")
    search = ItemSearch([looked_for(item) for item in items])
    best: dict[int, tuple[float, str]] = {}
    count = size = 0

    def found_in(document: Document) -> Iterator[tuple[int, float, str]]:
        nonlocal count, size
        count += not document.continues
        size += len(document.data)
        return search.add(document)

    everything = chain(chain.from_iterable(map(found_in, documents)), search.flush())
    for index, found, name in everything:
        if found >= share and found > best.get(index, (0.0, ""))[0]:
            best[index] = found, name
    return Contamination(
        found=tuple(Found(items[index].name, *best[index]) for index in sorted(best)),
        too_short=tuple(items[index].name for index in search.too_short),
        items=len(items),
        documents=count,
        bytes=size,
    )


def documents_of_token_file(token_file: TokenFile, tokenizer: Tokenizer) -> Iterator[Document]:
    """The documents of a token file as text, long ones in parts; raises NapkinError for another tokenizer's tokens."""
    token_file.refuse_other_vocabulary(tokenizer)
    token_file.verify_on_read()
    name, number, total = token_file.path.name, 0, len(token_file.tokens)
    continues = False
    for start in range(0, total, _TOKENS_AT_A_TIME):
        tokens = np.asarray(token_file.stretch(start, min(start + _TOKENS_AT_A_TIME, total)))
        ends = np.flatnonzero(tokens == token_file.separator)
        for first, last in zip([0, *(ends + 1)], [*ends, len(tokens)], strict=True):
            if last > first:
                data = tokenizer.decode_bytes(tokens[first:last].tolist())
                number += not continues
                yield Document(f"{name}#{number}", data=data, continues=continues)
                continues = True
            if last < len(tokens):
                continues = False


Parts = tuple[str, ...]
"""Texts that may stand in any order."""


def looked_for(item: Item) -> tuple[Parts, ...]:
    """The texts that are looked for: the first of these that can be told from other text and from other items.

    That is the question; with the choices that its prompt lists, in any order, where they are long enough to be told by
    themselves; the prompt as it is; and the prompt with its right answer.

    >>> looked_for(Item("a", "Question: Which of the rivers at Koblenz rises in the Vosges mountains?", answer="b"))[0]
    ('Which of the rivers at Koblenz rises in the Vosges mountains?',)
    """
    prompt = _AFFIXES.sub("", item.prompt).strip()
    question, *listed = [prompt]
    if item.choices and all(len(choice.strip()) <= 1 for choice in item.choices):
        # The prompt lists the choices, and their letters continue it.
        question, *listed = map(str.strip, _LISTED.split(prompt))
    right = item.choices[item.right] if item.choices else item.answer
    return tuple(dict.fromkeys([(question,), (question, *listed), (prompt,), (f"{item.prompt} {right}",)]))


def letters(text: str | bytes) -> bytes:
    """The letters and digits of a text as bytes, in lower case.

    A text whose letters are mostly ASCII, once accents are left out, is reduced to those; of another all letters
    remain, as UTF-8.

    >>> letters("The  QUICK-brown\\nf\u00f6x, 1.5 times <b>\uff11</b>&#48;")
    b'thequickbrownfox15times10'
    """
    return _reducer_of(text)(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))


def _reducer_of(text: str | bytes) -> Callable[[bytes], bytes]:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    plain, everything = _ascii_letters(data), _all_letters(data)
    others = len(everything) - len(everything.translate(None, bytes(range(128, 256))))
    return _ascii_letters if others <= len(plain) / 4 else _all_letters


def _ascii_letters(data: bytes) -> bytes:
    data = _without_markup(data)
    if not data.isascii():
        data = _NOT_ASCII.sub(lambda found: _ascii_of(found[0]), data)
    return data.translate(_LOWER, _DELETED)


def _all_letters(data: bytes) -> bytes:
    text = normalize("NFKC", _without_markup(data).decode("utf-8", "replace")).casefold()
    return _NOT_WORDS.sub("", text).encode("utf-8", "replace")


def _without_markup(data: bytes) -> bytes:
    """Remove tags of HTML, and replace its character references."""
    if b"<" in data:
        data = _TAG.sub(b"", data)
    if b"&" in data:
        data = _REFERENCE.sub(lambda found: unescape(found[0].decode()).encode("utf-8", "replace"), data)
    return data


@lru_cache(maxsize=2**12)
def _ascii_of(data: bytes) -> bytes:
    """The ASCII characters of compatible forms: full width, ligatures, letters without their accents."""
    return normalize("NFKD", data.decode("utf-8", "replace")).encode("ascii", "ignore")


class ItemSearch:
    """Items, looked for in documents that are collected to batches."""

    def __init__(self, items: Sequence[tuple[Parts, ...]]) -> None:
        """Take for each item the texts that may be looked for, see `looked_for`."""
        reduced = [_reduced(each[0]) for each in items]
        self._index = _WindowIndex(reduced)
        for choice in range(1, max(map(len, items), default=0)):
            for number in self._index.too_short:
                if choice < len(items[number]):
                    reduced[number] = _reduced(items[number][choice])
            if self._index.too_short:
                self._index = _WindowIndex(reduced)
        # An item in another script is only found where a text keeps all its letters.
        self._wide = any(not each.isascii() for each in reduced)
        self.too_short = self._index.too_short
        self._lengths = [len(each) for each in reduced]
        self._batches = {_ascii_letters: _Batch()} | ({_all_letters: _Batch()} if self._wide else {})

    def add(self, document: Document) -> Iterator[tuple[int, float, str]]:
        """Collect a document, and yield (item, share of its windows, document) of what a full batch holds."""
        for reduce, batch in self._batches.items():
            if reduce is _all_letters and document.data.isascii():
                continue
            batch.add(document.name, reduce(document.data), continues=document.continues)
            if batch.size >= _BATCH_BYTES:
                yield from self._search(batch)

    def flush(self) -> Iterator[tuple[int, float, str]]:
        for batch in self._batches.values():
            yield from self._search(batch)

    def _search(self, batch: "_Batch") -> Iterator[tuple[int, float, str]]:
        data, starts, names = batch.take()
        places, windows = self._index.look_up(data)
        if not len(places):
            return
        owners_of, owners = self._index.items_of(windows)
        places, windows = places[owners_of], windows[owners_of]
        documents = np.searchsorted(starts, places, side="right") - 1
        order = np.lexsort((places, documents, owners))
        owners, documents, places, windows = owners[order], documents[order], places[order], windows[order]
        edges = np.flatnonzero(np.diff(owners) | np.diff(documents)) + 1
        for group in np.split(np.arange(len(owners)), edges):
            item = int(owners[group[0]])
            count = self._together(places[group], windows[group], 2 * self._lengths[item])
            yield item, float(count / self._index.counts[item]), names[int(documents[group[0]])]

    def _together(self, places: Places, windows: Places, span: int) -> int:
        """The most different windows within a span of the text."""
        if len(np.unique(windows)) == len(windows) and places[-1] - places[0] <= span:
            return len(windows)
        best, first = 0, 0
        inside: dict[int, int] = {}
        for place, window in zip(places.tolist(), windows.tolist(), strict=True):
            inside[window] = inside.get(window, 0) + 1
            while place - places[first] > span:
                gone = int(windows[first])
                inside[gone] -= 1
                if not inside[gone]:
                    del inside[gone]
                first += 1
            best = max(best, len(inside))
        return best


def _reduced(parts: Parts) -> bytes:
    """The letters of each part, a zero byte between two."""
    reduce = _reducer_of("\n".join(parts))
    return b"\0".join(reduce(part.encode("utf-8", "surrogatepass")) for part in parts)


@dataclass
class _Batch:
    """Reduced documents one after another, a zero byte between two."""

    parts: list[bytes] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    size: int = 0
    tail: tuple[str, bytes] = ("", b"")

    def add(self, name: str, data: bytes, *, continues: bool) -> None:
        if continues and self.tail[0] == name:
            data = self.tail[1] + data
        self.tail = (name, data[-_KEPT_TAIL:])
        self.starts.append(self.size)
        self.names.append(name)
        self.parts += (data, b"\0")
        self.size += len(data) + 1

    def take(self) -> tuple[bytes, Places, list[str]]:
        found = b"".join(self.parts), np.array(self.starts, dtype=np.int64), self.names
        self.parts, self.starts, self.names, self.size = [], [], [], 0
        return found


class _WindowIndex:
    """The selected windows of items, by hash."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        hashes: list[Hashes] = []
        owners: list[Places] = []
        for index, text in enumerate(texts):
            n_windows = sum(max(0, len(part) - WINDOW + 1) for part in text.split(b"\0"))
            found = np.unique(_whole_windows(text)) if n_windows > SHORTEST - WINDOW else np.empty(0, np.uint64)
            hashes.append(found)
            owners.append(np.full(len(found), index))
        every, owner = np.concatenate(hashes), np.concatenate(owners).astype(np.int64)
        order = np.argsort(every, kind="stable")
        every, owner = every[order], owner[order]
        self.hashes, self._first, shared = np.unique(every, return_index=True, return_counts=True)
        # Windows of many items are phrases that all questions of a kind have.
        rare = shared <= MOST_ITEMS_OF_A_WINDOW
        self._of_items = np.where(rare, shared, 0)
        self._owners = owner
        kept = np.repeat(rare, shared)
        self.counts = np.bincount(owner[kept], minlength=len(texts))
        self.too_short = [int(index) for index in np.flatnonzero(self.counts == 0)]
        self.hashes, self._first, self._of_items = self.hashes[rare], self._first[rare], self._of_items[rare]
        self._filters = [_Filter(self.hashes, *each) for each in _FILTERS]

    def look_up(self, data: bytes) -> tuple[Places, Places]:
        """Places in reduced text where a window of an item begins, and which window it is."""
        places, hashes = _window_hashes(data)
        for each in self._filters:
            likely = each.likely(hashes)
            places, hashes = places[likely], hashes[likely]
        if not len(self.hashes):
            return places[:0], places[:0]
        at = np.minimum(np.searchsorted(self.hashes, hashes), len(self.hashes) - 1)
        right = self.hashes[at] == hashes
        return places[right], at[right]

    def items_of(self, windows: Places) -> tuple[Places, Places]:
        """For each item of each window, the position of the window in `windows`, and the item."""
        counts = self._of_items[windows]
        positions = np.repeat(np.arange(len(windows)), counts)
        within = np.arange(len(positions)) - np.repeat(np.cumsum(counts) - counts, counts)
        return positions, self._owners[self._first[windows][positions] + within]


class _Filter:
    """A table of bits of hashes: what is not in it is not among them."""

    def __init__(self, hashes: Hashes, bits: int, low: int) -> None:
        self._low, self._mask = np.uint64(low), np.uint64((1 << bits) - 1)
        self._seen = np.zeros(1 << bits, dtype=np.bool_)
        self._seen[self._bits(hashes)] = True

    def likely(self, hashes: Hashes) -> Places:
        """Positions of hashes that may be among them."""
        return np.flatnonzero(self._seen[self._bits(hashes)])

    def _bits(self, hashes: Hashes) -> Hashes:
        return (hashes >> self._low) & self._mask


def _whole_windows(text: bytes) -> Hashes:
    """The hashes of the windows that lie within one part."""
    places, hashes = _window_hashes(text)
    edges = np.flatnonzero(np.frombuffer(text, np.uint8) == 0)
    return hashes[np.searchsorted(edges, places) == np.searchsorted(edges, places + WINDOW)]


def _window_hashes(data: bytes) -> tuple[Places, Hashes]:
    """The places of the selected windows of reduced text, and their hashes."""
    count = len(data) - WINDOW + 1
    if count <= 0:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    # Eight characters from each position, without a copy: a view whose elements overlap.
    words = np.ndarray((len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))
    selected = words[:count] * np.uint64(_FACTORS[0])
    places = np.flatnonzero(selected < np.uint64(1 << (64 - _SELECTED_BITS)))
    hashes = selected[places]
    for number, factor in enumerate(_FACTORS[1:], 1):
        hashes = (hashes ^ (hashes >> np.uint64(29))) * _MIX + words[places + 8 * number] * np.uint64(factor)
    return places, (hashes ^ (hashes >> np.uint64(31))) * _MIX
