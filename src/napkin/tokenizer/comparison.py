"""Tokenizers compared on one text: tokens, bytes per token, bytes per second, and what unknown words lose."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.inspection import printable
from napkin.tokenizer.text_input import utf8
from napkin.tokenizer.word_level import UnknownRate, unknown_rate

SECONDS_OF_TIMING = 0.1


@dataclass(frozen=True)
class EncodedText:
    """A text as a tokenizer encodes it."""

    name: str
    tokenizer: Tokenizer
    ids: list[int]
    seconds: float
    """Seconds of the fastest of several times."""
    text_bytes: int
    lost: UnknownRate
    """What unknown words lose; with such a loss the bytes per token do not compare with those of others."""

    @property
    def bytes_per_token(self) -> float:
        return self.text_bytes / len(self.ids)

    @property
    def bytes_per_second(self) -> float:
        return self.text_bytes / self.seconds

    def as_values(self, excerpt: str = "") -> dict[str, Any]:
        """The figures for programs, with the tokens of an excerpt."""
        return {
            "name": self.name,
            "kind": self.tokenizer.kind,
            "vocab_size": self.tokenizer.vocab_size,
            "tokens": len(self.ids),
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_second": self.bytes_per_second,
            "unknown_tokens": self.lost.tokens,
            "lost_bytes": self.lost.bytes,
            "first_tokens": [printable(self.tokenizer.vocabulary[i]) for i in self.tokenizer.encode(excerpt)],
        }


def compare_tokenizers(
    tokenizers: Sequence[tuple[str, Tokenizer]], text: str
) -> tuple[list[EncodedText], dict[str, str]]:
    """Encode a text with each of the named tokenizers; of those that cannot encode it, the reason by name."""
    results: list[EncodedText] = []
    refused: dict[str, str] = {}
    text_bytes = len(utf8(text))
    for name, tokenizer in tokenizers:
        try:
            ids, seconds = _timed(tokenizer, text)
        except NapkinError as error:
            refused[name] = str(error)
            continue
        lost = unknown_rate(tokenizer, Counter(ids), text_bytes)
        results.append(EncodedText(name, tokenizer, ids, seconds, text_bytes, lost))
    return results, refused


def _timed(tokenizer: Tokenizer, text: str) -> tuple[list[int], float]:
    best, begin = float("inf"), time.perf_counter()
    while True:
        start = time.perf_counter()
        ids = tokenizer.encode(text)
        end = time.perf_counter()
        best = min(best, end - start)
        if end - begin > SECONDS_OF_TIMING:
            return ids, best
