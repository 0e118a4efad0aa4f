"""Whether a process trains in a run folder now: it holds the folder's lock, which the system takes from the dead."""

from pathlib import Path


def is_being_trained(run: Path) -> bool | None:
    """Whether somebody holds the run, as `RunFolder.locked` does; None where that cannot be known."""
    try:
        import fcntl

        with open(run / ".lock", "rb") as file:
            try:
                # Shared, and let go at once: those who look do not see one another.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    except FileNotFoundError:
        return False
    except (ImportError, OSError):
        return None
    return False
