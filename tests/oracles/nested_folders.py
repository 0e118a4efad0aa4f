"""Folders within folders, more than a recursive function can walk, and their removal, which is not recursive either."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def nested_folders(root: Path, depth: int, name: str = "d") -> Iterator[Path]:
    """A folder with `top.txt` and `depth` folders within one another, the last of which has `end.txt`."""
    root.mkdir()
    (root / "top.txt").write_text("top\n")
    descriptor = os.open(root, os.O_RDONLY)
    try:
        for _ in range(depth):
            os.mkdir(name, dir_fd=descriptor)
            inner = os.open(name, os.O_RDONLY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        end = os.open("end.txt", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=descriptor)
        os.write(end, b"end\n")
        os.close(end)
        yield root
    finally:
        os.close(descriptor)
        subprocess.run([shutil.which("rm") or "rm", "-rf", root], check=True)
