"""Notices that a mapped token file was changed in place while a run reads it."""

import os

from napkin.data.token_file import TokenFile
from napkin.errors import CorruptFile


class TokenGuard:
    """Remembers how a token file lies on the disk, from the moment it was checked.

    A file that is replaced or removed is no matter: the mapping holds on to the old one.
    """

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens
        self._before = self._look()

    def refuse_changes(self) -> None:
        """Raise CorruptFile where the file that is mapped no longer holds the tokens that were checked."""
        now = self._look()
        if now is None or self._before is None or now[:2] != self._before[:2] or now == self._before:
            return
        size_bytes, before_bytes = now[2], self._before[2]
        # Pages beyond the end of a mapped file cannot even be read: the process would be killed.
        if size_bytes < before_bytes:
            raise CorruptFile(
                f"'{self._tokens.path}' has shrunk from {before_bytes} to {size_bytes} bytes while the run reads it: "
                "put it back and continue with `napkin resume`; earlier checkpoints are kept"
            )
        self._tokens.verify()
        self._before = now

    def _look(self) -> tuple[int, int, int, int] | None:
        try:
            found = os.stat(self._tokens.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
