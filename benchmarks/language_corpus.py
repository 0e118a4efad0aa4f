"""The texts that the package's language classifier is trained on: a folder per language, made from Debian packages.

    python benchmarks/language_corpus.py PACKAGES TEXTS
    napkin data train-languages TEXTS --out languages.safetensors

Missing packages are downloaded to PACKAGES by `apt-get download` (about 600 MB); nothing is installed. In TEXTS each
language, named by its ISO 639-1 code (639-3 where there is none), gets a file per kind of text, a paragraph per line:

    messages.txt    translated messages of LibreOffice and Firefox (MPL-2.0), of Battle for Wesnoth and Freeciv
                    (GPL-2+), and of desktop programs, mostly GNOME's, KDE's and MATE's (GPL-2+, LGPL-2+)
    help.txt        LibreOffice's help (MPL-2.0), GNOME's user documentation (CC-BY-SA-3.0)
    manuals.txt     manual pages (manpages-l10n: GPL-3+ and the licences of the pages), Debian's installation guide,
                    reference and FAQ (GPL-2+), fortunes (GPL-2+ and public domain)

`zxx` (no linguistic content) is code of Python's standard library (PSF-2.0) and generated numbers.
"""

import argparse
import ast
import fnmatch
import gettext
import gzip
import html
import io
import random
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = """
    libreoffice-l10n-* libreoffice-help-* firefox-esr-l10n-* manpages-* debian-reference-* debian-faq-* fortunes-??
    gnome-user-docs installation-guide-amd64 freeciv-data wesnoth-1.16-data manpages
    aisleriot anjuta-common audacity-data bleachbit brasero-common caja-common cinnamon-l10n epiphany-browser-data
    evince-common evolution-common evolution-data-server-common file-roller gedit-common gnome-bluetooth-common
    gnome-commander-data gnome-control-center-data gnome-panel-data gnome-settings-daemon-common
    gnome-software-common gnome-terminal-data gnumeric-common gparted-common kdevelop-l10n konversation-data
    krita-l10n ktorrent-data libglib2.0-data libgtk-3-common libgtk2.0-common libkf5khtml-data libkf5sysguard-data
    libkf5unitconversion-data libkf5xmlgui-data mate-control-center-common mate-panel-common mate-terminal-common
    nautilus-data orca pidgin-data pluma-common rhythmbox-data seahorse synaptic thunar-data totem-common
    xfce4-settings
""".split()
LEAST_CHARACTERS = 60_000
"""Languages with fewer are left out: there is too little to learn from."""

SOURCES = (
    "Texts of Debian packages, collected by benchmarks/language_corpus.py:\n"
    + (__doc__ or "").partition("per line:")[2]
)

# How packages name a language, where it is not the code's first part.
NAMES = {
    **{
        "nb_no": "nb",
        "nn_no": "nn",
        "no": "nb",
        "pt_br": "pt",
        "ga_ie": "ga",
        "kmr": "ku",
        "kmr_latn": "ku",
        "gug": "gn",
        "fil": "tl",
    },
    **{"c": "en", "racv": "ca", "ca_valencia": "ca", "sr_latin": "sr", "sr_ijekavian": "sr", "arn": "arn"},
}
# Packages of several languages, and languages with little text for which a larger one is often mistaken.
LEFT_OUT = {
    *"in qtz za all core dev common".split(),
    *"an ang ast ay co crh dgo dz grc ia ie kok ks la lij mai mhr mni nr sat sc sco sd skr son szl trs".split(),
}
PARAGRAPH = re.compile(rb"(?is)<(p|li|dd|title|h\d|note|item)\b[^>]*>(.*?)</\1>")
NOISE = re.compile(
    r"<[^<>]*>|\{[^{}]*\}|\$\([^()]*\)|\$\w+|%[\w%]*|\\n|https?:\S+|\S*[@/\\_]\S*|&\w+;|[~_]|\b[A-Z]{3,}\b|\w*\d\w*"
)


def language_of(name: str) -> str:
    """The code of a language that a package calls `name`; empty if it is left out."""
    name = name.lower().replace("-", "_").replace("@", "_")
    first = name.split("_")[0]
    code = NAMES.get(name) or NAMES.get(first, first)
    return "" if code in LEFT_OUT or not code.isalpha() or len(code) > 3 else code


def clean(text: str) -> str:
    """A paragraph without markup, placeholders, addresses and marks of keyboard shortcuts."""
    text = html.unescape(text).replace("~", "").replace("\u00ad", "")
    return " ".join(NOISE.sub(" ", text).split())


def is_worth(text: str) -> bool:
    """Whether there is enough of a sentence: three words, or eight letters of a script that writes none."""
    letters = sum(map(str.isalpha, text))
    words = len(text.split())
    return (letters >= 12 and words >= 3) or (letters >= 8 and text.upper() == text.lower())


def messages(data: bytes) -> Iterator[str]:
    """The translations of a .mo file that differ from their originals."""
    try:
        catalog = gettext.GNUTranslations(io.BytesIO(data))._catalog  # pyright: ignore[reportAttributeAccessIssue]
    except (ValueError, IndexError):
        # A file may name another encoding than it is in, or have a damaged header.
        return
    for key, value in catalog.items():
        original = key[0] if isinstance(key, tuple) else key
        if original and original.rpartition("\x04")[2] != value:
            yield from re.split(r"\n\s*\n", value)


