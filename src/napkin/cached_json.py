"""What was measured on this machine, kept between processes: one JSON file in the user's cache for each thing.

The folder is NAPKIN_CACHE_DIR if set, otherwise the user's cache folder. A file that is malformed, or larger than
anything that is kept, counts as none: it is measured again and the file replaced.
"""

import hashlib
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from napkin.files import atomic_write_text, cache_folder, read_bytes

Measured = TypeVar("Measured")

MOST_BYTES = 2**24


def cache_path(kind: str, what: Any) -> Path:
    """The file in the cache for a measurement of one kind, of anything that JSON can say."""
    key = hashlib.sha256(msgspec.json.encode(what)).hexdigest()[:16]
    return cache_folder() / f"{kind}-{key}.json"


def cached_files(kind: str) -> list[Path]:
    """The files of all measurements of one kind."""
    return sorted(cache_folder().glob(f"{kind}-" + "[0-9a-f]" * 16 + ".json"))


def read_cached(path: Path, kind: type[Measured]) -> Measured | None:
    """What `write_cached` has written; None if there is no such file, or what it holds is not a valid `kind`."""
    try:
        if os.stat(path).st_size > MOST_BYTES:
            return None
        return msgspec.json.decode(read_bytes(path), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def write_cached(path: Path, measured: Any) -> None:
    """Write what was measured as indented JSON, replacing an older file.

    Raises OSError or NapkinError where it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(measured), indent=2).decode()
    atomic_write_text(path, text + "\n", overwrite=True)
