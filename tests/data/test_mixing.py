import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.data import SEPARATOR, Batches, Document, TokenFile, TokenMixture, document_ids, write_token_file
from napkin.data.mixing import MAX_DEVIATION, Interleaving
from napkin.errors import NapkinError
from napkin.tokenizer import ByteTokenizer

WEIGHTS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)


def sources_of(interleaving: Interleaving, start: int, length: int) -> list[int]:
    """The source of each element; each must have one."""
    sources = [-1] * length
    for source, (_, places) in enumerate(interleaving(start, length)):
        for place in places:
            assert sources[place] == -1
            sources[place] = source
    assert -1 not in sources
    return sources


@settings(max_examples=30, deadline=None)
@given(WEIGHTS)
def test_each_source_keeps_to_its_share_after_any_number_of_elements(weights: list[float]) -> None:
    counts = np.eye(len(weights))[sources_of(Interleaving(weights), 0, 500)].cumsum(axis=0)
    shares = np.array(weights) / math.fsum(weights)
    farthest = abs(counts - np.outer(np.arange(1, 501), shares)).max()
    assert farthest <= (0.5 if len(weights) <= 2 else MAX_DEVIATION) + 1e-6


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.integers(0, 10**13), st.integers(0, 60), st.integers(1, 60))
def test_any_stretch_is_what_the_whole_says_of_it(weights: list[float], start: int, length: int, cut: int) -> None:
    interleaving = Interleaving(weights)
    whole = interleaving(start, length + cut)
    head, tail = interleaving(start, length), interleaving(start + length, cut)
    for (before, places), (first, early), (later, late) in zip(whole, head, tail, strict=True):
        assert first == before
        assert later == before + len(early)
        assert places.tolist() == [*early.tolist(), *(late + length).tolist()]
    assert sum(before for before, _ in whole) == start


def test_a_trillion_elements_later_the_shares_still_hold() -> None:
    weights = [0.5, 0.3, 0.15, 0.05]
    for (before, _), weight in zip(Interleaving(weights)(10**12, 1), weights, strict=True):
        assert abs(before - 10**12 * weight) < 4


def test_a_long_stretch_is_made_of_short_ones() -> None:
    length = 2**20 + 5
    whole = Interleaving([2, 1, 1])(7, length)
    assert sum(len(places) for _, places in whole) == length
    last = Interleaving([2, 1, 1])(7 + 2**20, 5)
    for (_, places), (_, end) in zip(whole, last, strict=True):
        assert places[places >= 2**20].tolist() == (end + 2**20).tolist()


def test_elements_far_out_are_counted_without_overflow() -> None:
    mixed = Interleaving([3, 1])(10**30, 8)
    assert sum(before for before, _ in mixed) == 10**30
    assert [len(places) for _, places in mixed] == [6, 2]


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_weights_that_are_no_shares_are_refused(weight: float) -> None:
    with pytest.raises(NapkinError, match="use a number above 0"):
        Interleaving([1.0, weight])


CONTEXT = 8


@pytest.fixture
def files(tmp_path: Path) -> list[TokenFile]:
    """Three files whose every token says which it is from; 30, 11 and 4 windows of 8."""
    tokenizer = ByteTokenizer([SEPARATOR])
    return [
        write_token_file(tmp_path / f"{letter}.tokens", [Document(letter, letter * (CONTEXT * n - 1))], tokenizer)
        for letter, n in (("a", 30), ("b", 11), ("c", 4))
    ]


def batches_of(files: Sequence[TokenFile], weights: Sequence[float] | None = None, *, size: int = 6) -> Batches:
    return Batches(TokenMixture(files, weights), context_length=CONTEXT, batch_size=size, seed=1, windows="fixed")


def letters(batches: Batches, n_batches: int) -> str:
    return "".join(chr(row[3]) for i in range(n_batches) for row in batches[i][0].tolist())


