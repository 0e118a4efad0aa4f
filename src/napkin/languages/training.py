"""Training a language classifier: a softmax over the mean of its n-grams' rows, by stochastic gradient descent.

    rows [2^row_bits, 16] · n-gram counts / n  ->  hidden [16]  ->  outputs [languages, 16] · hidden + bias

As fastText's classifier (Joulin et al. 2016), with Adagrad. Nothing is random but the seed: the same texts give the
same weights, bit by bit, on the same type of processor.

Calibration: how sharp a classifier's softmax has to be, and how far its probabilities are from the observed
frequencies.

A text of n n-grams has its logits multiplied by exp(a + b · ln n), with a and b of the least cross-entropy on held-out
texts. That is temperature scaling (Guo et al. 2017) with a temperature that depends on the length: a mean of many
n-grams is more certain than a mean of few.

The texts that a classifier learns from: a folder with a file, or a folder of files, per language.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from napkin.errors import NapkinError
from napkin.files import StrPath, read_bytes
from napkin.languages.classifier import WIDTH, LanguageClassifier, letter_table, lowered_code_points
from napkin.languages.compiled import CORE


def fit_sharpness(classifier: LanguageClassifier, texts: Sequence[str], languages: Sequence[str]) -> LanguageClassifier:
    """The classifier with the sharpness that fits labelled texts; those without letters are passed over."""
    plain = replace(classifier, sharpness=(0.0, 0.0))
    logits, labels, lengths = [], [], []
    for text, language in zip(texts, languages, strict=True):
        n_ngrams, _ = plain.sum_of_rows(text)
        if n_ngrams:
            logits.append(plain.logits(text))
            labels.append(classifier.languages.index(language))
            lengths.append(n_ngrams)
    return replace(classifier, sharpness=least_cross_entropy(np.array(logits), np.array(labels), np.array(lengths)))


def least_cross_entropy(
    logits: NDArray[np.float32], labels: NDArray[np.int64], lengths: NDArray[np.int64]
) -> tuple[float, float]:
    """(a, b) of the least mean cross-entropy; logits are [texts, languages], lengths numbers of n-grams."""
    from scipy.optimize import minimize
    from scipy.special import logsumexp

    own = logits[np.arange(len(logits)), labels]

    def cross_entropy(parameters: NDArray[np.float64]) -> float:
        sharp = np.exp(parameters[0] + parameters[1] * np.log(lengths))
        return float((logsumexp(logits * sharp[:, None], axis=1) - own * sharp).mean())

    minimum = minimize(cross_entropy, [0.0, 0.0], method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-7})
    return float(minimum.x[0]), float(minimum.x[1])


@dataclass(frozen=True)
class Reliability:
    """Guesses whose probabilities are in one interval: their number, mean probability, and the share that is right."""

    guesses: int
    probability: float
    right: float


def reliability(
    probabilities: Sequence[float], right: Sequence[bool], bins: int = 10
) -> tuple[list[Reliability], float]:
    """A reliability diagram of equally wide intervals, and the expected calibration error (Naeini et al. 2015)."""
    values, truth = np.asarray(probabilities, float), np.asarray(right, float)
    interval = np.minimum((values * bins).astype(int), bins - 1)
    rows = [
        Reliability(int(chosen.sum()), float(values[chosen].mean()), float(truth[chosen].mean()))
        for chosen in (interval == i for i in range(bins))
        if chosen.any()
    ]
    return rows, sum(row.guesses * abs(row.probability - row.right) for row in rows) / len(values)


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
    texts = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(".") or entry.name == SOURCES:
            continue
        code = entry.name.removesuffix(".txt")
        if not _CODE.fullmatch(code):
            raise NapkinError(f"'{entry}' is not named for a language: use its ISO 639 code, such as en.txt or en/")
        files = sorted(entry.glob("*.txt")) if entry.is_dir() else [entry]
        lines = [[line for line in _lines(file) if any(map(str.isalpha, line))] for file in files]
        paragraphs = _sample(lines, characters, seed)
        if not paragraphs:
            raise NapkinError(f"'{entry}' has no words: remove it, or put a text into it")
        texts.append((code, paragraphs))
    if len(texts) < 2:
        raise NapkinError(f"'{folder}' has texts of {len(texts)} languages: a classifier needs at least 2")
    return texts


def read_sources(folder: StrPath) -> str:
    """The text of the file SOURCES of a folder; empty if there is none."""
    file = Path(folder) / SOURCES
    return "\n".join(_lines(file)) if file.exists() else ""


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


_ROOM = 8192 + 2 * WIDTH
_STRETCH = 10_000
"""Examples between two words of progress."""
_HELD_OUT = 20
"""One paragraph in this many is held out for calibration."""
_SURE = 5.0
"""A paragraph is left out if another language is e^5 = 150 times as probable, to a first, shorter training."""


@dataclass(frozen=True)
class LanguageTraining:
    """The settings by which a language classifier is trained."""

    row_bits: int = 18
    """The n-grams are hashed to 2^row_bits rows of 16 bytes: 18 makes a file of 4 MB."""
    examples: int = 30_000
    """Pieces of text that are learned from, per language: 1 to 40 words each."""
    characters: int = 1_000_000
    """Characters of each language that are read at most."""
    rate: float = 0.5
    """The learning rate at the start; it falls to a tenth of a percent of that."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (("row_bits", 8, 22), ("examples", 1, 10**7), ("characters", 1000, 10**9)):
            if not least <= (value := getattr(self, name)) <= most:
                raise NapkinError(f"{name} is {value}: use {least:,} to {most:,}")
        if not 0 < self.rate <= 100:
            raise NapkinError(f"rate is {self.rate}: use more than 0 and at most 100")
        if not 0 <= self.seed < 2**63:
            raise NapkinError(f"seed is {self.seed}: use 0 to 2^63 - 1")


