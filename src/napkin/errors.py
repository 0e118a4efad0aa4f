"""napkin's errors: one line that names the subject, its value, the limit and what to do."""

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
    """Whether an error says that there is no memory left; on a CPU torch has no class for it."""
    return isinstance(error, MemoryError) or "out of memory" in str(error) or "can't allocate memory" in str(error)
