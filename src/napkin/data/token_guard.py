"""Notices that a mapped token file was changed in place while a run reads it."""

import os

from napkin.data.token_file import TokenFile
from napkin.data.token_mixture import TokenMixture
from napkin.errors import CorruptFile


class TokenGuard:
    """Remembers how token files lie on the disk, from the moment they were checked.

    A file that is replaced or removed is no matter: the mapping holds on to the old one.
    """

    def __init__(self, tokens: TokenFile | TokenMixture) -> None:
        self.files = tokens.files if isinstance(tokens, TokenMixture) else (tokens,)
        self._before = {file: _look(file) for file in self.files}

    def refuse_changes(self) -> None:
        """Raise CorruptFile where a file that is mapped no longer holds the tokens that were checked."""
        for file, before in self._before.items():
            now = _look(file)
            if now is None or before is None or now[:2] != before[:2] or now == before:
                continue
            size_bytes, before_bytes = now[2], before[2]
            # Pages beyond the end of a mapped file cannot even be read: the process would be killed.
            if size_bytes < before_bytes:
                raise CorruptFile(
                    f"'{file.path}' has shrunk from {before_bytes} to {size_bytes} bytes while the run reads it: "
                    "put it back and continue with `napkin resume`; earlier checkpoints are kept"
                )
            file.verify()
            self._before[file] = now


def _look(file: TokenFile) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(file.path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
