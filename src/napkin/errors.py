"""napkin's errors: one line that names the subject, its value, the limit and what to do; and suggestions for unknown
names: the known name that was probably meant, whatever its case, hyphens, underscores and spaces.
"""

import difflib
import importlib
import importlib.util
import re
from collections.abc import Iterable
from types import ModuleType

_QUOTED = 150


class NapkinError(Exception):
    """An invalid input or an impossible request.

    The command line prints it as one line and exits with status 2; in Python it is an ordinary exception. Raise it
    where the cause is known, for example::

        raise NapkinError(f"{path} holds {n} tokens, a batch needs {m}: use more text or a smaller batch")
    """


class CorruptFile(NapkinError):
    """A file that napkin wrote was truncated or altered, or does not match its sidecar."""


class NotJudged(NapkinError):
    """An answer could not be graded, which says nothing of whether it is right; says why."""


def first_line(error: BaseException) -> str:
    """The first line of another library's error, to be quoted in a message; its type if it has no message.

    Its middle is left out where it is long: libraries quote the values that they refuse.
    """
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if len(line) <= 2 * _QUOTED else f"{line[:_QUOTED]}...{line[-_QUOTED:]}"


def is_out_of_memory(error: BaseException) -> bool:
    """True where an error says that there is no memory left; on a CPU torch has no class for it."""
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)


LONGEST = 100
"""Most characters of a name to suggest for; a longer text is not a mistyped name, and takes long to compare."""


def plain(name: str) -> str:
    """A name without case, hyphens, underscores and spaces.

    >>> plain("GPT-2"), plain("bf16_pure")
    ('gpt2', 'bf16pure')
    """
    return re.sub(r"[\s_\-]+", "", name.lower())


def same_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs in case at most; None if there is none.

    >>> same_name("GPT2", ["gpt2", "llama-3-8b"]), same_name("gpt-2", ["gpt2"])
    ('gpt2', None)
    """
    known = list(known)
    return name if name in known else next((each for each in known if each.lower() == name.lower()), None)


def near_names(name: str, known: Iterable[str], *, n: int = 1) -> list[str]:
    """Up to `n` known names that are similar, the most similar first.

    >>> near_names("trian", ["plan", "train"]), near_names("zzz", ["plan", "train"])
    (['train'], [])
    """
    names: dict[str, str] = {}
    for each in known:
        names.setdefault(plain(each), each)
    return [names[match] for match in difflib.get_close_matches(plain(name)[:LONGEST], names, n=n)]


def suggestion(name: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The way out of an unknown name: the nearest known one, or all of them.

    >>> suggestion("modle", ["model", "data"]), suggestion("zzz", ["model", "data"])
    ("did you mean 'model'?", 'use one of model, data')
    """
    known = list(known)
    near = near_names(name, known)
    return f"did you mean '{prefix}{near[0]}'?" if near else f"use one of {', '.join(known)}"


CURATION_LIBRARIES = ("fastwarc", "fsspec", "pyarrow", "pypdfium2", "resiliparse", "zstandard")


def import_extra(name: str, purpose: str) -> ModuleType:
    """Import a library of an extra.

    Raises NapkinError where it is not installed, with its purpose, and the other libraries of its extra that are
    missing too.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        library = name.partition(".")[0]
        others = CURATION_LIBRARIES if library in CURATION_LIBRARIES else ()
        missing = [library, *(each for each in others if each != library and importlib.util.find_spec(each) is None)]
        raise NapkinError(f"{purpose} needs {library}: pip install {' '.join(missing)}") from None


def zstandard() -> ModuleType:
    """The library for zstd."""
    return import_extra("zstandard", "a zstd file")
