"""Lists of words and hosts as files of the user: an entry per line, blank lines and what follows `#` are left out."""

from functools import lru_cache
from pathlib import Path

from napkin.errors import NapkinError


@lru_cache(maxsize=16)
def read_list(path: str) -> tuple[str, ...]:
    """The entries of a list, in lower case. Raises NapkinError if it cannot be read or is empty."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise NapkinError(f"the list '{path}' cannot be read: {why}") from None
    entries = dict.fromkeys(entry for line in lines if (entry := line.partition("#")[0].strip().lower()))
    if not entries:
        raise NapkinError(f"the list '{path}' has no entries: use one per line")
    return tuple(entries)
