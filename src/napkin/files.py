"""Files that appear whole or not at all.

A file is written under a temporary name in its own folder, synced to the disk and only then given its name; a
crash at any moment leaves the old state, or the new one, and at worst a hidden `.NAME.*.tmp` beside it.
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
    """Yield a new file that takes the name `path` when the block ends, and is removed when the block raises.

    Text is UTF-8 and written as it is: line ends are not translated. Raises NapkinError where `path` exists
    (also when it appears while the block runs) unless `overwrite`, or where it cannot be written.
    """
    path = Path(path)
    if not overwrite and os.path.lexists(path):
        raise _already_there(path)
    temporary = temporary_name(path)
    try:
        with _create(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path, overwrite=overwrite)
        sync_folder(path.parent)
    except OSError as error:
        # The block may read other files: their errors keep their own name.
        if error.errno not in _DISK_FULL and error.filename != str(temporary):
            raise
        raise NapkinError(
            f"'{path}' cannot be written ({error.strerror}): "
            "choose a folder that exists, that you may write to and that has room"
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


def temporary_name(path: Path) -> Path:
    """A name beside `path`, hidden and nobody else's, for what is to become it."""
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.tmp")


def publish(temporary: Path, path: Path, *, overwrite: bool = False) -> None:
    """Give a finished file its name. Raises NapkinError where the name is taken, unless `overwrite`."""
    if not overwrite:
        # A hard link is the one portable rename that refuses to replace.
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise _already_there(path) from None
        except OSError:
            # Some file systems have no hard links: there a file that appears in this instant is replaced.
            if os.path.lexists(path):
                raise _already_there(path) from None
        else:
            return
    os.replace(temporary, path)


def try_lock(descriptor: int) -> bool:
    """Hold an open file for this process until it is closed; False where another process holds it.

    Where the system has no such locks, as on Windows, it is always True: there the promise is the user's.
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
    """Where what can be made again is kept: NAPKIN_CACHE_DIR, or the system's folder for caches."""
    if chosen := os.environ.get("NAPKIN_CACHE_DIR"):
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("napkin")


def sync_file(path: Path) -> None:
    """Return when a file that somebody else wrote is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder are on the disk."""
    # Windows cannot open a folder; there the rename itself is all there is.
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _already_there(path: Path) -> NapkinError:
    return NapkinError(f"'{path}' exists and is not overwritten: remove it or choose another name")
