"""Byte-pair encoding, merge by merge: how a vocabulary grows out of a short text, and what the text then is."""

import functools
from collections import Counter
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from napkin.errors import NapkinError
from napkin.studio.learn.idea import Idea
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.bpe_training import learn_merges
from napkin.tokenizer.inspection import printable
from napkin.tokenizer.pre_tokenization import PreTokenizer, count_pre_tokens

MOST_MERGES = 150
LONGEST_TEXT = 2000
CANDIDATES = 8
"""Pairs that are shown with their counts."""
TEXT = (
    "low low low low low lower lower newest newest newest newest newest newest widest widest widest. "
    "The newest of the lower rows is the widest; the lowest is the slowest."
)


class MergesRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A text, and the number of merges after which it is shown."""

    text: Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)] = TEXT
    merges: Annotated[int, msgspec.Meta(ge=0, le=MOST_MERGES)] = 4


@functools.lru_cache(maxsize=8)
def _trained(text: str) -> tuple[dict[str, int], BPETokenizer, list[int]]:
    """The pre-tokens of a text with their counts, the tokenizer of all its merges, and the tokens after each merge."""
    counts = dict(count_pre_tokens([text], (), "gpt2", lambda stage, done, total: None))
    if not counts:
        raise NapkinError("the text is empty: type one")
    merges = learn_merges(counts, MOST_MERGES)
    sizes = [
        sum(len(BPETokenizer(merges[:n], ()).encode(piece)) * times for piece, times in counts.items())
        for n in range(len(merges) + 1)
    ]
    return counts, BPETokenizer(merges, ()), sizes


def merges_answer(asked: MergesRequest) -> dict[str, Any]:
    """The text as tokens after so many merges, the pairs that are most frequent then, and the tokens after each merge.

    Raises NapkinError for an empty text.
    """
    counts, whole, sizes = _trained(asked.text)
    n = min(asked.merges, len(whole.merges))
    tokenizer = BPETokenizer(whole.merges[:n], ())
    vocabulary = [printable(token) for token in whole.vocabulary]
    pairs: Counter[tuple[int, int]] = Counter()
    for piece, times in counts.items():
        for pair in pairwise(tokenizer.encode(piece)):
            pairs[pair] += times
    following = whole.merges[n] if n < len(whole.merges) else None
    ranked = sorted(pairs.items(), key=lambda item: (item[0] != following, -item[1]))[:CANDIDATES]
    split = PreTokenizer(tokenizer.pattern, tokenizer.unicode_version).split(asked.text)
    return {
        "merges": n,
        "most": len(whole.merges),
        "sizes": sizes,
        "pieces": [[vocabulary[i] for i in tokenizer.encode(piece)] for piece in split],
        "bytes": len(asked.text.encode()),
        "learned": [
            {"number": number, "joins": [vocabulary[first], vocabulary[second]], "makes": vocabulary[256 + number]}
            for number, (first, second) in enumerate(whole.merges[:n])
        ],
        "candidates": [
            {"pair": [vocabulary[first], vocabulary[second]], "count": count, "next": (first, second) == following}
            for (first, second), count in ranked
        ],
    }


MERGES = Idea(
    name="bpe",
    title="Byte-pair encoding, merge by merge",
    summary="Train a tokenizer on a short text of yours and watch each merge: pairs, counts, tokens that are left.",
    text=(
        "Text begins as bytes. Training counts all pairs of neighbours, joins the most frequent one into a new token "
        "everywhere, and counts again. After some tens of thousands of such merges frequent words are one token each, "
        "and no text is ever unknown, since all bytes are tokens too.",
        "Pairs are counted within words: spaces and punctuation are boundaries that no merge crosses. Encoding applies "
        "the merges in the order in which they were learned.",
    ),
    formula="next merge = the pair of neighbours with the largest count; of equal ones the greatest by its bytes\n"
    "vocabulary = 256 bytes + merges + special tokens",
    command="napkin tokenizer train TEXT --vocab-size 512 --out tokenizer.json",
    files=("tokenizer/bpe_training.py", "tokenizer/bpe.py", "tokenizer/pre_tokenization.py"),
    request=MergesRequest,
    answer=merges_answer,
)
