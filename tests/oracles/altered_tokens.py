"""Token files with damage that a test has chosen."""

from pathlib import Path


def flip_bit(path: Path, byte: int) -> None:
    """Flip a bit of one byte of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(byte)
        [value] = file.read(1)
        file.seek(byte)
        file.write(bytes([value ^ 4]))
