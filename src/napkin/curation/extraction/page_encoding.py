"""The characters of a page: which encoding its bytes have, and their text."""

import codecs
import re

_BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_META = re.compile(rb"<meta[^>]{0,400}?charset\s*=\s*[\"']?\s*([\w.:-]{1,40})", re.IGNORECASE)
_META_BYTES = 4096
"""A page has to say its encoding early (the HTML standard: within its first 1024 bytes; some are late)."""
_GUESSED_BYTES = 65536


def decode_page(data: bytes, declared: str = "") -> tuple[str, str]:
    """The text of a page, and the name of its encoding.

    In this order, as the HTML standard has it: a byte order mark, what the HTTP header declared, what the page itself
    does, and a guess by its bytes. What is declared wins over what is likely, except that bytes that are UTF-8 beyond
    ASCII are taken as that. Bytes that are invalid become U+FFFD.
    """
    for mark, name in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data[len(mark) :].decode(name, "replace"), name
    try:
        return data.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        pass
    found = _META.search(data[:_META_BYTES])
    for name in (declared, found[1].decode("ascii") if found else "", _guess(data)):
        known = _known_encoding(name)
        if known:
            return data.decode(known, "replace"), known
    return data.decode("utf-8", "replace"), "utf-8"


def _guess(data: bytes) -> str:
    from resiliparse.parse.encoding import detect_encoding

    return detect_encoding(data[:_GUESSED_BYTES]) or ""


def _known_encoding(name: str) -> str:
    """Python's name of the encoding that the web calls so (WHATWG's Encoding Standard); empty if there is none."""
    from resiliparse.parse.encoding import map_encoding_to_html5

    try:
        mapped = map_encoding_to_html5(name.strip(), fallback_utf8=False) if name.strip() else None
        return codecs.lookup(mapped).name if mapped else ""
    except (LookupError, ValueError, TypeError):
        return ""
