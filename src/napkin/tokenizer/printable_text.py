"""Tokens as printable text: no invisible characters, nothing that a terminal would interpret."""

_SYMBOLS = {"\n": "↵", "\t": "→", "\r": "␍"}


def printable(token: bytes) -> str:
    r"""Show a token: line ends and tabs as symbols, invalid UTF-8 and unprintable characters as escapes.

    >>> printable(b" the\n"), printable("é".encode()[:1]), printable(b"\x1b[31m"), printable("\u202e".encode())
    (' the↵', '\\xc3', '\\x1b[31m', '\\u202e')
    """
    text = token.decode("utf-8", errors="backslashreplace")
    return "".join(each if each.isprintable() else _SYMBOLS.get(each) or _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
