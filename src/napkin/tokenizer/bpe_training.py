"""Learning byte-pair merges: count the distinct pre-tokens, then merge the most frequent pair, again and again.

The pair counts are kept up to date: a merge touches only the pre-tokens that hold its pair. Memory grows with
the distinct pre-tokens and the longest single text, not with the corpus.
"""

import heapq
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate, chain
from operator import add

from napkin.errors import NapkinError
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.compiled.loading import worth_training
from napkin.tokenizer.patterns import PreTokenizer
from napkin.tokenizer.texts import check_special_tokens, check_texts, split_at, utf8

Progress = Callable[[str, int, int], None]

_CHARACTERS_A_REPORT = 2**20
_MERGES_A_REPORT = 64
_BYTES_A_PART = 2**22


def train_bpe(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str] = ("<|endoftext|>",),
    pattern: str = "gpt2",
    progress: Progress | None = None,
    threads: int = 1,
) -> BPETokenizer:
    """Learn a BPE vocabulary of `vocab_size` ids: 256 bytes, the merges, the special tokens.

    Each merge takes the pair that occurs most often; of pairs that occur equally often, the greatest by
    (bytes of its first token, bytes of its second). Special tokens are boundaries: nothing in or across them
    is counted. A corpus whose pre-tokens are all merged before `vocab_size` is reached gives a smaller
    vocabulary. `progress` is called with the stage ("counting" texts, "merging"), how many are done and of how
    many (0 where that is unknown); the last call of a stage has both equal. Long texts are counted by the compiled core
    in `threads` threads; the vocabulary does not depend on their number.

    Raises NapkinError if `vocab_size` has no room for the bytes and the special tokens, or if there is no text.
    """
    check_special_tokens(special_tokens)
    smallest = 256 + len(special_tokens)
    # learn_merges writes a token id as one character.
    largest = sys.maxunicode + 1
    if not smallest <= vocab_size <= largest:
        raise NapkinError(
            f"vocab_size {vocab_size} is outside {smallest} (256 bytes + {len(special_tokens)} special) to {largest}: "
            "choose one in between"
        )
    progress = progress or (lambda stage, done, total: None)
    is_long, texts = _is_long(check_texts(texts), pattern)
    learn = _count_and_learn_compiled if is_long else _count_and_learn
    merges = learn(texts, special_tokens, pattern, vocab_size - smallest, progress, threads)
    return BPETokenizer(merges, special_tokens, pattern)


def _count_and_learn(
    texts: Iterable[str],
    special_tokens: Sequence[str],
    pattern: str,
    n_merges: int,
    progress: Progress,
    threads: int,
) -> list[tuple[int, int]]:
    counts = count_pre_tokens(texts, special_tokens, pattern, progress)
    _check_any(counts)
    return learn_merges(counts, n_merges, progress)


def _count_and_learn_compiled(
    texts: Iterable[str],
    special_tokens: Sequence[str],
    pattern: str,
    n_merges: int,
    progress: Progress,
    threads: int,
) -> list[tuple[int, int]]:
    from napkin.tokenizer.compiled.trainer import Counts, learn_compiled

    counts = Counts(pattern, threads)
    try:
        for part in _parts(texts, special_tokens, progress):
            counts.add(*part)
        counts.finish()
    finally:
        counts.close()
    _check_any(counts)
    return learn_compiled(counts.words(), n_merges, progress)


def _check_any(counts: object) -> None:
    if not counts:
        raise NapkinError("there is no text to train on: give at least one text that holds more than special tokens")


def _is_long(texts: Iterable[str], pattern: str) -> tuple[bool, Iterable[str]]:
    """Whether the texts are long enough for the compiled core, and the texts, of which only some have been taken."""
    if isinstance(texts, Collection):
        return worth_training(sum(map(len, texts)), pattern), texts
    rest, taken, n_characters = iter(texts), [], 0
    for text in rest:
        taken.append(text)
        n_characters += len(text)
        if worth_training(n_characters, pattern):
            return True, chain(taken, rest)
    return False, iter(taken)


def _parts(
    texts: Iterable[str], special_tokens: Sequence[str], progress: Progress
) -> Iterator[tuple[bytes, list[int]]]:
    """The text between special tokens, some documents at a time, and where each of them ends."""
    total = len(texts) if isinstance(texts, Sized) else 0
    done = n_bytes = 0
    parts: list[bytes] = []
    for done, text in enumerate(texts, start=1):
        utf8(text, f"text {done - 1}")
        new = [ordinary.encode() for ordinary in split_at(text, special_tokens)[::2]]
        parts += new
        n_bytes += sum(map(len, new))
        if n_bytes >= _BYTES_A_PART:
            yield b"".join(parts), list(accumulate(map(len, parts)))
            parts, n_bytes = [], 0
            progress("counting", done, total)
    yield b"".join(parts), list(accumulate(map(len, parts)))
    progress("counting", done, done)