def firefox(data: bytes) -> Iterator[str]:
    """The messages of a language pack of Firefox: .ftl and .properties files."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            if name.endswith((".ftl", ".properties")):
                text = archive.read(name).decode("utf-8", "replace")
                lines = [line for line in text.splitlines() if not line.startswith("#")]
                yield from (line.partition("=")[2] or line for line in lines)


def manual(data: bytes) -> Iterator[str]:
    """The paragraphs of a page for man."""
    text = gzip.decompress(data).decode("utf-8", "replace")
    text = re.sub(r'(?m)^[.\'](?!B |I |BR |IR |TP|PP).*$|^\.\S+|\\f[A-Z]|\\\(..|\\.|^\.\\".*$', "", text)
    yield from (paragraph.replace("\n", " ") for paragraph in re.split(r"\n\s*\n", text))


def paragraphs(data: bytes) -> Iterator[str]:
    """The text of the paragraphs of an HTML or Mallard page."""
    for match in PARAGRAPH.finditer(re.sub(rb"(?s)<(script|style|pre|code|tt)\b.*?</\1>", b" ", data)):
        yield match[2].decode("utf-8", "replace")


def texts_of(path: str, package: str, data: bytes) -> tuple[str, str, Iterable[str]]:
    """Language, kind and paragraphs of a file of a package; the language is empty where it is of no use."""
    if found := re.search(r"/(?:resource|locale)/([\w@-]+)/LC_MESSAGES/[^/]+\.mo$", path):
        return language_of(found[1]), "messages", messages(data)
    if path.endswith(".xpi"):
        return language_of(package.removeprefix("firefox-esr-l10n-")), "messages", firefox(data)
    if found := re.search(r"/help/([\w@-]+)/.*\.(html|page)$", path):
        return language_of(found[1]), "help", paragraphs(data)
    if found := re.search(r"/man/(?:([\w@]+)/)?man\d/[^/]+\.gz$", path):
        return language_of(found[1] or "en"), "manuals", manual(data)
    if found := re.search(r"/installation-guide-amd64/(\w+)/.*\.html$", path):
        return language_of(found[1]), "manuals", paragraphs(data)
    if found := re.search(r"/(?:debian-reference|debian-faq|FAQ)[^.]*[/.]([a-z-]{2,5})\.(?:html|txt.gz)$", path):
        return language_of(found[1]), "manuals", paragraphs(gzip.decompress(data) if path.endswith(".gz") else data)
    if package.startswith("fortunes-") and "/games/fortunes/" in path and "." not in path.rpartition("/")[2]:
        # fortunes-br are of Brazil, not of Brittany.
        return language_of(package.removeprefix("fortunes-").replace("br", "pt")), "manuals", _fortunes(data)
    return "", "", ()


def _fortunes(data: bytes) -> list[str]:
    try:
        return re.split(r"\n%\n", data.decode())
    except ValueError:
        return []


def read_package(file: Path) -> Iterator[tuple[str, str, str]]:
    """(language, kind, paragraph) of a .deb file."""
    package = file.name.partition("_")[0]
    tar = subprocess.run(["dpkg-deb", "--fsys-tarfile", file], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
        for member in archive:
            if member.isfile() and member.size < 2**25 and not re.search(r"\.(png|jpg|ogg|svg|js)$", member.name):
                language, kind, texts = texts_of(member.name, package, archive.extractfile(member).read())  # type: ignore[union-attr]
                if language:
                    for text in map(clean, texts):
                        if is_worth(text):
                            yield language, kind, text


def download(folder: Path) -> list[Path]:
    """The .deb files of PACKAGES in `folder`, downloaded where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    known = subprocess.run(["apt-cache", "pkgnames"], capture_output=True, text=True, check=True).stdout.split()
    wanted = {name for name in known for pattern in PACKAGES if fnmatch.fnmatch(name, pattern)}
    missing = sorted(wanted - {file.name.partition("_")[0] for file in folder.glob("*.deb")})
    if missing:
        subprocess.run(["apt-get", "download", *missing], cwd=folder, check=True)
    return sorted(file for file in folder.glob("*.deb") if file.name.partition("_")[0] in wanted)


def code() -> Iterator[str]:
    """Statements of Python's standard library without docstrings, and numbers: text that is of no language."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.Assign, ast.Return, ast.For, ast.If, ast.With, ast.Import, ast.Raise)):
                line = " ".join(ast.unparse(node).split())
                if 30 < len(line) < 300:
                    yield line
    chosen = random.Random(0)
    for _ in range(3000):
        yield " ".join(f"{chosen.getrandbits(chosen.randrange(8, 160)):x}" for _ in range(chosen.randrange(2, 9)))
        yield " ".join("".join(chosen.choices("bcdfghjklmnpqrstvwxz", k=chosen.randrange(2, 9))) for _ in range(5))


def mostly_ascii(text: str) -> bool:
    """Whether most letters are ASCII."""
    letters = [character for character in text if character.isalpha()]
    return sum(map(str.isascii, letters)) > 0.5 * len(letters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("texts", type=Path)
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for file in download(options.packages):
        print(file.name, file=sys.stderr)
        for language, kind, text in read_package(file):
            found[language][kind][text] = None
    english = {text for texts in found["en"].values() for text in texts}
    options.texts.mkdir(parents=True, exist_ok=True)
    (options.texts / "SOURCES").write_text(SOURCES, encoding="utf-8")
    found["zxx"]["code"] = dict.fromkeys(code())
    for language, kinds in sorted(found.items()):
        everything = [text for texts in kinds.values() for text in texts]
        if sum(map(len, everything)) < LEAST_CHARACTERS:
            continue
        other_script = sum(map(mostly_ascii, everything)) < 0.5 * len(everything)
        for kind, texts in kinds.items():
            kept = [
                text
                for text in texts
                if (language in ("en", "zxx") or text not in english) and not (other_script and mostly_ascii(text))
            ]
            if kept:
                target = options.texts / language / f"{kind}.txt"
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text("\n".join(kept) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
