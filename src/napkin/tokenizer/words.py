"""A token a word: the most frequent words have an id each, all others share one, UNK.

What counts as a word is what a pre-tokenization pattern cuts (see patterns.py). By GPT-2's that is a word, a number
or a run of signs, each with the one space before it; an English contraction's ending; a stretch of white space. So
text whose words are all known comes back as it was, white space included. What UNK stands for is lost.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.compiled.cuts import CUTTABLE_PATTERNS
from napkin.tokenizer.patterns import PreTokenizer
from napkin.tokenizer.texts import check_special_tokens, check_texts, split_at, utf8

UNK = "<|unk|>"

_CHARACTERS_A_REPORT = 2**20


@dataclass(frozen=True)
class UnknownCost:
    """What UNK takes of a text."""

    tokens: float
    """Share of the tokens that are UNK."""
    bytes: float
    """Share of the UTF-8 bytes that stand behind them, and do not come back."""


class WordTokenizer(Tokenizer):
    """Id i is the i-th of `words`, then comes UNK, then the special tokens.

    Decoding is lossy: UNK comes back as `<|unk|>`. Raises NapkinError if `words` is empty, names one twice or
    holds the empty word, and if UNK is named as a special token.

    >>> tokenizer = WordTokenizer.train(["the cat, the hat, the rat"], vocab_size=6)
    >>> tokenizer.words
    [' the', ',', ' cat', ' hat', ' rat']
    >>> tokenizer.decode(tokenizer.encode("the cat, the dog"))
    '<|unk|> cat, the<|unk|>'
    """

    kind: ClassVar[str] = "words"

    def __init__(self, words: Sequence[str], special_tokens: Sequence[str] = (), pattern: str = "gpt2") -> None:
        check_special_tokens(special_tokens)
        if UNK in special_tokens:
            raise NapkinError(f"special token {UNK!r} belongs to every vocabulary of words: leave it out")
        self.words = list(words)
        self.pattern = pattern
        self._id_of = {word: i for i, word in enumerate(self.words)}
        self._pre_tokenizer = PreTokenizer(pattern)
        super().__init__(_checked(self.words, self._id_of), [UNK, *special_tokens])
        self.unknown_id = self.special_tokens[UNK]

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        special_tokens: Sequence[str] = (),
        pattern: str = "gpt2",
        progress: Callable[[str, int, int], None] | None = None,
    ) -> "WordTokenizer":
        """Take the words that occur most often in `texts`, of those that occur equally often the first by code point.

        `vocab_size` counts UNK and the special tokens; a text with fewer words gives a smaller vocabulary. Special
        tokens are boundaries, as for BPE; `progress` is called as there. Raises NapkinError if `vocab_size` has no
        room for a word, or if there is no text.
        """
        check_special_tokens(special_tokens)
        room = vocab_size - 1 - len(special_tokens)
        if room < 1:
            raise NapkinError(
                f"vocab_size {vocab_size} is below {2 + len(special_tokens)} (a word, {UNK} and {len(special_tokens)} "
                "special): choose a larger one"
            )
        counts = _count_words(texts, special_tokens, pattern, progress or (lambda stage, done, total: None))
        if not counts:
            raise NapkinError(
                "there is no text to train on: give at least one text that holds more than special tokens"
            )
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        return cls(ordered[:room], special_tokens, pattern)

    def unknown_cost(self, text: str) -> UnknownCost:
        """What is lost of `text`. Raises NapkinError for the empty text.

        >>> WordTokenizer([" cat", "the"]).unknown_cost("the cat sat")
        UnknownCost(tokens=0.3333333333333333, bytes=0.36363636363636365)
        """
        if not text:
            raise NapkinError("the empty text has nothing to lose: give at least one character")
        return unknown_cost(self, Counter(self.encode(text)), len(utf8(text)))

    @property
    def can_be_cut(self) -> bool:
        """Whether the parts of a text cut where `find_cut` says have, one after the other, the ids of the whole."""
        return self.pattern in CUTTABLE_PATTERNS

    def _encode_ordinary(self, text: str) -> list[int]:
        id_of, unknown = self._id_of.get, self.special_tokens[UNK]
        return [id_of(word, unknown) for word in self._pre_tokenizer.split(text)]

    def _content(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "pattern": self.pattern,
            "special_tokens": [token for token in self.special_tokens if token != UNK],
            "words": self.words,
        }


def unknown_cost(tokenizer: Tokenizer, counts: Mapping[int, int], text_bytes: int) -> UnknownCost:
    """What a text of `text_bytes` loses of which every id occurs `counts` times, special tokens left out.

    Nothing for a tokenizer without an `unknown_id`.
    """
    unknown = tokenizer.unknown_id
    if unknown is None or not counts.get(unknown):
        return UnknownCost(0.0, 0.0)
    known_bytes = sum(len(tokenizer.vocabulary[i]) * n for i, n in counts.items() if i != unknown)
    return UnknownCost(counts[unknown] / sum(counts.values()), 1 - known_bytes / text_bytes)


def _checked(words: Sequence[str], id_of: Mapping[str, int]) -> list[bytes]:
    if not words:
        raise NapkinError("a word vocabulary needs at least one word: give a text that holds some")
    if "" in id_of:
        raise NapkinError(f"word {id_of['']} is empty: leave it out")
    if len(id_of) < len(words):
        twice = next(word for i, word in enumerate(words) if id_of[word] != i)
        raise NapkinError(f"word {twice!r} is given twice: each needs one id, name it once")
    return [utf8(word, f"word {i}") for i, word in enumerate(words)]


def _count_words(
    texts: Iterable[str], special_tokens: Sequence[str], pattern: str, progress: Callable[[str, int, int], None]
) -> Counter[str]:
    pre_tokenizer = PreTokenizer(pattern)
    counts: Counter[str] = Counter()
    done = unreported = 0
    for done, text in enumerate(check_texts(texts), start=1):
        utf8(text, f"text {done - 1}")
        for ordinary in split_at(text, special_tokens)[::2]:
            counts.update(pre_tokenizer.split(ordinary))
        unreported += len(text)
        if unreported >= _CHARACTERS_A_REPORT:
            progress("counting", done, 0)
            unreported = 0
    progress("counting", done, done)
    return counts
