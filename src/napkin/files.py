"""Atomic files: they appear whole or not at all; and files and folders that are this user's alone.

A file is written under a temporary name in the same folder, synced to disk and then renamed. A crash at any moment
leaves the old state or the new one, and at worst a hidden `.NAME.*.tmp` beside it, which the next writer of that file
removes. A writer locks its temporary file or folder: one that is not locked was left behind.

Files are opened for reading by `regular`, which refuses what could block or never end: fifos, devices, sockets.

Caches of machine code are run, and another user could have made their folder first, or could write into it. So
`private_folder` takes a folder only if it is no link, belongs to this user, and no other user may write into it;
`read_private_file` a file only if it is no link and belongs to this user.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO, overload

from napkin.errors import NapkinError

StrPath = str | os.PathLike[str]

# Without it, opening a fifo waits for its writer. For regular files it has no effect.
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_KINDS = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
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
    remove_abandoned(path)
    if not overwrite and os.path.lexists(path):
        raise already_exists(path)
    temporary = temporary_name(path)
    try:
        with _create(temporary, mode) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if os.name == "nt":
                # Windows does not rename open files.
                file.close()
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
    """Write a whole file of bytes, see `atomic_file`; one that exists with these bytes is left as it is."""
    if overwrite or not _holds(path, data):
        with atomic_file(path, "wb", overwrite=overwrite) as file:
            file.write(data)


def atomic_write_text(path: StrPath, text: str, *, overwrite: bool = False) -> None:
    """Write a whole file of UTF-8 text, see `atomic_file`; one that exists with this text is left as it is."""
    if overwrite or not _holds(path, text.encode(errors="surrogatepass")):
        with atomic_file(path, "w", overwrite=overwrite) as file:
            file.write(text)


def _holds(path: StrPath, data: bytes) -> bool:
    """True if there is a regular file with exactly these bytes, so that nothing needs to be written."""
    remove_abandoned(Path(path))
    try:
        return os.path.getsize(path) == len(data) and read_bytes(path) == data
    except OSError:
        return False


def _create(path: Path, mode: Literal["wb", "w"]) -> IO[Any]:
    while True:
        file: IO[Any] = open(path, "xb") if mode == "wb" else _create_text(path)  # noqa: SIM115
        if _hold(file.fileno(), path):
            return file
        file.close()


def _create_text(path: Path) -> TextIO:
    return open(path, "x", encoding="utf-8", newline="")


def _hold(descriptor: int, path: Path) -> bool:
    """Lock a temporary file or folder; False if another process took it for abandoned before it was locked."""
    # On a file system without locks, nothing is taken for abandoned.
    with contextlib.suppress(OSError):
        return try_lock(descriptor) and path.exists()
    return True


def is_marked(path: StrPath, marker: bytes) -> bool:
    """True where a path is a regular file, not a link, with `marker` in its first 64 KiB: that is how napkin recognises
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
    """A unique hidden name in the same folder, for a file or folder that will be renamed to `path`."""
    return path.with_name(f".{_shortened(path.name)}.{secrets.token_hex(8)}.tmp")


def is_temporary_of(name: str, path_name: str) -> bool:
    """True where `name` is one that `temporary_name` may have made for a file called `path_name`."""
    return re.fullmatch(rf"\.{re.escape(_shortened(path_name))}\.[0-9a-f]{{16}}\.tmp", name) is not None


def _shortened(name: str) -> str:
    """A name of at most 40 characters: names that are too long are told apart by a hash."""
    return name if len(name) <= 40 else f"{name[:23]}-{sha256(os.fsencode(name)).hexdigest()[:16]}"


@contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """Make a temporary folder that is to be renamed to `path` in the block, and remove what is left of it then.

    Those that killed processes have left behind are removed first.
    """
    remove_abandoned(path)
    draft = temporary_name(path)
    draft.mkdir(parents=True)
    descriptor = None
    try:
        # Windows cannot open a folder.
        if os.name != "nt":
            while not _hold(descriptor := os.open(draft, os.O_RDONLY), draft):
                os.close(descriptor)
                draft.mkdir(exist_ok=True)
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if descriptor is not None:
            os.close(descriptor)


