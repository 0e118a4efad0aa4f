"""The metadata of a page, from the head that the parser has serialized: title, language, address, date, licence; and
the encoding of its bytes.
"""

import codecs
import re
from dataclasses import dataclass
from html import unescape
from itertools import islice

_HEAD_CHARACTERS = 400_000
"""Characters of a page that are searched for its head; some carry styles and scripts of this size before it."""
_LONGEST = 500
"""The most characters kept of a value."""
_HTML_LANGUAGE = re.compile(r'<html\b[^>]*?\slang="([A-Za-z][\w-]{0,34})"')
_TITLE = re.compile(r"<title\b[^>]*>([^<]*)</title>")
_TAG = re.compile(r"<(meta|link)\b([^>]*)>")
_ATTRIBUTE = re.compile(r'([\w:.-]+)="([^"]*)"')
_LICENCE_LINK = re.compile(
    r'<a\b(?=[^>]*\shref="([^"]{1,300})")[^>]*?(?:\srel="[^"]*\blicense\b[^"]*"|\shref="https?://(?:www\.)?'
    r"creativecommons\.org/(?:licenses|publicdomain)/)"
)
_LICENCE, _CREATIVE_COMMONS = re.compile('license"'), re.compile(r"creativecommons\.org/")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?:[T ]\d{2}:\d{2}(?::\d{2})?(?:\.\d+)?(?:Z|[+-]\d{2}:?\d{2})?)?")
_LINKED_DATA_DATE = re.compile(r'"datePublished"\s*:\s*"([^"]{8,40})"')
_TIME = re.compile(r'<time\b[^>]*?\sdatetime="([^"]{8,40})"')
_DATE_NAMES = (
    "article:published_time datepublished date pubdate publishdate publish_date dc.date dc.date.issued dcterms.date"
    " dcterms.created parsely-pub-date sailthru.date og:published_time citation_publication_date"
).split()


@dataclass(frozen=True)
class PageMetadata:
    """Each empty where the page does not say it; `published` is a date of ISO 8601."""

    title: str = ""
    language: str = ""
    canonical: str = ""
    published: str = ""
    licence: str = ""


def page_metadata(page: str) -> PageMetadata:
    """Title, language, address, date and licence that a serialized page states."""
    head = page[:_HEAD_CHARACTERS]
    stop = head.find("<body")
    after = head[stop:] if stop >= 0 else head
    head = head[:stop] if stop >= 0 else head
    named: dict[str, str] = {}
    linked: dict[str, str] = {}
    for kind, attributes in _TAG.findall(head):
        values = dict(_ATTRIBUTE.findall(attributes))
        if kind == "meta":
            name = values.get("property") or values.get("name") or values.get("itemprop") or ""
            named.setdefault(name.lower(), values.get("content", ""))
        else:
            for relation in values.get("rel", "").lower().split():
                linked.setdefault(relation, values.get("href", ""))
    language, title = _HTML_LANGUAGE.search(head), _TITLE.search(head)
    licence = linked.get("license") or named.get("dc.rights.uri") or _licence_link(page)
    return PageMetadata(
        title=_clean(named.get("og:title") or (title[1] if title else "")),
        language=language[1] if language else "",
        canonical=_clean(linked.get("canonical") or named.get("og:url", "")),
        published=_published(named, head, after),
        licence=_clean(licence),
    )


def _licence_link(page: str) -> str:
    if "license" not in page and "creativecommons.org" not in page:
        return ""
    # Licences are linked at the end of a page, if at all.
    for part in (page[-_HEAD_CHARACTERS:], page[:_HEAD_CHARACTERS]):
        places = (_LICENCE.finditer(part), _CREATIVE_COMMONS.finditer(part))
        for place in (each for found in places for each in islice(found, 8)):
            found = _LICENCE_LINK.match(part, part.rfind("<", 0, place.start()))
            if found:
                return found[1]
    return ""


def _published(named: dict[str, str], head: str, after: str) -> str:
    values = [named[name] for name in _DATE_NAMES if name in named]
    for pattern, text in ((_LINKED_DATA_DATE, head), (_LINKED_DATA_DATE, after), (_TIME, after)):
        if not values:
            values = [found[1] for found in [pattern.search(text)] if found]
    dates = (_DATE.match(value.strip()) for value in values)
    return next((date[0] for date in dates if date), "")


def _clean(value: str) -> str:
    return " ".join(unescape(value).split())[:_LONGEST]


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
    from resiliparse.parse.encoding import detect_encoding

    match = _META.search(data[:_META_BYTES])
    for name in (declared, match[1].decode("ascii") if match else "", detect_encoding(data[:_GUESSED_BYTES]) or ""):
        known = _known_encoding(name)
        if known:
            return data.decode(known, "replace"), known
    return data.decode("utf-8", "replace"), "utf-8"


def _known_encoding(name: str) -> str:
    """Python's name of the encoding that the web calls so (WHATWG's Encoding Standard); empty if there is none."""
    from resiliparse.parse.encoding import map_encoding_to_html5

    try:
        mapped = map_encoding_to_html5(name.strip(), fallback_utf8=False) if name.strip() else None
        return codecs.lookup(mapped).name if mapped else ""
    except (LookupError, ValueError, TypeError):
        return ""
