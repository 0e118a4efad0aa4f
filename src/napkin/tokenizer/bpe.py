"""Byte-pair encoding (Sennrich et al. 2016) on bytes (Radford et al. 2019).

Text is cut into pre-tokens; each starts as the bytes of its UTF-8 form, then pairs of neighbours are merged,
the pair learned first before all others, until no neighbours can be merged.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe_merging import Merges, apply_merges
from napkin.tokenizer.patterns import PreTokenizer

_CACHED_PRE_TOKENS = 2**17
_CACHED_LENGTH = 256
_VOCABULARY_BYTES = 2**28


class BPETokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes, id 256 + i is what `merges[i]` joins, the special tokens come last.

    `pattern` is the name of a pre-tokenization pattern or a regular expression (see patterns.py). Raises
    NapkinError for a merge of ids that do not exist before it, a merge given twice, tokens of more than
    256 MiB together, and a pattern that is no regular expression.

    >>> tokenizer = BPETokenizer([(116, 104), (256, 101)], ["<|endoftext|>"])
    >>> tokenizer.encode("the"), tokenizer.vocabulary[257], tokenizer.special_tokens
    ([257], b'the', {'<|endoftext|>': 258})
    """

    kind: ClassVar[str] = "bpe"

    def __init__(
        self, merges: Sequence[tuple[int, int]], special_tokens: Sequence[str] = (), pattern: str = "gpt2"
    ) -> None:
        self.merges = [(first, second) for first, second in merges]
        self.pattern = pattern
        super().__init__(_ordinary_tokens(self.merges), special_tokens)
        self._pre_tokenizer = PreTokenizer(pattern)
        self._ids_of = _Cache({pair: 256 + i for i, pair in enumerate(self.merges)})

    def _encode_ordinary(self, text: str) -> list[int]:
        return list(chain.from_iterable(map(self._ids_of.__getitem__, self._pre_tokenizer.split(text))))

    def _content(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "pattern": self.pattern,
            "special_tokens": list(self.special_tokens),
            "merges": [list(pair) for pair in self.merges],
        }


def _ordinary_tokens(merges: Sequence[tuple[int, int]]) -> list[bytes]:
    tokens = [bytes([i]) for i in range(256)]
    seen: set[tuple[int, int]] = set()
    size_bytes = 0
    for first, second in merges:
        if not (0 <= first < len(tokens) and 0 <= second < len(tokens)):
            raise NapkinError(
                f"merge {len(tokens) - 256} joins ids {first} and {second}, of which one is not below "
                f"{len(tokens)}, the id it makes: a merge may join earlier ids only"
            )
        if (first, second) in seen:
            raise NapkinError(f"merge ({first}, {second}) is given twice: the second never applies, leave it out")
        seen.add((first, second))
        # A few dozen merges can double a token beyond all memory; they come from no real text.
        size_bytes += len(tokens[first]) + len(tokens[second])
        if size_bytes > _VOCABULARY_BYTES:
            raise NapkinError(f"the tokens up to merge {len(tokens) - 256} exceed {_VOCABULARY_BYTES} bytes: use fewer")
        tokens.append(tokens[first] + tokens[second])
    return tokens


class _Cache(dict[str, tuple[int, ...]]):
    """Pre-token to ids, worked out at first sight and kept: few pre-tokens make up most of a text."""

    def __init__(self, merges: Merges) -> None:
        self._merges = merges

    def __missing__(self, pre_token: str) -> tuple[int, ...]:
        ids = tuple(apply_merges(pre_token.encode(), self._merges))
        if len(pre_token) <= _CACHED_LENGTH:
            # Starting anew follows a text whose words change; the frequent ones are back at once.
            if len(self) >= _CACHED_PRE_TOKENS:
                self.clear()
            self[pre_token] = ids
        return ids
