"""Byte-level tokens, one per byte of UTF-8: no training, no unknown text, the longest sequences."""

from collections.abc import Sequence
from typing import Any, ClassVar

from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.text_input import utf8


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, followed by the special tokens.

    >>> ByteTokenizer().encode("né")
    [110, 195, 169]
    """

    kind: ClassVar[str] = "bytes"

    def __init__(self, special_tokens: Sequence[str] = ()) -> None:
        super().__init__([bytes([i]) for i in range(256)], special_tokens)

    def _encode_ordinary(self, text: str) -> list[int]:
        return list(utf8(text))

    def _content(self) -> dict[str, Any]:
        return {"kind": self.kind, "special_tokens": list(self.special_tokens)}
