"""Windows that begin elsewhere in every epoch: no token twice in one, and over epochs every token as often as any."""

import hashlib
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.data import SEPARATOR, Batches, Document, TokenFile, TokenMixture, write_token_file
from napkin.data.batches import repetition_warnings
from napkin.data.token_file import sidecar_path
from napkin.tokenizer import ByteTokenizer, CharacterTokenizer

# Every token but the separators is another character, so a token says where it is from.
ALPHABET = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
DISTINCT = CharacterTokenizer(ALPHABET, [SEPARATOR])
SIZES = st.tuples(st.integers(1, 60), st.integers(1, 20)).map(lambda sizes: (max(sizes), min(sizes)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokens")


def distinct(folder: Path, n_targets: int) -> TokenFile:
    """A file of that many tokens after the first, of which each but the last is another one."""
    path = folder / str(n_targets)
    if sidecar_path(path).exists():
        return TokenFile.open(path)
    return write_token_file(path, [Document("", ALPHABET[: n_targets - 1])], DISTINCT)


def windows_in(batches: Batches, first: int, last: int) -> list[tuple[list[int], list[int]]]:
    """Inputs and targets of windows `first` to `last`; the batch size has to be 1."""
    return [(inputs[0].tolist(), targets[0].tolist()) for inputs, targets in (batches[i] for i in range(first, last))]


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(0, 2**70), st.integers(0, 10**6), st.integers(1, 30))
def test_an_epoch_has_no_target_twice_and_epochs_have_all_equally_often(
    folder: Path, sizes: tuple[int, int], seed: int, first_epoch: int, n_epochs: int
) -> None:
    n_targets, context_length = sizes
    tokens = distinct(folder, n_targets)
    # Each token by what precedes it; on the ring the first token is the last.
    follows = dict(zip(tokens.tokens[:-1].tolist(), tokens.tokens[1:].tolist(), strict=True))
    batches = Batches(tokens, context_length=context_length, batch_size=1, seed=seed)
    assert batches.n_windows == n_targets // context_length
    seen: Counter[int] = Counter(dict.fromkeys(tokens.tokens[1:].tolist(), 0))
    for epoch in range(first_epoch, first_epoch + n_epochs):
        found = windows_in(batches, epoch * batches.n_windows, (epoch + 1) * batches.n_windows)
        targets = [target for _, targets in found for target in targets]
        assert len(set(targets)) == len(targets) == batches.n_windows * context_length
        for inputs, window_targets in found:
            assert inputs[1:] == window_targets[:-1]
            assert [follows[token] for token in inputs] == window_targets
        seen.update(targets)
    assert max(seen.values()) - min(seen.values()) <= 1


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(0, 2**70))
def test_the_end_of_a_file_is_learned_too(folder: Path, sizes: tuple[int, int], seed: int) -> None:
    n_targets, context_length = sizes
    tokens = distinct(folder, n_targets)
    batches = Batches(tokens, context_length=context_length, batch_size=1, seed=seed)
    targets = {target for _, targets in windows_in(batches, 0, 2 * batches.n_windows) for target in targets}
    # Less than half is left over in an epoch, unless there is one window.
    if batches.n_windows > 1:
        assert targets == set(tokens.tokens[1:].tolist())


def test_windows_begin_at_other_places_by_seed_and_by_epoch(folder: Path) -> None:
    tokens = distinct(folder, 200)

    def starts(seed: int, epoch: int) -> tuple[int, ...]:
        batches = Batches(tokens, context_length=16, batch_size=1, seed=seed)
        n = batches.n_windows
        return tuple(sorted(inputs[0] for inputs, _ in windows_in(batches, epoch * n, (epoch + 1) * n)))

    # Two of these seeds begin at the same place, by chance.
    assert len({starts(seed, 0) for seed in range(8)}) == 7
    assert len({starts(0, epoch) for epoch in range(8)}) == 8
    # Also where nothing is left over.
    tokens = distinct(folder, 192)
    assert len({starts(0, epoch) for epoch in range(8)}) == 8


