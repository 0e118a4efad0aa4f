"""The language of a text: the mean of its n-grams' rows, a linear layer, and a softmax with calibrated probabilities.

The classifier sees a text's letters in lower case, as code points, with one zero between words. A word is a run of
letters and marks (combining vowels and tones); digits, punctuation and symbols only separate words. Canonically equal
texts are the same: they are composed (NFC) first.

The features of a text are its character n-grams, each hashed to a row of the weights. A word of code points c1 … cm is
read as `space c1 … cm space`. Its n-grams of 1 to LONGEST_NGRAM characters, but for the spaces alone, and the word as a
whole if it is longer than that, each give one row: the hash starts at SEED, and each character c makes (hash xor c) ·
FACTOR of it, modulo 2^64; the row is its highest bits. Words of more than LONGEST_WORD letters, as scripts without
spaces have them, are cut into pieces.

For documents in several languages, `language_shares` gives the share of each, by paragraphs.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from napkin.errors import NapkinError
from napkin.files import StrPath, atomic_write_bytes, read_bytes
from napkin.languages.compiled import CORE, sum_rows
from napkin.tokenizer.numba.character_classes import KIND, LETTER, MARK, character_classes

_UNICODE = "16.0"
"""The version of Unicode whose letters are used, independent of Python's own."""


def lowered_code_points(text: str) -> NDArray[np.uint32]:
    """The code points of the composed text in lower case: all of them, uint32 [n]."""
    if not text.isascii():
        text = normalize("NFC", text)
    return np.frombuffer(text.lower().encode("utf-32-le", "surrogatepass"), np.uint32)


def words(text: str) -> list[str]:
    """The words of a text in lower case: what the compiled functions see too."""
    is_letter = letter_table()
    points = lowered_code_points(text)
    separated = np.where(is_letter[points] == 1, points, np.uint32(ord(" ")))
    return separated.astype("<u4").tobytes().decode("utf-32-le").split(" ") if len(points) else []


@cache
def letter_table() -> NDArray[np.uint8]:
    """1 for each code point that belongs to a word, else 0: uint8 [1114112]."""
    classes = character_classes(_UNICODE)
    return (((classes & KIND) == LETTER) | ((classes & MARK) > 0)).astype(np.uint8)


LONGEST_NGRAM = 4
LONGEST_WORD = 64
SEED = 0x9E3779B97F4A7C15
FACTOR = 0xD6E8FEB86659FD93
"""Odd, with bits set all over: the highest bits of the product depend on all bits of the hash."""
SPACE = 0x20


def ngram_rows(text: str, row_bits: int) -> Iterator[int]:
    """The rows, below 2^row_bits, of all n-grams of a text, in order; one that occurs twice comes twice."""
    for word in words(text):
        for start in range(0, len(word), LONGEST_WORD):
            yield from _rows_of_word(word[start : start + LONGEST_WORD], 64 - row_bits)


def _rows_of_word(word: str, shift: int) -> Iterator[int]:
    spelling = [SPACE, *map(ord, word), SPACE]
    for start in range(len(spelling)):
        end = len(spelling) if start == 0 else min(start + LONGEST_NGRAM, len(spelling))
        hashed = SEED
        for position in range(start, end):
            hashed = (hashed ^ spelling[position]) * FACTOR % 2**64
            length = position + 1 - start
            is_space = length == 1 and spelling[position] == SPACE
            if (length <= LONGEST_NGRAM or position + 1 == len(spelling)) and not is_space:
                yield hashed >> shift


WIDTH = 16
NO_LANGUAGE = "zxx"
"""The label of code, numbers and the like, if a classifier has it: ISO 639-2, no linguistic content."""
UNKNOWN = "unknown"
FORMAT = "napkin language classifier 1"
_PACKAGED = Path(__file__).with_name("languages.safetensors")
_PIECE_CHARACTERS = 200
_LINE_FEED = 10


@dataclass(frozen=True, slots=True)
class LanguageGuess:
    """The language of a text, and how probable it is.

    `language` is an ISO 639-1 code, or 639-3 where there is none; "unknown" for a text without letters, for code and
    numbers, and where no language has the least probability that was asked for. `probability` is that of the best
    label, 1 for a text without letters.
    """

    language: str
    probability: float


