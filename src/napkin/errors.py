"""The errors napkin shows to people: one line that names the thing, the value, the limit and the way out."""


class NapkinError(Exception):
    """A wrong input or an impossible request.

    The command line prints it as one line and exits with status 2; as a library it is an ordinary
    exception. Raise it where the cause is known, for example::

        raise NapkinError(f"{path} holds {n} tokens, a batch needs {m}: use more text or a smaller batch")
    """


class CorruptFile(NapkinError):
    """A file that napkin wrote is not what it was: shortened, altered, or described by another sidecar."""


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says first, to be quoted in one of ours; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
