import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from napkin.data import Batches, Document, TokenFile, document_ids, evaluation_windows, write_token_file
from napkin.errors import NapkinError
from napkin.tokenizer import ByteTokenizer

MakeTokenFile = Callable[[int], TokenFile]
REUSED_FOLDER = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def make(tmp_path: Path) -> MakeTokenFile:
    """A function that makes a token file of n ≥ 2 tokens, in which ids say little about their place."""
    numbers = itertools.count()

    def make(n_tokens: int) -> TokenFile:
        letters = np.random.default_rng(n_tokens).integers(ord("a"), ord("z"), n_tokens - 2, np.uint8)
        document = Document("letters", letters.tobytes().decode())
        path = tmp_path / f"{next(numbers)}.tokens"
        return write_token_file(path, [document], ByteTokenizer(["<|endoftext|>"]))

    return make


def rows(batch: tuple[torch.Tensor, ...]) -> list[tuple[list[int], list[int]]]:
    inputs, targets = batch
    return list(zip(inputs.tolist(), targets.tolist(), strict=True))


def windows_of(token_file: TokenFile, context_length: int) -> list[tuple[list[int], list[int]]]:
    ids = token_file.tokens.tolist()
    starts = range(0, len(ids) - context_length, context_length)
    return [(ids[s : s + context_length], ids[s + 1 : s + context_length + 1]) for s in starts]


