"""Training a language classifier: a softmax over the mean of its n-grams' rows, by stochastic gradient descent.

    rows [2^row_bits, 16] · n-gram counts / n  ->  hidden [16]  ->  outputs [languages, 16] · hidden + bias

As fastText's classifier (Joulin et al. 2016), with Adagrad. Nothing is random but the seed: the same texts give the
same weights, bit by bit, on the same type of processor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from napkin.curation.languages.calibration import fit_sharpness
from napkin.curation.languages.classifier import WIDTH, LanguageClassifier
from napkin.curation.languages.compiled.loading import CORE
from napkin.curation.languages.letters import letter_table
from napkin.curation.languages.training_texts import LanguageTexts, read_sources, read_training_texts, scanned
from napkin.errors import NapkinError
from napkin.files import StrPath

_ROOM = 8192 + 2 * WIDTH
_STRETCH = 10_000
"""Examples between two words of progress."""
_HELD_OUT = 20
"""One paragraph of so many is kept for calibration."""
_SURE = 5.0
"""A paragraph is left out if another language is e^5 = 150 times as probable, to a first, shorter training."""


@dataclass(frozen=True)
class LanguageTraining:
    """How a language classifier is trained."""

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
    told = progress or (lambda done, total, what: None)
    texts = read_training_texts(folder, options.characters, options.seed)
    short = replace(options, examples=-(-options.examples // 10))
    first = _trained(texts, short, lambda done, total: told(done, total, "first pass"))
    texts = [(language, _without_other_languages(first, language, paragraphs)) for language, paragraphs in texts]
    held_out = [scanned(language, paragraphs[: len(paragraphs) // _HELD_OUT + 1]) for language, paragraphs in texts]
    classifier = _trained(texts, options, lambda done, total: told(done, total, "second pass"))
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

    All are kept if it would be most of them: then it is the first classifier that is wrong.
    """
    label = first.languages.index(language)
    kept = [text for text in paragraphs if not _looks_like_another(first, label, text)]
    return kept if len(kept) > 0.5 * len(paragraphs) else paragraphs


def _looks_like_another(first: LanguageClassifier, label: int, text: str) -> bool:
    logits = first.logits(text)
    return logits is not None and bool(logits.max() - logits[label] > _SURE)


def _descend(
    training: list[LanguageTexts], options: LanguageTraining, progress: Callable[[int, int], object]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    from napkin.curation.languages.compiled.descend import descend

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
