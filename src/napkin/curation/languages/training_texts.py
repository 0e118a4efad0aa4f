"""The texts that a classifier learns from: a folder with a file, or a folder of files, per language."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from napkin.curation.languages.letters import letter_table, lowered_code_points
from napkin.errors import NapkinError
from napkin.files import StrPath, read_bytes

SOURCES = "SOURCES"
"""A file of this name in the folder says where its texts are from; the classifier's header keeps it."""
_LINE_FEED = 10
_CODE = re.compile(r"[a-z]{2,3}")


@dataclass(frozen=True)
class LanguageTexts:
    """Paragraphs of one language, for training or for measuring.

    `points` are their code points in lower case, uint32; word i of them begins at `word_starts[i]`, and paragraph i has
    the words from `first_words[i]` to `first_words[i + 1]` and ends at `ends[i]`: all int64.
    """

    language: str
    points: NDArray[np.uint32]
    word_starts: NDArray[np.int64]
    first_words: NDArray[np.int64]
    ends: NDArray[np.int64]


def read_training_texts(folder: StrPath, characters: int, seed: int) -> list[tuple[str, list[str]]]:
    """(language, paragraphs) of a folder, by language, in a random order that depends on the seed alone.

    `folder` has a file CODE.txt or a folder CODE of .txt files per language, CODE being two or three letters; each line
    is a paragraph. Of each language at most `characters` characters are taken, an equal part of each file if possible.
    Raises NapkinError where a name is not a code, a text is not UTF-8 or has no words, or there are fewer than two
    languages.
    """
    folder = Path(folder)
    # Path.is_dir raises for a name that is too long.
    if not os.path.isdir(folder):
        raise NapkinError(f"'{folder}' is not a folder: give one with a file CODE.txt, or a folder CODE, per language")
    found = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name == SOURCES:
            continue
        code = entry.name.removesuffix(".txt")
        if not _CODE.fullmatch(code):
            raise NapkinError(f"'{entry}' is not named for a language: use its ISO 639 code, such as en.txt or en/")
        files = sorted(entry.glob("*.txt")) if entry.is_dir() else [entry]
        paragraphs = _sample([_paragraphs(file) for file in files], characters, seed)
        if not paragraphs:
            raise NapkinError(f"'{entry}' has no words: remove it, or put a text into it")
        found.append((code, paragraphs))
    if len(found) < 2:
        raise NapkinError(f"'{folder}' has texts of {len(found)} languages: a classifier needs at least 2")
    return found


def read_sources(folder: StrPath) -> str:
    """What the file SOURCES of a folder says; empty if there is none."""
    file = Path(folder) / SOURCES
    return "\n".join(_lines(file)) if file.exists() else ""


def _paragraphs(file: Path) -> list[str]:
    return [line for line in _lines(file) if any(map(str.isalpha, line))]


def _lines(file: Path) -> list[str]:
    try:
        return read_bytes(file).decode().split("\n")
    except UnicodeDecodeError as error:
        raise NapkinError(f"'{file}' is not UTF-8 at byte {error.start}: convert it") from error


def _sample(files: list[list[str]], characters: int, seed: int) -> list[str]:
    """Paragraphs of each file in turn, in random order, until there are enough characters."""
    random = np.random.default_rng(seed)
    shuffled = [[paragraphs[i] for i in random.permutation(len(paragraphs))] for paragraphs in files]
    taken: list[str] = []
    size = 0
    for at in range(max(map(len, shuffled), default=0)):
        for paragraphs in shuffled:
            if at < len(paragraphs) and size < characters:
                taken.append(paragraphs[at])
                size += len(paragraphs[at])
    return taken


def scanned(language: str, paragraphs: list[str]) -> LanguageTexts:
    """Paragraphs of a language with the places of their words."""
    points = lowered_code_points("\n".join(" ".join(text.split()) for text in paragraphs) + "\n")
    inside = letter_table()[points] == 1
    word_starts = np.flatnonzero(inside & ~np.concatenate([[False], inside[:-1]]))
    ends = np.flatnonzero(points == _LINE_FEED)
    first_words = np.concatenate([[0], np.searchsorted(word_starts, ends)])
    return LanguageTexts(language, points, word_starts, first_words, ends)