@dataclass(frozen=True)
class LanguageClassifier:
    """A linear classifier of hashed n-grams.

    `rows` are int8 [2^row_bits, 16], `outputs` float32 [languages, 17]: weights of the mean row, then the bias. The
    logits of a text of n n-grams are multiplied by exp(sharpness[0] + sharpness[1] · ln n).
    """

    languages: tuple[str, ...]
    rows: NDArray[np.int8]
    outputs: NDArray[np.float32]
    sharpness: tuple[float, float] = (0.0, 0.0)
    sources: str = ""
    """The training texts and their licences."""
    _places: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The addresses that the compiled function takes, looked up once: that takes as long as a short sentence."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", np.ascontiguousarray(self.rows))
        # A last row has the sharpness.
        outputs = np.zeros((len(self.languages) + 1, WIDTH + 1), np.float32)
        outputs[:-1], outputs[-1, :2] = self.outputs, self.sharpness
        object.__setattr__(self, "outputs", outputs[:-1])
        addresses = letter_table().ctypes.data, self.rows.ctypes.data, self.row_bits, outputs.ctypes.data
        object.__setattr__(self, "_places", (*addresses, len(self.languages)))

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy in another process has other addresses.
        return type(self), (self.languages, self.rows, self.outputs, self.sharpness, self.sources)

    @classmethod
    def quantized(
        cls, languages: Sequence[str], rows: NDArray[np.float32], outputs: NDArray[np.float32]
    ) -> "LanguageClassifier":
        """A classifier with `rows` rounded to 8 bits, of one scale, which `outputs` takes on."""
        scale = max(float(np.abs(rows).max()), 1e-30) / 127
        outputs = np.concatenate([outputs[:, :WIDTH] * np.float32(scale), outputs[:, WIDTH:]], axis=1)
        return cls(tuple(languages), np.rint(rows / scale).astype(np.int8), outputs)

    @property
    def row_bits(self) -> int:
        """Bits of the hash that choose a row: there are 2^row_bits rows."""
        return len(self.rows).bit_length() - 1

    def identify(self, text: str, least: float = 0.5) -> LanguageGuess:
        """The language of a text; "unknown" if its probability is less than `least`, or if there is none in it.

        Of a text that looks like code as a whole, as a manual with much markup does, the lines that do not are read
        alone if they are half of it or more.
        """
        logits = self.logits(text)
        if logits is None:
            return LanguageGuess(UNKNOWN, 1.0)
        if self.languages[logits.argmax()] == NO_LANGUAGE:
            logits = self._logits_of_prose(text, logits)
        best = int(logits.argmax())
        probability = 1 / float(np.exp(logits - logits[best]).sum())
        language = self.languages[best]
        return LanguageGuess(UNKNOWN if language == NO_LANGUAGE or probability < least else language, probability)

    def _logits_of_prose(self, text: str, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The logits of those pieces of a text that are of a language, if they have half its n-grams; else `logits`."""
        counts, sums = self._sums_of_pieces(lowered_code_points(text))
        no_language = self.languages.index(NO_LANGUAGE)
        is_prose = (counts > 0) & (self._scores(np.maximum(counts, 1), sums).argmax(axis=1) != no_language)
        n_prose = counts[is_prose].sum(keepdims=True)
        if not 0 < counts.sum() <= 2 * n_prose[0]:
            return logits
        first, second = self.sharpness
        scores = self._scores(n_prose, sums[is_prose].sum(axis=0, keepdims=True))[0]
        return scores * np.float32(np.exp(first + second * np.log(n_prose[0])))

    def _sums_of_pieces(self, points: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The number of n-grams of each piece, int64 [pieces], and the sums of their rows, int64 [pieces, 16]."""
        CORE.load("sum_rows")
        starts = _piece_starts(points)
        counts, sums = np.zeros(len(starts), np.int64), np.zeros((len(starts), WIDTH), np.int64)
        scratch = np.empty(sum_rows.SCRATCH_BYTES, np.uint8)
        places = [points.ctypes.data + 4 * start for start in starts]
        ends, into, room = [*starts[1:], len(points)], sums.ctypes.data, scratch.ctypes.data
        for number, (place, start, end) in enumerate(zip(places, starts, ends, strict=True)):
            counts[number] = sum_rows.sum_rows(place, end - start, *self._places[:3], room, into + 8 * WIDTH * number)
        return counts, sums

    def _scores(self, counts: NDArray[np.int64], sums: NDArray[np.int64]) -> NDArray[np.float32]:
        """The logits of texts whose n-grams' rows have these sums, before they are as sharp as their numbers say.

        `counts` are numbers of n-grams, [texts]; `sums` [texts, 16]; the result is [texts, languages].
        """
        means = (sums / counts[:, None]).astype(np.float32)
        return means @ self.outputs[:, :WIDTH].T + self.outputs[:, WIDTH]

    def probabilities(self, text: str) -> dict[str, float]:
        """The probability of each language, most probable first; empty for a text without letters."""
        logits = self.logits(text)
        if logits is None:
            return {}
        shares = np.exp(logits - logits.max())
        shares /= shares.sum()
        order = np.argsort(-shares, kind="stable")
        return {self.languages[i]: float(shares[i]) for i in order}

    def logits(self, text: str) -> NDArray[np.float32] | None:
        """The logarithms of the probabilities but for a constant, [languages]; None for a text without letters."""
        CORE.load("sum_rows")
        n_labels = len(self.languages)
        points = lowered_code_points(text)
        size = (n_labels + 1) // 2 + WIDTH
        work = np.empty(size + sum_rows.SCRATCH_BYTES // 8, np.int64)
        work[size - WIDTH : size] = 0
        n_ngrams = sum_rows.score(points.ctypes.data, len(points), *self._places, work.ctypes.data)
        return work.view(np.float32)[:n_labels].copy() if n_ngrams else None

    def sum_of_rows(self, text: str) -> tuple[int, NDArray[np.int64]]:
        """The number of n-grams, and the sum of their rows, int64 [16]: compiled."""
        CORE.load("sum_rows")
        points, buffer = lowered_code_points(text), np.zeros(WIDTH + sum_rows.SCRATCH_BYTES // 8, np.int64)
        sums, scratch = (address := buffer.ctypes.data), address + 8 * WIDTH
        n_ngrams = sum_rows.sum_rows(points.ctypes.data, len(points), *self._places[:3], scratch, sums)
        return n_ngrams, buffer[:WIDTH]

    def plain_sum_of_rows(self, text: str) -> tuple[int, NDArray[np.int64]]:
        """`sum_of_rows` in Python: its specification."""
        rows = list(ngram_rows(text, self.row_bits))
        return len(rows), self.rows[rows].astype(np.int64).sum(axis=0)

    def among(self, languages: Iterable[str]) -> "LanguageClassifier":
        """The classifier of some of its languages only. Raises NapkinError for one that it does not know."""
        chosen = list(dict.fromkeys(languages))
        if missing := [each for each in chosen if each not in self.languages]:
            raise NapkinError(f"language {missing[0]!r} is not known: choose from {', '.join(self.languages)}")
        return replace(
            self, languages=tuple(chosen), outputs=self.outputs[[self.languages.index(each) for each in chosen]]
        )

    def save(self, path: StrPath, *, overwrite: bool = False) -> None:
        """Write it as a safetensors file."""
        from safetensors.numpy import save

        about = {"format": FORMAT, "languages": self.languages, "sharpness": self.sharpness, "sources": self.sources}
        # One key only: safetensors writes several in an undefined order.
        metadata = {"about": json.dumps(about, ensure_ascii=False)}
        atomic_write_bytes(path, save({"rows": self.rows, "outputs": self.outputs}, metadata), overwrite=overwrite)


def _piece_starts(points: NDArray[np.uint32]) -> list[int]:
    """The beginnings of pieces: whole lines, joined until a piece has enough characters for a reliable guess."""
    line_starts = np.append(np.flatnonzero(points == _LINE_FEED) + 1, len(points))
    starts, end = list[int](), 0
    while end < len(points):
        starts.append(end)
        end = int(line_starts[min(np.searchsorted(line_starts, end + _PIECE_CHARACTERS + 1), len(line_starts) - 1)])
    return starts


def load_classifier(path: StrPath) -> LanguageClassifier:
    """Read what `LanguageClassifier.save` wrote. Raises NapkinError if it is anything else."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    data = read_bytes(path)
    try:
        tensors = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        about = json.loads(metadata["about"])
        if about["format"] != FORMAT:
            raise ValueError("format")
        languages, (first, second) = tuple(map(str, about["languages"])), map(float, about["sharpness"])
        rows, outputs = tensors["rows"], tensors["outputs"]
        if (
            (rows.dtype, outputs.dtype) != (np.int8, np.float32)
            or rows.ndim != 2
            or rows.shape[1] != WIDTH
            or len(rows).bit_count() != 1
            or outputs.shape != (len(languages), WIDTH + 1)
            or not np.isfinite(outputs).all()
        ):
            raise ValueError("shapes")
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise NapkinError(
            f"'{path}' is not a language classifier of this version: make one with `napkin data train-languages`"
        ) from error
    return LanguageClassifier(languages, rows, outputs, (first, second), str(about["sources"]))


@cache
def packaged_classifier() -> LanguageClassifier:
    """The classifier that comes with the package."""
    return load_classifier(_PACKAGED)


def identify_language(text: str, least: float = 0.5) -> LanguageGuess:
    """The language of a text, by the classifier that comes with the package; see `LanguageClassifier.identify`."""
    return packaged_classifier().identify(text, least)


def identify_languages(texts: Iterable[str], least: float = 0.5) -> Iterator[LanguageGuess]:
    classifier = packaged_classifier()
    return (classifier.identify(text, least) for text in texts)


@dataclass(frozen=True, slots=True)
class ParagraphGuess:
    """The language of the paragraph text[start:end]."""

    start: int
    end: int
    guess: LanguageGuess


def paragraph_languages(
    text: str, least: float = 0.5, classifier: LanguageClassifier | None = None
) -> Iterator[ParagraphGuess]:
    """The language of each line of a text that is not empty, in order.

    Each is guessed alone: a line of one or two words is often "unknown".
    """
    classifier = classifier or packaged_classifier()
    start = 0
    for line in text.split("\n"):
        if line.strip():
            yield ParagraphGuess(start, start + len(line), classifier.identify(line, least))
        start += len(line) + 1


def language_shares(text: str, least: float = 0.5, classifier: LanguageClassifier | None = None) -> dict[str, float]:
    """The share of a text's paragraphs that each language has, in characters, largest first; they sum to 1.

    "unknown" is one of them. A text without a paragraph has no languages.
    """
    sizes: dict[str, int] = {}
    for each in paragraph_languages(text, least, classifier):
        sizes[each.guess.language] = sizes.get(each.guess.language, 0) + each.end - each.start
    total = sum(sizes.values())
    return {language: size / total for language, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))}


CLOSE_LANGUAGES = (("bs", "hr"), ("id", "ms"))
"""Languages of which more than a third of the sentences of UDHR are taken for another of the group.

Most sentences of Croatian are Bosnian too, letter for letter, and the texts that the packaged classifier learned from,
messages of programs, do not teach what distinguishes the others; so it is with Indonesian and Malay. The sum of their
probabilities holds, the division among them is near to a guess. So a document is taken for the language that is wanted
if it is of the group, and the wanted one has more than a small share of the group's probability.
"""
LEAST_SHARE = 0.1
"""The least share of the group's probability, chosen by every other sentence of UDHR."""


def may_be_wanted(guessed: str, wanted: Collection[str]) -> bool:
    """True if a text that is guessed to be of a language may be of a wanted one; `unknown` may be."""
    return any(
        (guessed == "unknown" or guessed in group) and any(each in wanted for each in group)
        for group in CLOSE_LANGUAGES
    )


def close_to_wanted(
    probabilities: Mapping[str, float], wanted: Collection[str], least: float
) -> tuple[str, float, float] | None:
    """The wanted language that a text may be in though another is more probable, its probability and its group's.

    None if there is none; `least` is the probability that the group has to have together.
    """
    for group in CLOSE_LANGUAGES:
        together = sum(probabilities.get(language, 0.0) for language in group)
        own, language = max(
            ((probabilities.get(each, 0.0), each) for each in group if each in wanted), default=(0.0, "")
        )
        if language and together >= least and own >= LEAST_SHARE * together:
            return language, own, together
    return None
