"""Tokens as people can see them: nothing invisible, nothing that a terminal would obey."""

_MARKS = {"\n": "↵", "\t": "→", "\r": "␍"}


def visible(token: bytes) -> str:
    r"""Write a token for a reader: line ends and tabs as signs, bytes that are no character and what does not print
    as escapes.

    >>> visible(b" the\n"), visible("é".encode()[:1]), visible(b"\x1b[31m"), visible("\u202e".encode())
    (' the↵', '\\xc3', '\\x1b[31m', '\\u202e')
    """
    text = token.decode("utf-8", errors="backslashreplace")
    return "".join(each if each.isprintable() else _MARKS.get(each) or _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
