"""The contents of the studio's folder, by names that are paths within it. A name that a page sends is never used as a
path: only files that a walk has found are opened.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from napkin.errors import NapkinError

_DEPTH = 4
"""Folders below the studio's that are looked into."""


class NamedPaths:
    """Paths of one sort below a folder, by name.

    `kind_of` says what a path is, and is empty or False for what is not of the sort; it may raise OSError. A folder of
    the sort is not looked into, nor is one whose name begins with a dot; links are not followed. At most `most` are
    found.
    """

    def __init__(self, folder: Path, sort: str, kind_of: Callable[[Path], str | bool], most: int) -> None:
        self.folder, self._sort, self._kind_of, self._most = folder, sort, kind_of, most
        self.known: dict[str, Path] = {}
        """Paths of the last search, by name."""

    def find(self) -> dict[str, str | bool]:
        """Search the folder; returns kinds by name."""
        paths = list(itertools.islice(self._below(self.folder, _DEPTH), self._most))
        names = [path.relative_to(self.folder).as_posix() for path, _ in paths]
        self.known = {name: path for name, (path, _) in zip(names, paths, strict=True)}
        return {name: kind for name, (_, kind) in zip(names, paths, strict=True)}

    def path_of(self, name: str) -> Path:
        """The path of a name. Raises NapkinError for one that was not found."""
        if name not in self.known:
            self.find()
        if name not in self.known:
            raise NapkinError(f"there is no {self._sort} '{name[:200]}' below '{self.folder}': choose one of the list")
        return self.known[name]

    def _below(self, path: Path, depth: int) -> Iterator[tuple[Path, str | bool]]:
        try:
            if kind := self._kind_of(path):
                yield path, kind
                return
            if not path.is_dir():
                return
            within = sorted(each for each in path.iterdir() if not each.is_symlink() and not each.name.startswith("."))
        except OSError:
            return
        for each in within:
            if depth or not each.is_dir():
                yield from self._below(each, depth - 1)
