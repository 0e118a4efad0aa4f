"""Documents of hosts in a list: block lists of the web, which users bring."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from typing import ClassVar
from urllib.parse import urlsplit

from napkin.curation.filters.list_file import read_list
from napkin.curation.record import Record
from napkin.curation.stage import Dropped


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
    """By host, the beginnings of paths."""
    entries: dict[str, list[str]] = {}
    for entry in read_list(file):
        # Block lists in the format of a hosts file begin with an address of this machine.
        place = entry.split()[-1].rpartition("://")[2]
        host, slash, path = place.partition("/")
        host = host.removeprefix("*.").strip(".")
        if host:
            entries.setdefault(host, []).append((slash + path).rstrip("/"))
    return entries
