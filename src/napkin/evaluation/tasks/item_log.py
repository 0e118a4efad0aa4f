"""The items that are done, a line of JSON each: after a kill an evaluation goes on where it was.

The first line has the settings. Lines are appended and synced batch by batch; an incomplete last line, which a kill may
leave, is dropped.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.errors import NapkinError, first_line
from napkin.files import regular, try_lock

FORMAT = "napkin-task-items"
VERSION = 1


@dataclass(frozen=True)
class ItemResult:
    """A model's answer to an item."""

    name: str
    section: str
    group: str
    scores: dict[str, float]
    """0 or 1, by name of the score."""
    logprobs: tuple[float, ...] = ()
    """The log-probability of each choice, in nats."""
    tokens: tuple[int, ...] = ()
    """The number of tokens of each choice."""
    unconditional: tuple[float, ...] | None = None
    """Log-probability of each choice without the question."""
    text: str | None = None
    found: str | None = None
    """The part of it that was taken for the answer."""
    dropped_examples: int = 0
    cut_tokens: int = 0


class ItemLog:
    """The lines of one evaluation; made by `open_log`."""

    def __init__(self, file: Any, done: dict[str, ItemResult]) -> None:
        self._file, self.done = file, done

    def add(self, results: Sequence[ItemResult]) -> None:
        """Append lines, and sync them to disk."""
        self.done |= {each.name: each for each in results}
        if self._file is not None:
            self._file.write("".join(json.dumps(asdict(each)) + "\n" for each in results).encode())
            self._file.flush()
            os.fsync(self._file.fileno())


@contextmanager
def open_log(path: Path | None, settings: Mapping[str, Any]) -> Iterator[ItemLog]:
    """The log at `path`, new or continued; None keeps no file.

    Raises NapkinError where the file is that of another evaluation, is damaged, or another process writes it.
    """
    if path is None:
        yield ItemLog(None, {})
        return
    descriptor = regular(path, os.O_RDWR | os.O_CREAT)
    with open(descriptor, "r+b") as file:
        if not try_lock(file.fileno()):
            raise NapkinError(f"'{path}' is being written by another evaluation: wait for it, or choose another --out")
        content = file.read()
        end = content.rfind(b"\n") + 1
        lines = content[:end].splitlines()
        header = json.dumps({"format": FORMAT, "version": VERSION, "settings": settings}, sort_keys=True).encode()
        if content and not content.startswith(b'{"format": "' + FORMAT.encode()) and not header.startswith(content):
            raise NapkinError(f"'{path}' is not a log of items: it is not overwritten, choose another --out")
        if lines and lines[0] != header:
            raise NapkinError(f"'{path}' is of an evaluation with other settings: remove it, or choose another --out")
        done = {result.name: result for result in _results(path, lines[1:])}
        file.seek(end)
        file.truncate()
        if not lines:
            file.write(header + b"\n")
        log = ItemLog(file, done)
        try:
            yield log
        except BaseException:
            if not log.done:
                # A refused evaluation leaves nothing behind.
                path.unlink(missing_ok=True)
            raise


def _results(path: Path, lines: Sequence[bytes]) -> Iterator[ItemResult]:
    for number, line in enumerate(lines, 2):
        try:
            yield msgspec.json.decode(line, type=ItemResult)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise NapkinError(f"'{path}' line {number} is damaged ({first_line(error)}): remove that line") from None
