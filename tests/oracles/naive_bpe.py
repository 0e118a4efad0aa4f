"""Byte-pair encoding as one would explain it on a blackboard: recount everything, touch every pair.

Shares no code and no idea with napkin.tokenizer: tokens are byte strings, the GPT-2 pieces are cut by hand.
"""

import unicodedata
from collections import Counter
from itertools import pairwise

from hypothesis import strategies as st


def naive_train(pieces: list[bytes], n_merges: int) -> list[tuple[int, int]]:
    """Merges of the most frequent pair, ties to the greatest (first bytes, second bytes), recounted each time."""
    tokens = [bytes([i]) for i in range(256)]
    words = [list(piece) for piece in pieces]
    merges: list[tuple[int, int]] = []
    for _ in range(n_merges):
        counts = Counter(pair for word in words for pair in pairwise(word))
        if not counts:
            break
        # Two ids may stand for the same bytes; then the one made earlier goes first.
        best = max(counts, key=lambda pair: (counts[pair], tokens[pair[0]], tokens[pair[1]], [-i for i in pair]))
        words = [_replace(word, best, len(tokens)) for word in words]
        tokens.append(tokens[best[0]] + tokens[best[1]])
        merges.append(best)
    return merges


def naive_encode(piece: bytes, merges: list[tuple[int, int]]) -> list[int]:
    """Apply every merge once, in the order learned, to the whole piece."""
    ids = list(piece)
    for i, pair in enumerate(merges):
        ids = _replace(ids, pair, 256 + i)
    return ids


def lowest_rank_first(piece: bytes, merges: list[tuple[int, int]]) -> list[int]:
    """Merge the pair of lowest rank, of equal ones the first, until none can be: all pairs are looked up each time."""
    ids, rank_of = list(piece), {pair: rank for rank, pair in enumerate(merges)}
    while found := [(rank_of[pair], i) for i, pair in enumerate(pairwise(ids)) if pair in rank_of]:
        rank, i = min(found)
        ids[i : i + 2] = [256 + rank]
    return ids


@st.composite
def merges_in_any_order(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Merges of tokens of the letters a, b and c, which are made of one another, in an order that has no reason."""
    pairs: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(1, 12))):
        part = st.sampled_from([97, 98, 99, *range(256, 256 + len(pairs))])
        pair = draw(part), draw(part)
        if pair not in pairs:
            pairs.append(pair)
    order = draw(st.permutations(range(len(pairs))))
    place = {256 + number: 256 + rank for rank, number in enumerate(order)}
    return [(place.get(first, first), place.get(second, second)) for first, second in (pairs[i] for i in order)]


def naive_gpt2_pieces(text: str) -> list[str]:
    """Pre-tokens of GPT-2, cut by hand with the character classes of `unicodedata`."""
    pieces: list[str] = []
    i = 0
    while i < len(text):
        end = _contraction(text, i) or _run(text, i) or _white_space(text, i)
        pieces.append(text[i:end])
        i = end
    return pieces


def _replace(ids: list[int], pair: tuple[int, int], merged: int) -> list[int]:
    out: list[int] = []
    i = 0
    while i < len(ids):
        if tuple(ids[i : i + 2]) == pair:
            out.append(merged)
            i += 2
        else:
            out.append(ids[i])
            i += 1
    return out


def _contraction(text: str, i: int) -> int:
    for ending in ("'s", "'d", "'m", "'t", "'ll", "'ve", "'re"):
        if text.startswith(ending, i):
            return i + len(ending)
    return 0


def _run(text: str, i: int) -> int:
    start = i + (text[i] == " ")
    if start == len(text) or (wanted := _class(text[start])) == "space":
        return 0
    end = start
    while end < len(text) and _class(text[end]) == wanted:
        end += 1
    return end


def _white_space(text: str, i: int) -> int:
    end = i
    while end < len(text) and _class(text[end]) == "space":
        end += 1
    return end - 1 if end < len(text) and end - i > 1 else end


def _class(character: str) -> str:
    # str.isspace counts four separator control characters as white space, Unicode's White_Space does not.
    if character.isspace() and character not in "\x1c\x1d\x1e\x1f":
        return "space"
    return {"L": "letter", "N": "number"}.get(unicodedata.category(character)[0], "sign")
