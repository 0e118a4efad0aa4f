"""The text of a PDF, read by pdfium in a separate process with limits: pdfium is C++ code with untrusted input.

The lines of its pages become paragraphs: what pages repeat is left out, divided words are joined.
"""

import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass

from napkin.child_process import run_program
from napkin.errors import import_extra
from napkin.extraction.html_page import NotExtracted

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


# Standard input is the document, the argument the limits; see pdf_reader.py.
_PROCESS = "import sys; from napkin.extraction.pdf_reader import main; main(sys.argv[1])"


@dataclass(frozen=True)
class PdfLimits:
    """The most that is read of one document, and that its process may take."""

    most_bytes: int = 200_000_000
    most_pages: int = 5_000
    most_characters: int = 50_000_000
    most_seconds: float = 60.0
    most_memory: int = 4_000_000_000
    """Bytes of address space, where the system can limit it."""


@dataclass(frozen=True)
class ExtractedPdf:
    """The text of a PDF, its title if it has one, and how many pages it has."""

    text: str
    title: str
    pages: int


def extract_pdf(data: bytes, *, limits: PdfLimits = PdfLimits()) -> ExtractedPdf:
    """The text of a PDF in the order in which pdfium reads it.

    Lines become paragraphs, words divided at the end of a line are joined, and the first and last lines that pages
    repeat are left out. Raises NotExtracted for a document that is over a limit or cannot be read, NapkinError where
    the extra `curation` is not installed.
    """
    if len(data) > limits.most_bytes:
        raise NotExtracted("PDF bytes", f"{len(data):,} > {limits.most_bytes:,}")
    import_extra("pypdfium2", "a PDF")
    settings = json.dumps(asdict(limits))
    try:
        process = run_program([sys.executable, "-P", "-c", _PROCESS, settings], data, most_seconds=limits.most_seconds)
    except TimeoutError:
        raise NotExtracted("PDF seconds", f"more than {limits.most_seconds:g}") from None
    if process.returncode:
        how = f"signal {-process.returncode}" if process.returncode < 0 else "its memory or a fault of the parser"
        raise NotExtracted("unreadable PDF", f"the process that read it ended: {how}")
    answer = json.loads(process.stdout)
    if "rule" in answer:
        raise NotExtracted(answer["rule"], answer["detail"])
    return ExtractedPdf(join_pages(answer["pages"]), answer["title"], len(answer["pages"]))
