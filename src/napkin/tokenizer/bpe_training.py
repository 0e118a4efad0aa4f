"""Learning byte-pair merges: count the distinct pre-tokens, then repeatedly merge the most frequent pair.

Pair counts are updated incrementally: a merge touches only the pre-tokens that contain its pair. Memory grows with the
number of distinct pre-tokens and the longest single text, not with the corpus.
"""

import heapq
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import accumulate, chain
from operator import add
from pathlib import Path
from typing import cast

from napkin.errors import NapkinError
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.numba.dispatch import should_train_compiled
from napkin.tokenizer.pre_tokenization import Progress, count_pre_tokens
from napkin.tokenizer.text_input import check_counted, check_special_tokens, check_texts, read_chunks, split_at, utf8
from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION

_REPORT_EVERY_MERGES = 64
_BATCH_BYTES = 2**22


def train_bpe(
    texts: Iterable[str | Path],
    vocab_size: int,
    special_tokens: Sequence[str] = ("<|endoftext|>",),
    pattern: str = "gpt2",
    progress: Progress | None = None,
    threads: int = 1,
    *,
    unicode_version: str = DEFAULT_VERSION,
) -> BPETokenizer:
    """Learn a BPE vocabulary of `vocab_size` ids: 256 bytes, the merges, the special tokens.

    Each merge takes the most frequent pair; of equally frequent ones, the greatest by (bytes of its first token, bytes
    of its second). Special tokens are boundaries: nothing in or across them is counted. A corpus whose pre-tokens are
    all merged before `vocab_size` is reached gives a smaller vocabulary. `progress` is called with the stage
    ("counting" texts, "merging"), how many are done and of how many (0 if unknown); the last call of a stage has both
    equal. A `Path` among the texts is a file, which is read in chunks (`read_chunks`). Long texts are counted by the
    compiled core in `threads` threads; the vocabulary does not depend on their
    number.

    Raises NapkinError if `vocab_size` has no room for the bytes and the special tokens, or if there is no text.
    """
    check_special_tokens(special_tokens)
    smallest = 256 + len(special_tokens)
    # learn_merges represents a token id as one character.
    largest = sys.maxunicode + 1
    if not smallest <= vocab_size <= largest:
        raise NapkinError(
            f"vocab_size {vocab_size} is outside {smallest} (256 bytes + {len(special_tokens)} special) to {largest}: "
            "choose one in that range"
        )
    progress = progress or (lambda stage, done, total: None)
    is_long, read = _is_long(_with_files(check_texts(texts), special_tokens, pattern), pattern)
    n_merges = vocab_size - smallest
    if is_long:
        merges = _learn_compiled(read, special_tokens, (pattern, unicode_version), n_merges, progress, threads)
    else:
        counts = count_pre_tokens(read, special_tokens, pattern, progress, unicode_version)
        check_counted(counts)
        merges = learn_merges(counts, n_merges, progress)
    return BPETokenizer(merges, special_tokens, pattern, unicode_version=unicode_version)


def _with_files(texts: Iterable[str | Path], special_tokens: Sequence[str], pattern: str) -> Iterable[str]:
    """The texts, and those of the files among them."""
    if isinstance(texts, Collection) and all(isinstance(text, str) for text in texts):
        return cast("Collection[str]", texts)
    return chain.from_iterable(
        read_chunks([text], special_tokens, pattern=pattern) if isinstance(text, Path) else (text,) for text in texts
    )


def _learn_compiled(
    texts: Iterable[str],
    special_tokens: Sequence[str],
    split_by: tuple[str, str],
    n_merges: int,
    progress: Progress,
    threads: int,
) -> list[tuple[int, int]]:
    from napkin.tokenizer.numba.counting import PreTokenCounter
    from napkin.tokenizer.numba.learn_merges import learn_merges_compiled

    pattern, unicode_version = split_by
    counts = PreTokenCounter(pattern, threads, unicode_version)
    try:
        for text, document_ends in _documents(texts, special_tokens, progress):
            counts.add(text, document_ends)
        counts.finish()
    finally:
        counts.close()
    check_counted(counts)
    return learn_merges_compiled(counts.words(), n_merges, progress)


def _is_long(texts: Iterable[str], pattern: str) -> tuple[bool, Iterable[str]]:
    """True if the texts are long enough for the compiled core, and the same texts, if need be as a new iterator."""
    if isinstance(texts, Collection):
        return should_train_compiled(sum(map(len, texts)), pattern), texts
    rest, taken, n_characters = iter(texts), [], 0
    for text in rest:
        taken.append(text)
        n_characters += len(text)
        if should_train_compiled(n_characters, pattern):
            return True, chain(taken, rest)
    return False, iter(taken)


