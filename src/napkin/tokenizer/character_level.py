"""Character-level tokens: one per distinct character of the training text."""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.text_input import check_texts, utf8


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
