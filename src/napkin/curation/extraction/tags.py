"""What HTML's elements are to extraction: each tag has a number, and its number a kind."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

# Kinds. A phrase is a part of the text around it; a block ends that text and begins its own; of what is skipped no text
# is read; an empty element has no end tag; the content of a raw one is not markup.
PHRASE, BLOCK, SKIPPED, EMPTY, RAW = range(5)

_PHRASES = (
    "a span b i em strong u s strike font small big sup sub abbr acronym cite code kbd samp var tt mark q del ins dfn"
    " time data bdi bdo ruby rt rp rb nobr label output slot picture"
).split()
_BLOCKS = (
    "html head body div p section article main aside nav header footer h1 h2 h3 h4 h5 h6 ul ol li dl dt dd table"
    " thead tbody tfoot tr td th caption blockquote pre figure figcaption form fieldset legend address details summary"
    " center hgroup menu search"
).split()
_SKIPPED = (
    "template noscript svg math object canvas audio video select datalist button textarea dialog map applet"
    " frameset title"
).split()
_EMPTY = "br hr img wbr input area base col embed link meta param source track basefont bgsound frame keygen".split()
_RAW = "script style xmp iframe noembed noframes plaintext".split()

FORMATTING = "a b big code em font i nobr s small strike strong tt u".split()
"""Elements that a parser opens again in each block until they are closed."""

NAMES: tuple[str, ...] = ("", *_PHRASES, *_BLOCKS, *_SKIPPED, *_EMPTY, *_RAW)
"""The tag with each number; 0 is any other, which is a block: elements that a page has invented."""
TAG: dict[str, int] = {name: number for number, name in enumerate(NAMES)}

N_SLOTS = 1024

PLACES: dict[str, str] = {
    "article": "article",
    "main": "main",
    "aside": "aside",
    "nav": "nav menu",
    "header": "header hgroup",
    "footer": "footer",
    "figure": "figure figcaption caption",
    "list": "ul ol dl",
    "table": "table",
    "quotation": "blockquote",
    "form": "form fieldset label search",
    "code": "pre",
    "section": "section",
    "heading": "h1 h2 h3 h4 h5 h6",
    "paragraph": "p",
    "address": "address",
}
"""Where text stands, by the tags above it; a bit each, from `FIRST_PLACE` on, beside those of evidence.py."""
FIRST_PLACE = 16
PLACE_BIT: dict[str, int] = {name: FIRST_PLACE + number for number, name in enumerate(PLACES)}


def name_hash(name: bytes) -> int:
    """The hash of a tag or attribute's name, as compiled code computes it: 64 bits, signed."""
    value = 0
    for byte in name:
        value = (value * 31 + byte) & 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


@cache
def tag_table() -> NDArray[np.int64]:
    """Rows of hash, number, kind and place, [1024, 4]: a name is at its hash modulo 1024 or soon after."""
    table = np.zeros((N_SLOTS, 4), np.int64)
    kinds = [
        *((name, PHRASE) for name in _PHRASES),
        *((name, BLOCK) for name in _BLOCKS),
        *((name, SKIPPED) for name in _SKIPPED),
        *((name, EMPTY) for name in _EMPTY),
        *((name, RAW) for name in _RAW),
    ]
    places = {tag: PLACE_BIT[name] for name, tags in PLACES.items() for tag in tags.split()}
    for name, kind in kinds:
        key = name_hash(name.encode())
        slot = key % N_SLOTS
        while table[slot, 0]:
            slot = (slot + 1) % N_SLOTS
        table[slot] = key, TAG[name], kind, 1 << places[name] if name in places else 0
    return table
