"""Lines of a PDF's pages as paragraphs: what pages repeat is left out, divided words are joined."""

import re
from collections import Counter

_EDGE = 2
"""Lines at the top and at the bottom of a page that may be a header or a footer."""
_FEWEST_PAGES = 3
"""A line is repeated if it stands on this many pages, and on half of all."""
_DIGITS = re.compile(r"\d+")
_PAGE_NUMBER = re.compile(
    r"[\W_]*(page |seite |p\. ?)?(\d{1,4}|[ivxlc]{1,7})( ?(/|of|von|de) ?\d{1,4})?[\W_]*", re.IGNORECASE
)
_DIVIDED = re.compile(r"(\w+)[-\u00ad\u2010\ufffe\x02]$")
_HYPHENATED = re.compile(r"\w+-\w+")
_SHORT = 0.75
"""A line shorter than this share of the page's long lines ends a paragraph."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\ufffe\uffff]")


def join_pages(pages: list[str]) -> str:
    """The text of pages whose lines end with a line feed, with an empty line between paragraphs."""
    # pdfium writes U+FFFE for a hyphen that ends a line, and no end of the line.
    lines_of = [[line.strip() for line in re.split(r"\r\n|[\r\n]", page.replace("\ufffe", "-\n"))] for page in pages]
    lines_of = [[line for line in lines if line] for lines in lines_of]
    bodies = _without_repeated(lines_of)
    # A compound that is written with its hyphen elsewhere keeps it where a line ends.
    compounds = {word.lower() for lines in bodies for line in lines for word in _HYPHENATED.findall(line)}
    paragraphs: list[str] = []
    goes_on = False
    for lines in bodies:
        lengths = sorted(map(len, lines))
        long = lengths[len(lengths) * 9 // 10] if lengths else 0
        for line in lines:
            if goes_on and paragraphs:
                paragraphs[-1] = _joined(paragraphs[-1], line, compounds)
            else:
                paragraphs.append(line)
            goes_on = len(line) >= _SHORT * long or _DIVIDED.search(line) is not None
    return "\n\n".join(_CONTROL.sub("", paragraph) for paragraph in paragraphs)


def _joined(before: str, line: str, compounds: set[str]) -> str:
    divided = _DIVIDED.search(before)
    if divided is None or not line[0].islower():
        return f"{before} {line}"
    rest = re.match(r"\w*", line)
    compound = f"{divided[1]}-{rest[0] if rest else ''}".lower()
    return before + line if compound in compounds else before[:-1] + line


def _without_repeated(pages: list[list[str]]) -> list[list[str]]:
    """Pages without the lines that stand at the edges of many, page numbers apart, and without bare page numbers."""
    counts: Counter[str] = Counter()
    for lines in pages:
        counts.update({_DIGITS.sub("#", line) for line in [*lines[:_EDGE], *lines[-_EDGE:]]})
    enough = max(_FEWEST_PAGES, (len(pages) + 1) // 2)

    def is_repeated(line: str) -> bool:
        return counts[_DIGITS.sub("#", line)] >= enough or (len(pages) > 1 and _PAGE_NUMBER.fullmatch(line) is not None)

    kept = []
    for lines in pages:
        begin, stop = 0, len(lines)
        while begin < min(_EDGE, stop) and is_repeated(lines[begin]):
            begin += 1
        while stop > max(begin, len(lines) - _EDGE) and is_repeated(lines[stop - 1]):
            stop -= 1
        kept.append(lines[begin:stop])
    return kept
