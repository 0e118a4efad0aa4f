"""Word-level tokens: the most frequent words have an id each, all others share one, UNK.

A word is a pre-token of a pre-tokenization pattern (see pre_tokenization.py). For GPT-2's that is a word, a number or a
run of symbols, each with one space before it; the ending of an English contraction; a run of white space. So text whose
words are all in the vocabulary is decoded exactly, including white space. Text that is encoded as UNK is lost.

Character-level tokens: one per distinct character of the training text.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.pre_tokenization import PreTokenizer, Progress, count_pre_tokens
from napkin.tokenizer.text_input import check_counted, check_special_tokens, check_texts, utf8
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION, UNNAMED_VERSION

UNK = "<|unk|>"


@dataclass(frozen=True)
class UnknownRate:
    """The part of a text that is encoded as UNK."""

    tokens: float
    """The fraction of the tokens that are UNK."""
    bytes: float
    """The fraction of the UTF-8 bytes that UNK replaces, which decoding cannot restore."""


class WordTokenizer(Tokenizer):
    """Id i is the i-th of `words`, followed by UNK and the special tokens.

    Decoding is lossy: UNK becomes `<|unk|>`. Raises NapkinError if `words` is empty or contains a duplicate or the
    empty word, and if UNK is among the special tokens.

    >>> tokenizer = WordTokenizer.train(["the cat, the hat, the rat"], vocab_size=6)
    >>> tokenizer.words
    [' the', ',', ' cat', ' hat', ' rat']
    >>> tokenizer.decode(tokenizer.encode("the cat, the dog"))
    '<|unk|> cat, the<|unk|>'
    """

    kind: ClassVar[str] = "words"

    def __init__(
        self,
        words: Sequence[str],
        special_tokens: Sequence[str] = (),
        pattern: str = "gpt2",
        *,
        unicode_version: str | None = DEFAULT_VERSION,
    ) -> None:
        self._named_version = unicode_version
        self.unicode_version = unicode_version or UNNAMED_VERSION
        check_special_tokens(special_tokens)
        if UNK in special_tokens:
            raise NapkinError(f"special token {UNK!r} is in every word vocabulary already: leave it out")
        self.words = list(words)
        self.pattern = pattern
        self._id_of = {word: i for i, word in enumerate(self.words)}
        self._pre_tokenizer = PreTokenizer(pattern, self.unicode_version)
        super().__init__(_checked(self.words, self._id_of), [UNK, *special_tokens], pattern)
        self.unknown_id = self.special_tokens[UNK]

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        special_tokens: Sequence[str] = (),
        pattern: str = "gpt2",
        progress: Progress | None = None,
    ) -> "WordTokenizer":
        """Take the most frequent words of `texts`; of equally frequent ones, the first by code point.

        `vocab_size` includes UNK and the special tokens; a text with fewer words gives a smaller vocabulary. Special
        tokens are boundaries and `progress` is called as in `train_bpe`. Raises NapkinError if `vocab_size` has no room
        for a word, or if there is no text.
        """
        check_special_tokens(special_tokens)
        room = vocab_size - 1 - len(special_tokens)
        if room < 1:
            raise NapkinError(
                f"vocab_size {vocab_size} is below {2 + len(special_tokens)} (a word, {UNK} and {len(special_tokens)} "
                "special): choose a larger one"
            )
        counts = count_pre_tokens(texts, special_tokens, pattern, progress or (lambda stage, done, total: None))
        check_counted(counts)
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ordered[:room], special_tokens, pattern)

    def unknown_rate(self, text: str) -> UnknownRate:
        """The part of `text` that is encoded as UNK. Raises NapkinError for the empty text.

        >>> WordTokenizer([" cat", "the"]).unknown_rate("the cat sat")
        UnknownRate(tokens=0.3333333333333333, bytes=0.36363636363636365)
        """
        if not text:
            raise NapkinError("the empty text has no rate of unknown tokens: give at least one character")
        return unknown_rate(self, Counter(self.encode(text)), len(utf8(text)))

    def _encode_ordinary(self, text: str) -> list[int]:
        id_of, unknown = self._id_of.get, self.special_tokens[UNK]
        return [id_of(word, unknown) for word in self._pre_tokenizer.split(text)]

    def _content(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "pattern": self.pattern,
            **({"unicode": self._named_version} if self._named_version else {}),
            "special_tokens": [token for token in self.special_tokens if token != UNK],
            "words": self.words,
        }


def unknown_rate(tokenizer: Tokenizer, counts: Mapping[int, int], text_bytes: int) -> UnknownRate:
    """The part of a text that is encoded as UNK: a text of `text_bytes` in which id i occurs `counts[i]` times.

    `counts` leaves out special tokens except UNK. The rates are 0 for a tokenizer without an `unknown_id`.
    """
    unknown = tokenizer.unknown_id
    if unknown is None or not counts.get(unknown):
        return UnknownRate(0.0, 0.0)
    known_bytes = sum(len(tokenizer.vocabulary[i]) * n for i, n in counts.items() if i != unknown)
    return UnknownRate(counts[unknown] / sum(counts.values()), 1 - known_bytes / text_bytes)


def _checked(words: Sequence[str], id_of: Mapping[str, int]) -> list[bytes]:
    if not words:
        raise NapkinError("a word vocabulary needs at least one word: give a text that is not empty")
    if "" in id_of:
        raise NapkinError(f"word {id_of['']} is empty: leave it out")
    if len(id_of) < len(words):
        twice = next(word for i, word in enumerate(words) if id_of[word] != i)
        raise NapkinError(f"word {twice!r} is given twice: remove one, each has a single id")
    return [utf8(word, f"word {i}") for i, word in enumerate(words)]


class CharacterTokenizer(Tokenizer):
    """Id i is the i-th of `characters`, followed by the special tokens.

    Raises NapkinError if `characters` is empty or contains one twice and, when encoding, for a character that is not
    among them.

    >>> CharacterTokenizer.train(["hello"]).encode("hole")
    [1, 3, 2, 0]
    """

    kind: ClassVar[str] = "characters"

    def __init__(self, characters: str, special_tokens: Sequence[str] = ()) -> None:
        if not characters:
            raise NapkinError("a character vocabulary needs at least one character: give a text that is not empty")
        self.characters = characters
        self._id_of = {character: i for i, character in enumerate(characters)}
        if len(self._id_of) < len(characters):
            twice = next(c for i, c in enumerate(characters) if self._id_of[c] != i)
            raise NapkinError(f"character {twice!r} is given twice: remove one, each has a single id")
        utf8(characters, "the list of characters")
        super().__init__([utf8(character) for character in characters], special_tokens)

    @classmethod
    def train(cls, texts: Iterable[str], special_tokens: Sequence[str] = ()) -> "CharacterTokenizer":
        """Take the distinct characters of `texts`, in the order of their code points."""
        return cls("".join(sorted(set().union(*check_texts(texts)))), special_tokens)

    def _encode_ordinary(self, text: str) -> list[int]:
        try:
            return list(map(self._id_of.__getitem__, text))
        except KeyError as error:
            character = error.args[0]
            raise NapkinError(
                f"character {character!r} (U+{ord(character):04X}) is not among the {len(self.characters)} of this "
                "vocabulary: train on a text that contains it, or use a byte-level tokenizer"
            ) from None

    def _content(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters, "special_tokens": list(self.special_tokens)}
