"""Detects that a memory-mapped token file was modified in place while a run reads it."""

import os

from napkin.data.mixing import TokenMixture
from napkin.data.token_file import TokenFile
from napkin.errors import CorruptFile


class TokenGuard:
    """Remembers the state of token files on disk when they were verified.

    Replacing or removing a file is harmless: the mapping keeps the old one alive.
    """

    def __init__(self, tokens: TokenFile | TokenMixture) -> None:
        self.files = tokens.files if isinstance(tokens, TokenMixture) else (tokens,)
        self._before = {file: _stat(file) for file in self.files}

    def verify_unchanged(self) -> None:
        """Raise CorruptFile if a mapped file no longer contains the tokens that were verified.

        A file with another date is verified again: of one that is verified as it is read, the blocks read so far.
        """
        for file, before in self._before.items():
            now = _stat(file)
            if now is None or before is None or now[:2] != before[:2] or now == before:
                continue
            size_bytes, before_bytes = now[2], before[2]
            # Reading a mapped page beyond the end of the file would kill the process.
            if size_bytes < before_bytes:
                raise CorruptFile(
                    f"'{file.path}' has shrunk from {before_bytes} to {size_bytes} bytes while the run reads it: "
                    "restore it and continue with `napkin resume`; earlier checkpoints are kept"
                )
            file.verify_again()
            self._before[file] = now


def _stat(file: TokenFile) -> tuple[int, int, int, int] | None:
    try:
        found = os.stat(file.path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
