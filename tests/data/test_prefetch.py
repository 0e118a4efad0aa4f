import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from napkin.data import Batches, Document, write_token_file
from napkin.data.batches import BatchFetcher, Prefetcher, open_fetcher
from napkin.tokenizer import ByteTokenizer


@pytest.fixture
def batches(tmp_path: Path) -> Batches:
    text = "".join(chr(33 + n % 90) for n in range(2000))
    tokens = write_token_file(tmp_path / "t", [Document("", text)], ByteTokenizer(["<|endoftext|>"]))
    return Batches(tokens, context_length=8, batch_size=4, seed=0)


class Spoilt(Batches):
    """Reads well but for one batch."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if index == 5:
            raise OSError("the disk is gone")
        return super().__getitem__(index)


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "napkin batches"]


def test_a_prepared_batch_is_the_batch_whatever_is_asked_for_next(batches: Batches) -> None:
    feed = Prefetcher(batches)
    for index in [0, 1, 2, 3, 10, 11, 4, 4, 5, 0]:
        assert same(feed[index], batches[index])
        assert len(own_threads()) == 1
    feed.close()
    assert not own_threads()
    assert same(feed[7], batches[7])
    feed.close()
    feed.close()
    assert not own_threads()


def test_an_error_comes_with_the_batch_that_it_spoils_and_no_earlier(batches: Batches) -> None:
    batches.__class__ = Spoilt
    feed = Prefetcher(batches)
    for index in range(5):
        assert len(feed[index]) == 2
    with pytest.raises(OSError, match="the disk is gone"):
        feed[5]
    assert not own_threads()
    assert len(feed[6]) == 2
    feed.close()


def test_a_thread_prepares_where_it_is_asked_to_and_with_a_gpu(batches: Batches) -> None:
    chosen = [type(open_fetcher(batches, device, how)) for how in ("auto", "on", "off") for device in ("cpu", "cuda")]
    assert chosen == [BatchFetcher, Prefetcher, Prefetcher, Prefetcher, BatchFetcher, BatchFetcher]
