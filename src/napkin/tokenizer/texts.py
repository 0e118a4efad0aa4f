"""What all tokenizers ask of text: that it has a UTF-8 form, and where special tokens stand in it."""

import re
from collections.abc import Collection, Iterable, Sequence

from napkin.errors import NapkinError


def utf8(text: str, name: str = "the text") -> bytes:
    """UTF-8 form of `text`. Raises NapkinError, calling the text `name`, where a lone surrogate has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise NapkinError(
            f"{name} holds a lone surrogate (U+{ord(text[error.start]):04X}) at position {error.start}, which has "
            'no UTF-8 form: read the file with errors="replace", or drop it'
        ) from None


def split_at(text: str, special_tokens: Collection[str]) -> list[str]:
    """Cut text at special tokens: ordinary, special, ordinary, ..., ordinary (an ordinary part may be empty).

    Where several special tokens start at one place the longest is meant.

    >>> split_at("ab<|end|>c", ["<|end|>"])
    ['ab', '<|end|>', 'c']
    """
    if not special_tokens:
        return [text]
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, longest_first))})", text)


def check_special_tokens(special_tokens: Sequence[str]) -> None:
    """Raise NapkinError unless the special tokens are distinct, not empty and have a UTF-8 form."""
    if isinstance(special_tokens, str):
        raise NapkinError(f"special tokens are a list of strings, got {special_tokens!r}: write [{special_tokens!r}]")
    seen: set[str] = set()
    for token in special_tokens:
        if not token:
            raise NapkinError("a special token is empty: give it at least one character")
        if token in seen:
            raise NapkinError(f"special token {token!r} is given twice: each needs one id, name it once")
        utf8(token, f"special token {token!r}")
        seen.add(token)


def check_texts(texts: Iterable[str]) -> Iterable[str]:
    """Give `texts` back unless it is one string, whose characters would otherwise be taken for texts."""
    if isinstance(texts, str):
        raise NapkinError(f"a list of texts is needed, got one text of {len(texts)} characters: put it in a list")
    return texts