def count_pre_tokens(
    texts: Iterable[str], special_tokens: Sequence[str], pattern: str, progress: Progress
) -> Counter[str]:
    """How often each pre-token occurs between the special tokens of all texts."""
    pre_tokenizer = PreTokenizer(pattern)
    counts: Counter[str] = Counter()
    total = len(texts) if isinstance(texts, Sized) else 0
    done = unreported = 0
    for done, text in enumerate(check_texts(texts), start=1):
        utf8(text, f"text {done - 1}")
        for ordinary in split_at(text, special_tokens)[::2]:
            counts.update(pre_tokenizer.split(ordinary))
        unreported += len(text)
        if unreported >= _CHARACTERS_A_REPORT:
            progress("counting", done, total)
            unreported = 0
    progress("counting", done, done)
    return counts


def learn_merges(
    counts: Mapping[str, int], n_merges: int, progress: Progress = lambda stage, done, total: None
) -> list[tuple[int, int]]:
    """The first `n_merges` merges for pre-tokens that occur `counts` times, fewer where no pair is left.

    Pairs that occur equally often and stand for the same bytes are merged in the order of their ids.

    >>> learn_merges({"the cat in the hat": 1}, 3)
    [(116, 104), (256, 101), (257, 32)]
    """
    state = _Pairs(counts)
    merges: list[tuple[int, int]] = []
    while len(merges) < n_merges and (pair := state.most_frequent()):
        state.merge(pair)
        merges.append((ord(pair[0]), ord(pair[1])))
        if len(merges) % _MERGES_A_REPORT == 0:
            progress("merging", len(merges), n_merges)
    progress("merging", len(merges), len(merges))
    return merges


class _Pairs:
    """The pre-tokens as merged so far, and how often each pair of tokens occurs in them.

    A pre-token is a string in which the character with code point i is token i, a pair a string of two: so
    str.split finds all places of a pair, from left to right, and str.join merges them.

    Places of a pair arise while the later of its two tokens is made, and never after: from then on its count
    only falls. So a pair enters the heap once, and its entry is lowered when it comes to the top with a count
    that is out of date; and `where` may keep pre-tokens that no longer hold the pair.
    """

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.words = [word.encode().decode("latin-1") for word in counts]
        self.word_counts = list(counts.values())
        self.n_tokens = 256
        self.reversed_order = [_reversed_order(i) for i in range(256)]
        self.pair_counts: defaultdict[str, int] = defaultdict(int)
        self.where: defaultdict[str, list[int]] = defaultdict(list)
        for i, (word, count) in enumerate(zip(self.words, self.word_counts, strict=True)):
            for pair in map(add, word, word[1:]):
                self.pair_counts[pair] += count
                self.where[pair].append(i)
        self.heap = [self._entry(pair, count) for pair, count in self.pair_counts.items()]
        heapq.heapify(self.heap)

    def most_frequent(self) -> str | None:
        """The pair to merge next; None where no two tokens are neighbours any more."""
        heap = self.heap
        while heap:
            entry = heap[0]
            pair = entry[-1]
            count = self.pair_counts.get(pair, 0)
            if count == -entry[0]:
                return pair
            if count:
                heapq.heapreplace(heap, (-count, *entry[1:]))
            else:
                heapq.heappop(heap)
        return None

    def merge(self, pair: str) -> None:
        """Make the next token of `pair` wherever it occurs."""
        first, second = pair
        new = chr(self.n_tokens)
        self.n_tokens += 1
        self.reversed_order.append(self.reversed_order[ord(first)][:-1] + self.reversed_order[ord(second)])
        del self.pair_counts[pair]
        for arisen, count in self._replace(pair, new).items():
            left, right = arisen
            # The pair that stood here before; of a pair of equal tokens it may be the merged pair itself.
            gone = (second if left == new else left) + (first if right == new else right)
            if gone != pair:
                self.pair_counts[gone] -= count
                if not self.pair_counts[gone]:
                    del self.pair_counts[gone], self.where[gone]
            self.pair_counts[arisen] = count
            heapq.heappush(self.heap, self._entry(arisen, count))

    def _replace(self, pair: str, new: str) -> dict[str, int]:
        """Put `new` for `pair` in all words; counts of the pairs with `new` that arise."""
        words, word_counts, where = self.words, self.word_counts, self.where
        arisen: defaultdict[str, int] = defaultdict(int)
        for i in set(where.pop(pair)):
            parts = words[i].split(pair)
            if len(parts) == 1:
                continue
            words[i] = new.join(parts)
            count = word_counts[i]
            if parts[0]:
                neighbours = parts[0][-1] + new
                arisen[neighbours] += count
                where[neighbours].append(i)
            if parts[-1]:
                neighbours = new + parts[-1][0]
                arisen[neighbours] += count
                where[neighbours].append(i)
            for part in parts[1:-1]:
                for neighbours in (new + part[0], part[-1] + new) if part else (new + new,):
                    arisen[neighbours] += count
                    where[neighbours].append(i)
        return arisen

    def _entry(self, pair: str, count: int) -> tuple[int, str, str, str]:
        first, second = pair
        return -count, self.reversed_order[ord(first)], self.reversed_order[ord(second)], pair


def _reversed_order(byte: int) -> str:
    # Greater byte strings have lesser strings here, as a heap gives its least entry first. The character at
    # the end puts a byte string before its own beginning, where dictionary order has the beginning first.
    return chr(255 - byte) + chr(256)