@REUSED_FOLDER
@given(st.integers(2, 60), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**70))
def test_each_window_is_seen_exactly_once_an_epoch(
    make: MakeTokenFile, n_tokens: int, context_length: int, batch_size: int, seed: int
) -> None:
    context_length = min(context_length, n_tokens - 1)
    token_file = make(n_tokens)
    batches = Batches(token_file, context_length=context_length, batch_size=batch_size, seed=seed, windows="fixed")
    expected = windows_of(token_file, context_length)
    assert batches.n_windows == len(expected)
    n_epochs = 3
    n_batches = -(-n_epochs * len(expected) // batch_size)
    seen = [row for i in range(n_batches) for row in rows(batches[i])]
    for epoch in range(n_epochs):
        assert sorted(seen[epoch * len(expected) : (epoch + 1) * len(expected)]) == sorted(expected)


def test_a_batch_depends_on_nothing_but_seed_and_index(make: MakeTokenFile) -> None:
    token_file = make(500)

    def batches() -> Batches:
        return Batches(TokenFile.open(token_file.path), context_length=8, batch_size=4, seed=3)

    forward = [rows(batches()[i]) for i in range(40)]
    one = batches()
    backward = [rows(one[i]) for i in reversed(range(40))]
    assert forward == backward[::-1]


def test_the_order_does_not_depend_on_the_batch_size(make: MakeTokenFile) -> None:
    token_file = make(500)
    small = Batches(token_file, context_length=8, batch_size=2, seed=3)
    large = Batches(token_file, context_length=8, batch_size=10, seed=3)
    assert [row for i in range(50) for row in rows(small[i])] == [row for i in range(10) for row in rows(large[i])]


def test_other_seeds_and_other_epochs_have_other_orders(make: MakeTokenFile) -> None:
    token_file = make(801)
    orders = []
    for seed in range(5):
        batches = Batches(token_file, context_length=8, batch_size=100, seed=seed)
        orders += [str(rows(batches[epoch])) for epoch in range(5)]
    assert len(set(orders)) == 25
    assert str(windows_of(token_file, 8)) not in orders


def test_batches_are_int64_tensors_that_do_not_share_memory(make: MakeTokenFile) -> None:
    inputs, targets = Batches(make(100), context_length=5, batch_size=3, seed=0)[0]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (3, 5)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    before = targets.clone()
    inputs.zero_()
    assert torch.equal(targets, before)


def test_a_batch_larger_than_the_file_straddles_epochs(make: MakeTokenFile) -> None:
    token_file = make(7)
    batches = Batches(token_file, context_length=2, batch_size=7, seed=0, windows="fixed")
    assert batches.n_windows == 3
    seen = rows(batches[0])
    assert sorted(seen[:3]) == sorted(seen[3:6]) == sorted(windows_of(token_file, 2))


def test_batches_have_no_end_and_no_beginning_before_0(make: MakeTokenFile) -> None:
    batches = Batches(make(100), context_length=5, batch_size=3, seed=0)
    assert batches[10**30][0].shape == (3, 5)
    with pytest.raises(IndexError):
        batches[-1]


@pytest.mark.parametrize(
    ("n_tokens", "context_length", "way_out"),
    [
        (31, 256, " or --model.context-length 16"),
        (33, 33, " or --model.context-length 32"),
        (32, 32, " or --model.context-length 16"),
        (2, 2, " or --model.context-length 1"),
    ],
)
def test_too_few_tokens_for_one_window_are_told_with_the_way_out(
    make: MakeTokenFile, n_tokens: int, context_length: int, way_out: str
) -> None:
    token_file = make(n_tokens)
    with pytest.raises(NapkinError) as caught:
        Batches(token_file, context_length=context_length, batch_size=1, seed=0)
    assert str(caught.value) == (
        f"'{token_file.path}' holds {n_tokens} tokens, a batch needs {context_length + 1}: use more text{way_out}"
    )
    suggested = int(way_out.split()[-1])
    assert Batches(token_file, context_length=suggested, batch_size=1, seed=0).n_windows >= 1


def test_one_window_is_enough(make: MakeTokenFile) -> None:
    token_file = make(257)
    batches = Batches(token_file, context_length=256, batch_size=1, seed=0, windows="fixed")
    assert rows(batches[0]) == rows(batches[1]) == windows_of(token_file, 256)


@pytest.mark.parametrize(("context_length", "batch_size"), [(0, 1), (-1, 1), (1, 0)])
def test_impossible_sizes_are_refused(make: MakeTokenFile, context_length: int, batch_size: int) -> None:
    with pytest.raises(NapkinError, match="possible: choose 1"):
        Batches(make(10), context_length=context_length, batch_size=batch_size, seed=0)
    with pytest.raises(NapkinError, match="is not possible"):
        evaluation_windows(make(10), context_length, 1, batch_size)


@REUSED_FOLDER
@given(st.integers(2, 60), st.integers(1, 12), st.integers(1, 5), st.data())
def test_evaluation_scores_each_token_but_the_first_once_and_with_enough_context(
    make: MakeTokenFile, n_tokens: int, context_length: int, batch_size: int, data: st.DataObject
) -> None:
    stride = data.draw(st.integers(1, context_length))
    token_file = make(n_tokens)
    ids = token_file.tokens.tolist()
    scored: list[int] = []
    all_rows: list[tuple[list[int], list[int]]] = []
    for batch in evaluation_windows(token_file, context_length, stride, batch_size):
        assert batch[0].dtype == batch[1].dtype == torch.int64
        assert batch[0].shape == batch[1].shape
        assert len(all_rows) % batch_size == 0, "only the last batch may be smaller"
        assert 1 <= len(batch[0]) <= batch_size
        assert batch[0].shape[1] == context_length
        all_rows += rows(batch)
    for number, (inputs, targets) in enumerate(all_rows):
        start = number * stride
        held = ids[start : start + context_length]
        assert inputs == held + [0] * (context_length - len(held))
        for place, target in enumerate(targets):
            if target == -1:
                continue
            position = start + place + 1
            assert target == ids[position]
            assert place + 1 >= min(position, context_length - stride + 1)
            scored.append(position)
    assert scored == list(range(1, n_tokens))


def test_evaluation_by_hand(make: MakeTokenFile) -> None:
    token_file = make(7)
    a, b, c, d, e, f, g = token_file.tokens.tolist()
    assert [rows(batch) for batch in evaluation_windows(token_file, 4, 3, 2)] == [
        [([a, b, c, d], [b, c, d, e]), ([d, e, f, g], [-1, f, g, -1])]
    ]


@pytest.mark.parametrize("stride", [0, 5])
def test_a_stride_that_would_skip_tokens_is_refused(make: MakeTokenFile, stride: int) -> None:
    with pytest.raises(NapkinError, match=f"stride.*{stride}.*possible: choose.*1.*4"):
        evaluation_windows(make(10), 4, stride, 1)


def test_a_document_begins_with_the_separator_before_it() -> None:
    tokens = torch.tensor([[5, 0, 7, 8, 0, 9], [0, 0, 1, 1, 1, 0]])
    assert document_ids(tokens, 0).tolist() == [[0, 1, 1, 1, 2, 2], [1, 2, 2, 2, 2, 3]]
