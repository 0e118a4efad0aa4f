"""Documents in several languages: the language of each paragraph, and how much of the document each language has."""

from collections.abc import Iterator
from dataclasses import dataclass

from napkin.curation.languages.classifier import LanguageClassifier, LanguageGuess, packaged_classifier


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
