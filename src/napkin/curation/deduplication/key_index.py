"""An index: a folder with the keys of earlier runs, against which later ones are compared, and which they extend.

    000000-0123456789abcdef/00000.keys, 00001.keys ...: the keys of the first run that extended it
    000001-.../

A generation is named by its number and by a hash of its keys. A run that is made again, because it was killed or its
pipeline has changed behind the stage, finds its own generation, and is compared with those before it alone: the result
is the same.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from napkin.errors import NapkinError
from napkin.files import draft_folder, publish, sync_file, try_lock

_GENERATION = re.compile(r"(\d{6})-([0-9a-f]{16})")


class KeyIndex:
    """An index that this process has locked; see `opened_index`."""

    def __init__(self, folder: Path, summaries: Sequence[Path]) -> None:
        self._folder = folder
        self._summaries = summaries
        self._digest = _digest_of(summaries)
        self._generations = sorted(each.name for each in folder.iterdir() if _GENERATION.fullmatch(each.name))
        own = [name for name in self._generations if name.endswith(self._digest)]
        self._has_own = bool(own)
        self._earlier = [name for name in self._generations if not own or name < own[0]]

    def earlier(self) -> list[list[Path]]:
        """The files of keys of each generation before this run's."""
        return [sorted((self._folder / name).glob("*.keys")) for name in self._earlier]

    def extend(self) -> None:
        """Add the keys of this run as a generation, whole or not at all; if it is there already, do nothing."""
        if self._has_own:
            return
        path = self._folder / f"{len(self._generations):06d}-{self._digest}"
        with draft_folder(path) as draft:
            for number, summary in enumerate(self._summaries):
                copy = draft / f"{number:05d}.keys"
                shutil.copyfile(summary, copy)
                sync_file(copy)
            publish(draft, path)


@contextmanager
def opened_index(folder: str, summaries: Sequence[Path]) -> Iterator[KeyIndex | None]:
    """The index in a folder, made if it is missing, for a run with these summaries; None where `folder` is empty.

    Raises NapkinError while another process uses it.
    """
    if not folder:
        yield None
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if not try_lock(descriptor):
            raise NapkinError(f"the index {folder!r} is used by another process: wait for it, or name another folder")
        yield KeyIndex(path, summaries)
    finally:
        os.close(descriptor)


def _digest_of(summaries: Sequence[Path]) -> str:
    """Of what the files hold, in whichever order."""
    digests = []
    for summary in summaries:
        with open(summary, "rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").digest())
    return hashlib.sha256(b"".join(sorted(digests))).hexdigest()[:16]
