"""The stages that look at a document as a whole: `extract`, `length`, `language`, `host-list` and `word-list`.

Lists of hosts and words are files that users bring, such as block lists of the web or the bad words of C4 (Raffel et
al. 2020, section 2.2): an entry per line; blank lines and what follows `#` are left out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import urlsplit

from napkin.curation.filters.web_rules import FAILS, Comparison, check_counts
from napkin.curation.stage import Dropped, Record, TraceEntry
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.languages.classifier import LanguageClassifier

_HTML = ("text/html", "application/xhtml+xml")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE)
_TOKEN = re.compile(r"\w+")


@dataclass(frozen=True)
class Extract:
    """Make text of HTML pages and PDFs: the main content, without navigation, comments and advertising.

    A document that is text already is passed on unchanged; one of another kind is dropped.
    """

    name: ClassVar[str] = "extract"

    main_content: bool = True
    """Leave out what is not the page's own: navigation, comments, advertising, related pages; else keep all text."""
    heading: bool = True
    """Begin the main content of an HTML page with its main heading, even if that is separate from the text."""
    markdown: bool = True
    """Mark headings, lists, tables, quotations and code as in Markdown; else paragraphs only."""
    most_bytes: int = 20_000_000
    """Bytes of the largest page that is read."""
    most_elements: int = 200_000
    """Elements that a parser may make of a page."""
    most_attributes: int = 10_000
    """Attributes that a tag may have."""
    pdf_bytes: int = 200_000_000
    """Bytes of the largest PDF that is read."""
    pdf_pages: int = 5_000
    """Pages of the longest PDF that is read."""
    pdf_seconds: float = 60.0
    """Seconds that reading a PDF may take."""
    pdf_memory: int = 4_000_000_000
    """Bytes of memory that reading a PDF may take."""

    def __post_init__(self) -> None:
        for name in ("most_bytes", "most_elements", "most_attributes", "pdf_bytes", "pdf_pages", "pdf_memory"):
            if (value := getattr(self, name)) < 1:
                raise NapkinError(f"{name} is {value}: use 1 or more")
        if not self.pdf_seconds > 0:
            raise NapkinError(f"pdf_seconds is {self.pdf_seconds}: use more than 0")

    def apply(self, record: Record) -> Record | Dropped:
        from napkin.extraction.html_page import NotExtracted

        if not record.content:
            return record if record.text.strip() else Dropped("no text", record.media_type)
        declared = _CHARSET.search(str(record.fields.get("content_type", "")))
        charset = declared[1] if declared else ""
        try:
            if record.media_type in _HTML:
                self._read_html(record, charset)
            elif record.media_type == "application/pdf":
                self._read_pdf(record)
            elif record.media_type.startswith("text/"):
                from napkin.extraction.page_metadata import decode_page

                record.text, record.fields["encoding"] = decode_page(record.content, charset)
            else:
                return Dropped("media type", record.media_type)
        except NotExtracted as error:
            return Dropped(error.rule, error.detail)
        if not record.text.strip():
            return Dropped("no text", record.media_type)
        record.content = b""
        return record

    def _read_html(self, record: Record, charset: str) -> None:
        from napkin.extraction.html_page import HtmlLimits, extract_html

        limits = HtmlLimits(self.most_bytes, self.most_elements, self.most_attributes)
        choices = {"main_content": self.main_content, "heading": self.heading, "markdown": self.markdown}
        page = extract_html(record.content, charset=charset, limits=limits, **choices)
        record.text, record.fields["encoding"] = page.text, page.encoding
        record.media_type = "text/markdown" if self.markdown else "text/plain"
        said = page.metadata
        record.licence = record.licence or said.licence
        metadata = {"title": said.title, "page_language": said.language, "canonical": said.canonical}
        metadata["published"] = said.published
        record.fields |= {name: value for name, value in metadata.items() if value}

    def _read_pdf(self, record: Record) -> None:
        from napkin.extraction.pdf_document import PdfLimits, extract_pdf

        costs = {"most_seconds": self.pdf_seconds, "most_memory": self.pdf_memory}
        document = extract_pdf(record.content, limits=PdfLimits(self.pdf_bytes, self.pdf_pages, **costs))
        record.text, record.media_type = document.text, "text/plain"
        if document.title:
            record.fields["title"] = document.title


