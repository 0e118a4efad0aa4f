"""Atomic files: they appear whole or not at all.

A file is written under a temporary name in the same folder, synced to disk and then renamed. A crash at any moment
leaves the old state or the new one, and at worst a hidden `.NAME.*.tmp` beside it.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO, overload

from napkin.errors import NapkinError

StrPath = str | os.PathLike[str]

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@overload
def atomic_file(
    path: StrPath, mode: Literal["wb"] = "wb", *, overwrite: bool = False
) -> AbstractContextManager[BinaryIO]: ...
@overload
def atomic_file(path: StrPath, mode: Literal["w"], *, overwrite: bool = False) -> AbstractContextManager[TextIO]: ...
@contextmanager
def atomic_file(path: StrPath, mode: Literal["wb", "w"] = "wb", *, overwrite: bool = False) -> Iterator[IO[Any]]:
    """Yield a new file that is renamed to `path` when the block ends, and removed if the block raises.

    Text is UTF-8, without translation of line ends. Raises NapkinError if `path` exists, or appears while the block
    runs, unless `overwrite`; and if it cannot be written.
    """
    path = Path(path)
    if not overwrite and os.path.lexists(path):
        raise already_exists(path)
    temporary = temporary_name(path)
    try:
        with _create(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path, overwrite=overwrite)
        sync_folder(path.parent)
    except OSError as error:
        # Errors about other files, which the block may read, are raised as they are.
        if error.errno not in _DISK_FULL and error.filename != str(temporary):
            raise
        raise NapkinError(
            f"'{path}' cannot be written ({error.strerror}): "
            "choose a folder that exists, is writable and has free space"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def atomic_write_bytes(path: StrPath, data: bytes, *, overwrite: bool = False) -> None:
    """Write a whole file of bytes; see `atomic_file`."""
    with atomic_file(path, "wb", overwrite=overwrite) as file:
        file.write(data)


def atomic_write_text(path: StrPath, text: str, *, overwrite: bool = False) -> None:
    """Write a whole file of UTF-8 text; see `atomic_file`."""
    with atomic_file(path, "w", overwrite=overwrite) as file:
        file.write(text)


def _create(path: Path, mode: Literal["wb", "w"]) -> IO[Any]:
    if mode == "wb":
        return open(path, "xb")
    return open(path, "x", encoding="utf-8", newline="")


def is_marked(path: StrPath, marker: bytes) -> bool:
    """Whether a path is a regular file, not a link, with `marker` in its first 64 KiB: that is how napkin recognises
    what it may replace."""
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return marker in file.read(2**16)


def refuse_unmarked(path: StrPath, marker: bytes, kind: str) -> None:
    """Raise NapkinError if there is something at `path` that is not marked as a file of this kind."""
    if os.path.lexists(path) and not is_marked(path, marker):
        raise NapkinError(f"'{path}' exists and is not {kind}: it is not replaced, remove it or choose another name")


def temporary_name(path: Path) -> Path:
    """A unique hidden name in the same folder, for a file that will be renamed to `path`."""
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.tmp")


def publish(temporary: Path, path: Path, *, overwrite: bool = False) -> None:
    """Rename a finished file to `path`. Raises NapkinError if `path` exists, unless `overwrite`."""
    if not overwrite:
        # A hard link is the only portable rename that does not replace an existing file.
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise already_exists(path) from None
        except OSError:
            # On file systems without hard links, a file that appears at this very moment is replaced.
            if os.path.lexists(path):
                raise already_exists(path) from None
        else:
            return
    os.replace(temporary, path)


def try_lock(descriptor: int) -> bool:
    """Lock an open file for this process until it is closed; False if another process has locked it.

    Always True on systems without such locks, such as Windows.
    """
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def cache_folder() -> Path:
    """The folder for reproducible data: NAPKIN_CACHE_DIR, or the user's cache folder."""
    if chosen := os.environ.get("NAPKIN_CACHE_DIR"):
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("napkin")


def sync_file(path: Path) -> None:
    """Sync a file that was written by other code to disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    # Windows cannot open a folder for this.
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def already_exists(path: Path) -> NapkinError:
    """The error for a file that would have to be overwritten."""
    return NapkinError(f"'{path}' exists and is not overwritten: remove it or choose another name")
