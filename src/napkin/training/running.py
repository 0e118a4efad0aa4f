"""Whether a process trains in a run folder now."""

import contextlib
from pathlib import Path


def is_being_trained(run: Path) -> bool:
    """Whether another process holds the run, as `RunFolder.locked` does; False where that cannot be known."""
    with contextlib.suppress(ImportError, FileNotFoundError, PermissionError):
        import fcntl

        with open(run / ".lock", "rb") as file:
            try:
                # Shared, and let go at once: those who look do not see one another.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False
