"""Folders and files of this user alone, for caches of machine code: what is read from them is run.

Another user could have made the folder first, or could write into it. So a folder counts only if it is no link, belongs
to this user, and no other user may write into it; a file only if it is no link and belongs to this user.
"""

import contextlib
import os
import stat
import sys
from pathlib import Path

# Windows has neither owners nor modes of this kind; the user's own folder for caches is closed to others there.
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
    line = f"napkin: {str(path)!r} is not used as a cache of machine code ({obstacle}): remove it or choose another"
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