def remove_abandoned(path: Path) -> None:
    """Remove the temporary files and folders for `path` that no process is writing: their writers were killed.

    Nothing is removed where locks do not tell.
    """
    try:
        import fcntl

        with os.scandir(path.parent) as entries:
            found = [Path(entry.path) for entry in entries if is_temporary_of(entry.name, path.name)]
    except (ImportError, OSError):
        return
    for each in found:
        with contextlib.suppress(OSError):
            # A network file system needs write access for an exclusive lock.
            descriptor = os.open(each, os.O_RDONLY if each.is_dir() else os.O_RDWR | _NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(each) if each.is_dir() else each.unlink()
            finally:
                os.close(descriptor)


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


def regular(path: StrPath, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, to be given to `open` as its opener. Returns the descriptor.

    Raises OSError, at once, for a fifo, a device or a socket, whose reading could block or never end; and for a folder.
    """
    return regular_and_size(path, flags)[0]


def regular_and_size(path: StrPath, flags: int = os.O_RDONLY) -> tuple[int, int]:
    """Like `regular`, with the size of the file in bytes: 0 for one that the system makes up when it is read, as in
    /proc."""
    try:
        descriptor = os.open(path, flags | _NONBLOCK | _CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(errno.EINVAL, "it is a socket or a device, not a file", os.fspath(path)) from None
        raise
    status = os.fstat(descriptor)
    mode = status.st_mode
    if stat.S_ISREG(mode):
        return descriptor, status.st_size
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    kind = _KINDS.get(stat.S_IFMT(mode), "something else")
    raise OSError(errno.EINVAL, f"it is {kind}, not a file", os.fspath(path))


def refuse_irregular(path: StrPath) -> None:
    """Raise OSError unless `path` is a regular file, before it is opened by other code; see `regular`."""
    os.close(regular(path))


def read_bytes(path: StrPath) -> bytes:
    """The contents of a regular file; see `regular`."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def read_bounded(path: StrPath, most_bytes: int, *, what: str, too_large: str = "divide it") -> bytes:
    """The bytes of a file that anyone may have written, `what` for messages: "a task file".

    Raises NapkinError where it cannot be read, is no file, or has more than `most_bytes`.
    """
    try:
        with open(path, "rb", opener=regular) as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise NapkinError(f"'{path}' cannot be read ({error.strerror}): name {what}") from None
    if len(data) > most_bytes:
        raise NapkinError(f"'{path}' has more than {most_bytes:,} bytes: {too_large}")
    return data


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


def free_disk_bytes(path: Path) -> int:
    """Bytes that are free on the disk where a path is or will be."""
    existing = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    return shutil.disk_usage(existing).free


def already_exists(path: Path) -> NapkinError:
    """The error for a file that would have to be overwritten."""
    return NapkinError(f"'{path}' exists and is not overwritten: remove it or choose another name")


# Windows has no owners and modes of this kind; there the user's cache folder is closed to others.
_HAS_OWNERS = hasattr(os, "geteuid")


def private_folder(path: Path) -> Path | None:
    """`path` as a folder of mode 0700, made if it is missing; None, and a line about it, where it may not be used."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        obstacle = _obstacle(path)
    except OSError as error:
        obstacle = error.strerror or str(error)
    if obstacle is None:
        return path
    line = f"napkin: {str(path)!r} is not used as a private cache ({obstacle}): remove it or choose another"
    print(f"{line} NAPKIN_CACHE_DIR", file=sys.stderr, flush=True)
    return None


def read_private_file(path: Path) -> bytes | None:
    """The bytes of a regular file of this user's; None for any other."""
    try:
        # A fifo would block, and a link could point to a file of somebody else's choice.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or not _is_own(status):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            return file.read()
        except OSError:
            return None


def _obstacle(path: Path) -> str | None:
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a folder"
    if not _is_own(status):
        return "it belongs to another user"
    if _HAS_OWNERS and status.st_mode & 0o022:
        return "other users may write into it"
    if _HAS_OWNERS and stat.S_IMODE(status.st_mode) != 0o700:
        os.chmod(path, 0o700)
    return None


def _is_own(status: os.stat_result) -> bool:
    return not _HAS_OWNERS or status.st_uid == os.geteuid()