@dataclass(frozen=True)
class Length:
    """Drop documents that have too few or too many characters, white space at both ends not counted."""

    name: ClassVar[str] = "length"

    least: int = 1
    """Characters that a document has at least."""
    most: int | None = None
    """Characters that a document has at most; None is any number."""

    def __post_init__(self) -> None:
        if self.least < 0:
            raise NapkinError(f"least is {self.least}: use 0 or more characters")
        if self.most is not None and self.most < self.least:
            raise NapkinError(f"most is {self.most} characters, least is {self.least}: use a larger `most`")

    def counted(self, text: str) -> int:
        """Characters of a text."""
        return len(text.strip())

    def comparisons(self, counts: int) -> Iterator[Comparison]:
        """Each rule with the value of a text and the threshold."""
        yield "too short", counts, "<", self.least
        if self.most is not None:
            yield "too long", counts, ">", self.most

    def apply(self, record: Record) -> Record | Dropped:
        n = self.counted(record.text)
        for rule, _, how, limit in self.comparisons(n):
            if FAILS[how](n, limit):
                return Dropped(rule, f"{n} {how} {limit} characters")
        return record


@dataclass(frozen=True)
class Language:
    """Find the language of each document, and drop those in other languages than are wanted.

    The fields `language` and `language_probability` are added to each document.
    """

    name: ClassVar[str] = "language"
    reads: ClassVar[tuple[str, ...]] = ("classifier",)

    keep: tuple[str, ...] = ()
    """The languages to keep, by ISO 639-1 code: en, de; an empty list keeps all, unknown ones included."""
    least_probability: float = 0.5
    """A language that is less probable than this is unknown."""
    close_languages: bool = True
    """Also keep a document whose language is hard to tell from one in `keep`: Croatian and Bosnian, Indonesian and
    Malay."""
    shares: bool = False
    """Add the field `languages` too: the share of each language among the document's lines."""
    classifier: str | None = None
    """A file that `napkin data train-languages` wrote; None is the one that comes with napkin."""

    def __post_init__(self) -> None:
        if not 0 <= self.least_probability <= 1:
            raise NapkinError(f"least_probability is {self.least_probability}: use 0 to 1")
        if self.keep:
            # The names are checked before a run begins.
            _classifier(self.classifier).among(self.keep)

    def apply(self, record: Record) -> Record | Dropped:
        from napkin.languages.classifier import LanguageGuess, close_to_wanted, language_shares, may_be_wanted

        guess = _classifier(self.classifier).identify(record.text, self.least_probability)
        description = f"{guess.language} {guess.probability:.3f}"
        is_kept = guess.language in self.keep
        if self.close_languages and not is_kept and may_be_wanted(guess.language, self.keep):
            probabilities = _classifier(self.classifier).probabilities(record.text)
            if close := close_to_wanted(probabilities, self.keep, self.least_probability):
                guess = LanguageGuess(close[0], close[1])
                description = f"{close[0]} {close[1]:.3f}, with languages close to it {close[2]:.3f}"
        if self.keep and guess.language == "unknown":
            return Dropped("unknown language", description)
        if self.keep and guess.language not in self.keep:
            return Dropped("other language", description)
        record.fields["language"] = guess.language
        record.fields["language_probability"] = round(guess.probability, 4)
        if self.shares:
            shares = language_shares(record.text, self.least_probability, _classifier(self.classifier))
            record.fields["languages"] = {language: round(share, 4) for language, share in shares.items()}
        record.trace.append(TraceEntry(self.name, description))
        return record


@cache
def _classifier(path: str | None) -> "LanguageClassifier":
    # Kept for the process, not in the stage, which is copied to other processes.
    from napkin.languages.classifier import load_classifier, packaged_classifier

    return packaged_classifier() if path is None else load_classifier(path)