def test_shifted_batches_are_a_function_of_seed_and_index_whatever_the_rows(folder: Path) -> None:
    files = [distinct(folder, n) for n in (150, 67, 40)]

    def batches(rows: slice = slice(None)) -> Batches:
        return Batches(TokenMixture(files, [5, 3, 2]), context_length=16, batch_size=8, seed=3, rows=rows)

    forward = [batches()[i][0].tolist() for i in range(50)]
    one = batches()
    assert [one[i][0].tolist() for i in reversed(range(50))] == forward[::-1]
    halves = batches(slice(0, 4)), batches(slice(4, 8))
    assert [half[i][0].tolist() for i in range(50) for half in halves] == [
        rows for batch in forward for rows in (batch[:4], batch[4:])
    ]


def test_each_of_several_files_has_shifts_of_its_own(folder: Path) -> None:
    # The same tokens twice.
    tokens = distinct(folder, 200)
    batches = Batches(TokenMixture([tokens, tokens]), context_length=16, batch_size=24, seed=0)
    assert batches.n_windows == 24
    starts = batches[0][0][:, 0].tolist()
    assert len({(int(np.flatnonzero(tokens.tokens == start)[0]) - 1) % 16 for start in starts}) > 1


def test_fixed_windows_are_those_of_earlier_versions(tmp_path: Path) -> None:
    # The checksum was made by the version before windows were shifted.
    files = [
        write_token_file(
            tmp_path / str(n),
            [Document(str(n), "".join(chr(97 + (i * i + n * i) % 26) for i in range(1000 + n)))],
            ByteTokenizer([SEPARATOR]),
        )
        for n in range(2)
    ]
    batches = Batches(TokenMixture(files, [2, 1]), context_length=16, batch_size=8, seed=7, windows="fixed")
    found = hashlib.sha256()
    for index in (*range(30), 10**6):
        for tensor in batches[index]:
            found.update(tensor.numpy().tobytes())
    assert found.hexdigest() == "6aed5cce33ae67f07cb6b6f7468f043bb76277d116d320c747e68a0dac8eb48b"


def test_text_that_is_read_too_often_is_told(folder: Path) -> None:
    tokens = distinct(folder, 160)
    batches = Batches(tokens, context_length=16, batch_size=32, seed=0)
    in_a_batch, too_often = repetition_warnings(batches, 1000)
    assert in_a_batch == (
        f"a batch takes 32 windows of '{tokens.path}', which has only 10: the same text occurs 3.2 times in a batch: "
        "use more text, or --training.batch-size 10 at most"
    )
    assert too_often.startswith(f"the run reads '{tokens.path}' 3,200 times: ")
    assert too_often.endswith("use more text, or --training.steps 12 at most")
    assert repetition_warnings(Batches(tokens, context_length=16, batch_size=10, seed=0), 40) == []


def test_of_several_files_the_one_that_is_read_too_often_is_told(folder: Path) -> None:
    long, short = distinct(folder, 280), distinct(folder, 20)
    batches = Batches(TokenMixture([long, short], [1, 1]), context_length=10, batch_size=6, seed=0)
    in_a_batch, too_often = repetition_warnings(batches, 30)
    assert f"3 windows of '{short.path}', which has only 2: the same text occurs 1.5 times" in in_a_batch
    assert f"the run reads '{short.path}' 45 times" in too_often


def test_epochs_are_tokens_trained_on_by_tokens_of_the_files(folder: Path) -> None:
    mixture = TokenMixture([distinct(folder, 99), distinct(folder, 49)])
    assert mixture.epochs(300) == 2.0


def test_an_epoch_begins_where_the_one_before_it_ended(folder: Path) -> None:
    n_targets, context_length = 23, 5
    tokens = distinct(folder, n_targets)
    places = {token: place for place, token in enumerate(tokens.tokens[:-1].tolist())}
    batches = Batches(tokens, context_length=context_length, batch_size=1, seed=9)
    begun = [{places[inputs[0]] for inputs, _ in windows_in(batches, epoch * 4, epoch * 4 + 4)} for epoch in range(10)]
    for epoch, following in itertools.pairwise(begun):
        (end,) = {(place + context_length) % n_targets for place in epoch} - epoch
        assert end in following
