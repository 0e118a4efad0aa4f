"""The stage `language`: which language a document is in, and whether it is one that is wanted."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from napkin.curation.stage import Dropped, Record, TraceEntry
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from napkin.languages.classifier import LanguageClassifier


@dataclass(frozen=True)
class Language:
    """Find the language of each document, and drop those in other languages than are wanted.

    The fields `language` and `language_probability` are added to each document.
    """

    name: ClassVar[str] = "language"
    reads: ClassVar[tuple[str, ...]] = ("classifier",)

    keep: tuple[str, ...] = ()
    """The languages that go on, by ISO 639-1 code: en, de; none is all of them, and unknown ones."""
    least_probability: float = 0.5
    """A language that is less probable than this is unknown."""
    close_languages: bool = True
    """Keep a document, too, that may as well be in a language of `keep` as in one that is hardly told from it: Croatian
    and Bosnian, Indonesian and Malay."""
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
        """The record with its language, unless that is not wanted."""
        from napkin.languages.classifier import LanguageGuess, language_shares
        from napkin.languages.close_languages import close_to_wanted, may_be_wanted

        guess = _classifier(self.classifier).identify(record.text, self.least_probability)
        found = f"{guess.language} {guess.probability:.3f}"
        is_kept = guess.language in self.keep
        if self.close_languages and not is_kept and may_be_wanted(guess.language, self.keep):
            probabilities = _classifier(self.classifier).probabilities(record.text)
            if close := close_to_wanted(probabilities, self.keep, self.least_probability):
                guess = LanguageGuess(close[0], close[1])
                found = f"{close[0]} {close[1]:.3f}, with languages close to it {close[2]:.3f}"
        if self.keep and guess.language == "unknown":
            return Dropped("unknown language", found)
        if self.keep and guess.language not in self.keep:
            return Dropped("other language", found)
        record.fields["language"] = guess.language
        record.fields["language_probability"] = round(guess.probability, 4)
        if self.shares:
            shares = language_shares(record.text, self.least_probability, _classifier(self.classifier))
            record.fields["languages"] = {language: round(share, 4) for language, share in shares.items()}
        record.trace.append(TraceEntry(self.name, found))
        return record


@cache
def _classifier(path: str | None) -> "LanguageClassifier":
    # Kept for the process, not in the stage, which is copied to other processes.
    from napkin.languages.classifier import load_classifier, packaged_classifier

    return packaged_classifier() if path is None else load_classifier(path)