def test_weights_are_shares_of_the_windows(files: list[TokenFile]) -> None:
    drawn = letters(batches_of(files, [5, 3, 2]), 50)
    for n in range(1, len(drawn) + 1):
        counts = Counter(drawn[:n])
        proportions = zip("abc", (0.5, 0.3, 0.2), strict=True)
        assert all(abs(counts[letter] - p * n) < MAX_DEVIATION for letter, p in proportions)


def test_without_weights_all_files_end_their_epoch_together(files: list[TokenFile]) -> None:
    batches = batches_of(files, size=9)
    assert batches.n_windows == 45
    assert Counter(letters(batches, 5)) == {"a": 30, "b": 11, "c": 4}


def test_each_file_gives_each_of_its_windows_once_an_epoch_of_its_own(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer([SEPARATOR])
    texts = ["".join(chr(33 + n) * CONTEXT for n in range(first, last)) for first, last in ((0, 20), (20, 27))]
    files = [
        write_token_file(tmp_path / f"{n}.tokens", [Document("", text)], tokenizer) for n, text in enumerate(texts)
    ]
    batches = Batches(TokenMixture(files, [1, 1]), context_length=CONTEXT, batch_size=4, seed=0, windows="fixed")
    drawn = [row[3] for i in range(60) for row in batches[i][0].tolist()]
    for low, n in ((33, 20), (53, 7)):
        own = [token for token in drawn if low <= token < low + n]
        for start in range(0, len(own) - n + 1, n):
            assert sorted(own[start : start + n]) == list(range(low, low + n))


def test_a_batch_of_several_files_depends_on_nothing_but_seed_and_index(files: list[TokenFile]) -> None:
    forward = [batches_of(files, [5, 3, 2])[i] for i in range(20)]
    batches = batches_of(files, [5, 3, 2])
    for i in reversed(range(20)):
        assert all(map(torch.equal, batches[i], forward[i]))
    small = batches_of(files, [5, 3, 2], size=2)
    assert torch.equal(torch.cat([small[i][0] for i in range(3)]), forward[0][0])


def test_one_file_alone_is_what_it_always_was(files: list[TokenFile]) -> None:
    alone = Batches(files[0], context_length=CONTEXT, batch_size=4, seed=3)
    for tokens in (TokenMixture(files[:1]), TokenMixture(files[:1], [0.3])):
        mixed = Batches(tokens, context_length=CONTEXT, batch_size=4, seed=3)
        assert all(torch.equal(a, b) for i in range(20) for a, b in zip(alone[i], mixed[i], strict=True))
        assert tokens.sha256 == files[0].sha256


def test_the_fingerprint_is_of_the_tokens_in_their_order_and_the_weights(files: list[TokenFile]) -> None:
    mixtures = [(files, None), (files[::-1], None), (files[:2], None), (files, (1, 1, 1)), (files, (2, 1, 1))]
    prints = [TokenMixture(*mixture).sha256 for mixture in mixtures]
    assert len(set(prints)) == len(prints)
    assert TokenMixture(files).sha256 == prints[0]


def test_files_of_two_tokenizers_are_not_mixed(files: list[TokenFile], tmp_path: Path) -> None:
    other = write_token_file(tmp_path / "d", [Document("", "text" * 9)], ByteTokenizer([SEPARATOR, "<|other|>"]))
    with pytest.raises(NapkinError, match=r"a\.tokens'.*'.*d'.*different"):
        TokenMixture([files[0], other])


def test_a_file_of_less_than_a_window_is_named(files: list[TokenFile]) -> None:
    with pytest.raises(NapkinError, match=r"c\.tokens' holds 33 tokens.*needs 51"):
        Batches(TokenMixture(files), context_length=50, batch_size=2, seed=0)


def test_a_separator_begins_a_document() -> None:
    tokens = torch.tensor([[5, 9, 1, 2, 9, 9, 3], [9, 4, 4, 9, 4, 4, 4]])
    assert document_ids(tokens, separator=9).tolist() == [[0, 1, 1, 1, 2, 3, 3], [1, 1, 1, 2, 2, 2, 2]]
