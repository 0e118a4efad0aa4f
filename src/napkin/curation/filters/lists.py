"""Documents of hosts in a list: block lists of the web, which users bring.

Lists of words and hosts as files of the user: an entry per line, blank lines and what follows `#` are left out.

Documents with words of a list, such as the bad words of C4 (Raffel et al. 2020, section 2.2), which users bring.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from typing import ClassVar
from urllib.parse import urlsplit

from napkin.curation.filters.web_rules import check_counts
from napkin.curation.stage import Dropped, Record
from napkin.errors import NapkinError


@lru_cache(maxsize=16)
def read_list(path: str) -> tuple[str, ...]:
    """The entries of a list, in lower case. Raises NapkinError if it cannot be read or is empty."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise NapkinError(f"the list '{path}' cannot be read: {why}") from None
    entries = dict.fromkeys(entry for line in lines if (entry := line.partition("#")[0].strip().lower()))
    if not entries:
        raise NapkinError(f"the list '{path}' has no entries: use one per line")
    return tuple(entries)


@dataclass(frozen=True)
class HostList:
    """Drop documents whose address is on a host of a list, or on a subdomain of one; or keep only those.

    Documents without an address are kept, unless only those of the list are.
    """

    name: ClassVar[str] = "host-list"
    reads: ClassVar[tuple[str, ...]] = ("file",)

    file: str
    """The list: a host per line, such as example.org, or a host and the beginning of a path; `#` begins a comment."""
    keep: bool = False
    """Keep the documents of the list, and drop the others."""

    def __post_init__(self) -> None:
        read_list(self.file)

    def apply(self, record: Record) -> Record | Dropped:
        """The record, if its host is not in the list."""
        entry = entry_of(record.address, self.file)
        if bool(entry) == self.keep:
            return record
        return Dropped(
            f"host {'not ' if self.keep else ''}in {PurePath(self.file).name}", entry or host_of(record.address)
        )


def entry_of(address: str, file: str) -> str:
    """The entry of a list that an address falls under; nothing if there is none."""
    host, entries = host_of(address), _entries(file)
    path = urlsplit(address).path if host else ""
    labels = host.split(".")
    for i in range(len(labels) if host else 0):
        domain = ".".join(labels[i:])
        for beginning in entries.get(domain, ()):
            # `/a` is the beginning of `/a` and `/a/b`, not of `/ab`.
            if f"{path.lower().rstrip('/')}/".startswith(f"{beginning}/"):
                return domain + beginning
    return ""


def host_of(address: str) -> str:
    """The host of an address in lower case, without a port; nothing if it has none."""
    try:
        host = urlsplit(address).hostname
    except ValueError:
        return ""
    return (host or "").lower().rstrip(".")


@lru_cache(maxsize=16)
def _entries(file: str) -> dict[str, list[str]]:
    """Beginnings of paths, by host."""
    entries: dict[str, list[str]] = {}
    for entry in read_list(file):
        # Block lists in the format of a hosts file begin with an address of this machine.
        place = entry.split()[-1].rpartition("://")[2]
        host, slash, path = place.partition("/")
        host = host.removeprefix("*.").strip(".")
        if host:
            entries.setdefault(host, []).append((slash + path).rstrip("/"))
    return entries


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
