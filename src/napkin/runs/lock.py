"""Whether a process is training in a run folder: it holds the folder's lock, which the system releases when it ends."""

from pathlib import Path


def is_being_trained(run: Path) -> bool | None:
    """Whether a process holds the run's lock, as `RunFolder.locked` does; None where that cannot be found out."""
    try:
        import fcntl

        with open(run / ".lock", "rb") as file:
            try:
                # A shared lock, released at once: concurrent queries do not block each other.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except FileNotFoundError:
        return False
    except (ImportError, OSError):
        return None
    return False