Progress = Callable[[int, int, str], object]
"""Called with examples done, their total, and what they are for."""


def train_languages(
    folder: StrPath, options: LanguageTraining = LanguageTraining(), progress: Progress | None = None
) -> LanguageClassifier:
    """The classifier of the languages of a folder of texts; see `read_training_texts` for what is in it.

    It is trained twice, the first time on a tenth of the examples, to leave out paragraphs under the wrong name.
    """
    # Both are needed: one message if they must be compiled.
    CORE.load("descend", "sum_rows")
    report = progress or (lambda done, total, what: None)
    texts = read_training_texts(folder, options.characters, options.seed)
    short = replace(options, examples=-(-options.examples // 10))
    first = _trained(texts, short, lambda done, total: report(done, total, "first pass"))
    texts = [(language, _without_other_languages(first, language, paragraphs)) for language, paragraphs in texts]
    held_out = [scanned(language, paragraphs[: len(paragraphs) // _HELD_OUT + 1]) for language, paragraphs in texts]
    classifier = _trained(texts, options, lambda done, total: report(done, total, "second pass"))
    classifier = replace(classifier, sources=read_sources(folder))
    return fit_sharpness(classifier, *labelled_examples(held_out, 200, options.seed + 1))


def _trained(
    texts: list[tuple[str, list[str]]], options: LanguageTraining, progress: Callable[[int, int], object]
) -> LanguageClassifier:
    """A classifier that has learned from all paragraphs but the first of each language, which are held out."""
    training = [scanned(language, paragraphs[len(paragraphs) // _HELD_OUT :]) for language, paragraphs in texts]
    return LanguageClassifier.quantized([language for language, _ in texts], *_descend(training, options, progress))


def _without_other_languages(first: LanguageClassifier, language: str, paragraphs: list[str]) -> list[str]:
    """The paragraphs that do not look like another language: texts of every source have some that are mislabelled.

    All are kept if most of them look so: then the first classifier is wrong.
    """
    label = first.languages.index(language)

    def is_another(text: str) -> bool:
        logits = first.logits(text)
        return logits is not None and bool(logits.max() - logits[label] > _SURE)

    kept = [text for text in paragraphs if not is_another(text)]
    return kept if len(kept) > 0.5 * len(paragraphs) else paragraphs


def _descend(
    training: list[LanguageTexts], options: LanguageTraining, progress: Callable[[int, int], object]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    from napkin.languages.compiled.descend import descend

    points, examples = labelled_places(training, options.examples, options.seed)
    random = np.random.default_rng(options.seed)
    is_letter, n_labels = letter_table(), len(training)
    rows = (random.uniform(-1, 1, (2**options.row_bits, WIDTH)) / WIDTH).astype(np.float32)
    outputs = np.zeros((n_labels, WIDTH + 1), np.float32)
    squares, output_squares = np.zeros(len(rows), np.float32), np.zeros(n_labels, np.float32)
    scratch = np.zeros(_ROOM + n_labels, np.float32)
    arrays = (rows, squares, outputs, output_squares, scratch)
    model = np.array([*(each.ctypes.data for each in arrays), 0, 0, options.seed])
    for first in range(0, len(examples), _STRETCH):
        stretch = examples[first : first + _STRETCH]
        # The rate falls along a line from the first example to the last.
        shares = np.array([first, first + len(stretch)]) / len(examples)
        model[5:7] = (options.rate * (1 - 0.999 * shares)).astype(np.float32).view(np.int32)
        descend(
            *(stretch.ctypes.data, len(stretch), points.ctypes.data, is_letter.ctypes.data),
            *(model.ctypes.data, n_labels, options.row_bits),
        )
        progress(first + len(stretch), len(examples))
    return rows, outputs


def labelled_places(
    texts: list[LanguageTexts], per_language: int, seed: int
) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """All code points, and `per_language` pieces of each language in random order: int64 [n, 3], start, end, label.

    A piece is 1 to 40 words of a paragraph, their number uniform on a logarithmic scale.
    """
    random = np.random.default_rng(seed)
    parts, offset = [], 0
    for label, text in enumerate(texts):
        n_words = np.diff(text.first_words)
        usable = np.flatnonzero(n_words)
        paragraph = usable[random.integers(len(usable), size=per_language)]
        size = np.minimum(n_words[paragraph], np.exp(random.uniform(0, np.log(41), per_language)).astype(np.int64))
        first = text.first_words[paragraph] + random.integers(n_words[paragraph] - size + 1)
        following = np.append(text.word_starts, len(text.points))[first + size]
        stop = np.where(first + size == text.first_words[paragraph + 1], text.ends[paragraph], following)
        parts.append(np.stack([text.word_starts[first] + offset, stop + offset, np.full(per_language, label)], axis=1))
        offset += len(text.points)
    examples = np.concatenate(parts)
    return np.concatenate([text.points for text in texts]), examples[random.permutation(len(examples))]


def labelled_examples(texts: list[LanguageTexts], per_language: int, seed: int) -> tuple[list[str], list[str]]:
    """Pieces of text and their languages, as `labelled_places` takes them."""
    points, examples = labelled_places(texts, per_language, seed)
    pieces = [points[start:stop].astype("<u4").tobytes().decode("utf-32-le") for start, stop, _ in examples]
    return pieces, [texts[label].language for label in examples[:, 2]]