def _documents(
    texts: Iterable[str], special_tokens: Sequence[str], progress: Progress
) -> Iterator[tuple[bytes, list[int]]]:
    """The text between special tokens in batches of documents: their bytes, and where each document ends."""
    total = len(texts) if isinstance(texts, Sized) else 0
    done = n_bytes = 0
    parts: list[bytes] = []
    for done, text in enumerate(texts, start=1):
        utf8(text, f"text {done - 1}")
        new = [ordinary.encode() for ordinary in split_at(text, special_tokens)[::2]]
        parts += new
        n_bytes += sum(map(len, new))
        if n_bytes >= _BATCH_BYTES:
            yield b"".join(parts), list(accumulate(map(len, parts)))
            parts, n_bytes = [], 0
            progress("counting", done, total)
    yield b"".join(parts), list(accumulate(map(len, parts)))
    progress("counting", done, done)


def learn_merges(
    counts: Mapping[str, int], n_merges: int, progress: Progress = lambda stage, done, total: None
) -> list[tuple[int, int]]:
    """The first `n_merges` merges for pre-tokens that occur `counts` times, fewer if no pair is left.

    Equally frequent pairs with the same bytes are merged in the order of their ids.

    >>> learn_merges({"the cat in the hat": 1}, 3)
    [(116, 104), (256, 101), (257, 32)]
    """
    state = _Pairs(counts)
    merges: list[tuple[int, int]] = []
    while len(merges) < n_merges and (pair := state.most_frequent()):
        state.merge(pair)
        merges.append((ord(pair[0]), ord(pair[1])))
        if len(merges) % _REPORT_EVERY_MERGES == 0:
            progress("merging", len(merges), n_merges)
    progress("merging", len(merges), len(merges))
    return merges


class _Pairs:
    """The pre-tokens as merged so far, and how often each pair of tokens occurs in them.

    A pre-token is a string in which the character with code point i is token i; a pair is a string of two characters.
    str.split finds all occurrences of a pair, from left to right, and str.join merges them.

    All occurrences of a pair appear while the later of its two tokens is created: from then on its count only falls.
    So a pair is pushed to the heap once, and its entry is lowered when it reaches the top with an outdated count; and
    `where` may contain pre-tokens in which the pair no longer occurs.
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
        """The pair to merge next; None if no two tokens are adjacent any more."""
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
        """Replace `pair` by the next token wherever it occurs."""
        first, second = pair
        new = chr(self.n_tokens)
        self.n_tokens += 1
        self.reversed_order.append(self.reversed_order[ord(first)][:-1] + self.reversed_order[ord(second)])
        del self.pair_counts[pair]
        for created, count in self._replace(pair, new).items():
            left, right = created
            # The pair that was here before; for a pair of equal tokens it may be the merged pair itself.
            gone = (second if left == new else left) + (first if right == new else right)
            if gone != pair:
                self.pair_counts[gone] -= count
                if not self.pair_counts[gone]:
                    del self.pair_counts[gone], self.where[gone]
            self.pair_counts[created] = count
            heapq.heappush(self.heap, self._entry(created, count))

    def _replace(self, pair: str, new: str) -> dict[str, int]:
        """Replace `pair` by `new` in all words; returns the counts of the pairs with `new`."""
        words, word_counts, where = self.words, self.word_counts, self.where
        created: defaultdict[str, int] = defaultdict(int)
        for i in set(where.pop(pair)):
            parts = words[i].split(pair)
            if len(parts) == 1:
                continue
            words[i] = new.join(parts)
            count = word_counts[i]
            if parts[0]:
                neighbours = parts[0][-1] + new
                created[neighbours] += count
                where[neighbours].append(i)
            if parts[-1]:
                neighbours = new + parts[-1][0]
                created[neighbours] += count
                where[neighbours].append(i)
            for part in parts[1:-1]:
                for neighbours in (new + part[0], part[-1] + new) if part else (new + new,):
                    created[neighbours] += count
                    where[neighbours].append(i)
        return created

    def _entry(self, pair: str, count: int) -> tuple[int, str, str, str]:
        first, second = pair
        return -count, self.reversed_order[ord(first)], self.reversed_order[ord(second)], pair


def _reversed_order(byte: int) -> str:
    # Greater byte strings become smaller strings, because a heap returns its smallest entry first. The character at the
    # end sorts a byte string before its own prefixes, where dictionary order has the prefixes first.
    return chr(255 - byte) + chr(256)
