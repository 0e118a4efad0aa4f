"""Token files with damage that a test has chosen, and which of their blocks are verified."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from napkin.data import token_file


@contextmanager
def hashed_blocks() -> Iterator[list[int]]:
    """The size in bytes of each block of a token file that is hashed meanwhile."""
    sizes: list[int] = []
    digest = token_file.block_digest

    def counted(block: bytes | memoryview) -> bytes:
        sizes.append(len(block))
        return digest(block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_file, "block_digest", counted)
        yield sizes


def flip_bit(path: Path, byte: int) -> None:
    """Flip a bit of one byte of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(byte)
        [value] = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 4]))
