"""Real text for benchmarks, assembled from what a development machine has; nothing is fetched.

Sources of installed Python packages, C headers, documentation, and the translations of programs' messages (compiled
gettext catalogues), in many scripts. Which files there are differs from machine to machine, so figures compare within
one run only.
"""

import gettext
import itertools
import sysconfig
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

SEPARATOR = "\n<|endoftext|>\n"
# Languages whose letters are not Latin.
SCRIPTS = "ru uk el ja zh_CN zh_TW ko ar he hi th ta bn te ml gu fa bg sr ka hy".split()


def mixed_text(size: int) -> str:
    """Documents of about `size` bytes: nearly half Python, the rest headers, documentation and translations."""
    packages = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))]
    packages += [Path(__file__).parent.parent, Path("/usr/lib/python3")]
    documents = ["/usr/share/doc", "/usr/share/perl", "/usr/share/info", "/usr/lib", "/opt", str(Path.home())]
    sources = [
        (0.45, _files(packages, (".py", ".pyi"))),
        (0.12, _files([Path("/usr/include")], (".h", ".hpp", ""))),
        (0.23, _files(map(Path, documents), (".html", ".md", ".rst", ".txt", ".pod", ".pm"))),
        (0.2, _catalogues("*")),
    ]
    parts = [_take(documents, round(share * size)) for share, documents in sources]
    # Where a machine has little of one kind, more of the others makes up for it.
    short = size - sum(len(part.encode()) for part in parts)
    if short > 0:
        parts.append(_take(sources[0][1], short))
    return SEPARATOR.join(parts)


def many_scripts_text(size: int) -> str:
    """Translations of about `size` bytes, of which about two fifths are beyond ASCII."""
    languages = [_catalogues(language) for language in SCRIPTS]
    documents = itertools.chain.from_iterable(itertools.zip_longest(*languages, fillvalue=""))
    return _take((_with_ascii(document) for document in documents if document), size)


def _with_ascii(document: str, share: float = 0.4) -> str:
    """The document with lines of its own ASCII removed or repeated, so that about `share` of it is beyond ASCII."""
    data = document.encode()
    beyond = sum(byte >= 0x80 for byte in data)
    missing = int(beyond / share) - len(data)
    if missing <= 0:
        return document
    plain = "\n".join(line for line in document.splitlines() if line.isascii())
    return document + (plain * (missing // max(len(plain), 1) + 1))[:missing]


def _take(documents: Iterator[str], size: int) -> str:
    taken: list[str] = []
    while size > 0 and (document := next(documents, None)) is not None:
        document = document[:size]
        taken.append(document)
        size -= len(document.encode()) + len(SEPARATOR)
    return SEPARATOR.join(taken)


def _files(folders: Iterable[Path], suffixes: tuple[str, ...]) -> Iterator[str]:
    seen: set[int] = set()
    for folder in folders:
        # Every seventh file first, then the others: a sample of all folders, the same each time.
        files = sorted(file for file in folder.rglob("*") if file.suffix in suffixes and file.is_file())
        for file in itertools.chain.from_iterable(files[start::7] for start in range(7)):
            try:
                text = file.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            if len(text) > 200 and "\0" not in text and hash(text) not in seen and is_settled(text):
                seen.add(hash(text))
                yield text


def is_settled(text: str) -> bool:
    """Whether all characters are in Python's edition of Unicode: of newer ones peers differ in what is a letter."""
    return all(unicodedata.category(character) != "Cn" for character in set(text))


def _catalogues(language: str) -> Iterator[str]:
    folders = sorted(Path("/usr/share/locale").glob(f"{language}*/LC_MESSAGES"))
    folders += sorted(Path(sysconfig.get_path("purelib")).glob(f"**/locale/{language}*/LC_MESSAGES"))
    files = [file for folder in folders for file in sorted(folder.glob("*.mo"))]
    for file in itertools.chain.from_iterable(files[start::7] for start in range(7)):
        try:
            with open(file, "rb") as opened:
                catalogue = gettext.GNUTranslations(opened)
        except (OSError, ValueError, IndexError):
            # Some catalogues have headers that gettext cannot parse.
            continue
        messages = vars(catalogue)["_catalog"].values()
        yield "\n".join(message for message in messages if isinstance(message, str))