@lru_cache(maxsize=16)
def read_list(path: str) -> tuple[str, ...]:
    """The entries of a list, in lower case. Raises NapkinError if it cannot be read or is empty."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise NapkinError(f"the list '{path}' cannot be read: {why}") from None
    entries = dict.fromkeys(entry for line in lines if (entry := line.partition("#")[0].strip().lower()))
    if not entries:
        raise NapkinError(f"the list '{path}' has no entries: use one per line")
    return tuple(entries)


@dataclass(frozen=True)
class HostList:
    """Drop documents whose address is on a host of a list, or on a subdomain of one; or keep only those.

    Documents without an address are kept, unless only those of the list are.
    """

    name: ClassVar[str] = "host-list"
    reads: ClassVar[tuple[str, ...]] = ("file",)

    file: str
    """The list: a host per line, such as example.org, or a host and the beginning of a path; `#` begins a comment."""
    keep: bool = False
    """Keep the documents of the list, and drop the others."""

    def __post_init__(self) -> None:
        read_list(self.file)

    def apply(self, record: Record) -> Record | Dropped:
        entry = entry_of(record.address, self.file)
        if bool(entry) == self.keep:
            return record
        return Dropped(
            f"host {'not ' if self.keep else ''}in {PurePath(self.file).name}", entry or host_of(record.address)
        )


def entry_of(address: str, file: str) -> str:
    """The entry of a list that an address falls under; nothing if there is none."""
    host, entries = host_of(address), _entries(file)
    path = urlsplit(address).path if host else ""
    labels = host.split(".")
    for i in range(len(labels) if host else 0):
        domain = ".".join(labels[i:])
        for beginning in entries.get(domain, ()):
            # `/a` is the beginning of `/a` and `/a/b`, not of `/ab`.
            if f"{path.lower().rstrip('/')}/".startswith(f"{beginning}/"):
                return domain + beginning
    return ""


def host_of(address: str) -> str:
    """The host of an address in lower case, without a port; nothing if it has none."""
    try:
        host = urlsplit(address).hostname
    except ValueError:
        return ""
    return (host or "").lower().rstrip(".")


@lru_cache(maxsize=16)
def _entries(file: str) -> dict[str, list[str]]:
    """Beginnings of paths, by host."""
    entries: dict[str, list[str]] = {}
    for entry in read_list(file):
        # Block lists in the format of a hosts file begin with an address of this machine.
        place = entry.split()[-1].rpartition("://")[2]
        host, slash, path = place.partition("/")
        host = host.removeprefix("*.").strip(".")
        if host:
            entries.setdefault(host, []).append((slash + path).rstrip("/"))
    return entries


@dataclass(frozen=True)
class WordList:
    """Drop documents with words or phrases of a list, whatever their case.

    A phrase stands between characters that are neither letters nor digits; its words may have any of
    those between them.
    """

    name: ClassVar[str] = "word-list"
    reads: ClassVar[tuple[str, ...]] = ("file",)

    file: str
    """The list: a word or phrase per line, `#` begins a comment."""
    max_matches: int = 0
    """The most words of the list that a document may contain."""

    def __post_init__(self) -> None:
        check_counts(self, "max_matches")
        read_list(self.file)

    def apply(self, record: Record) -> Record | Dropped:
        phrases, words = _by_first_word(self.file), _TOKEN.findall(record.text.lower())
        listed: list[str] = []
        for i, word in enumerate(words):
            listed += [" ".join(each) for each in phrases.get(word, ()) if tuple(words[i : i + len(each)]) == each]
        if len(listed) > self.max_matches:
            return Dropped(f"words of {PurePath(self.file).name}", ", ".join(dict.fromkeys(listed[:5])))
        return record


@lru_cache(maxsize=16)
def _by_first_word(file: str) -> dict[str, list[tuple[str, ...]]]:
    phrases: dict[str, list[tuple[str, ...]]] = {}
    for entry in read_list(file):
        words = tuple(_TOKEN.findall(entry))
        if words:
            phrases.setdefault(words[0], []).append(words)
    return phrases
