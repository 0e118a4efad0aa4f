"""Many threads over one text: the ids, and their order whichever thread finishes first."""

import itertools
import random
import threading

import numpy as np
import pytest

from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.numba.encoding import Encoder, _OrderedOutput

MERGES = train_bpe(["the cat in the hat isn't THE rat's. naïve 你好 ΑΒΓ αβγ " * 4], 420, ()).merges
THREADS = 8


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("napkin.tokenizer.numba.encoding._PIECE_BYTES", 5_000)


def unlike_words(seed: int, n_words: int) -> bytes:
    """Words of which hardly one comes twice, some too long for an entry of the cache."""
    draw = random.Random(seed)
    return " ".join(
        "".join(draw.choices("abcdefghij你éα", k=draw.choice([3, 6, 9, 30]))) + "x" for _ in range(n_words)
    ).encode()


@pytest.mark.parametrize("cache_bytes", [0, 2**26])
def test_threads_that_meet_nothing_but_new_words_give_the_ids_of_one_thread(cache_bytes: int):
    text = unlike_words(1, 60_000)
    expected = Encoder(MERGES, "gpt2").encode(text)[0]
    encoder = Encoder(MERGES, "gpt2", cache_bytes=cache_bytes)

    # Again and again, with caches that are empty, full, and full of something else.
    for other in (text, text[::-1].decode(errors="ignore").encode(), text):
        ids, counts = encoder.encode(other, dtype="uint16", threads=THREADS)
        assert len(ids) == counts.sum()
    assert np.array_equal(ids, expected)


def test_documents_shared_among_threads_have_the_ids_they_have_alone():
    draw = random.Random(2)
    documents = [unlike_words(seed, draw.choice([0, 1, 50, 3_000])) for seed in range(60)]
    encoder = Encoder(MERGES, "gpt2")

    ids, counts = encoder.encode(b"".join(documents), list(itertools.accumulate(map(len, documents))), threads=THREADS)

    alone = [Encoder(MERGES, "gpt2").encode(document)[0] for document in documents]
    assert counts.tolist() == list(map(len, alone))
    assert np.array_equal(ids, np.concatenate(alone))


def test_an_encoder_serves_several_threads_of_the_program_at_once():
    texts = [unlike_words(seed, 5_000) for seed in range(THREADS)]
    expected = [Encoder(MERGES, "gpt2").encode(text)[0] for text in texts]
    encoder, got = Encoder(MERGES, "gpt2"), {}

    def encode(i: int) -> None:
        got[i] = encoder.encode(texts[i], threads=2)[0]

    threads = [threading.Thread(target=encode, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert all(np.array_equal(got[i], expected[i]) for i in range(THREADS))


def test_ids_stand_in_the_order_of_their_pieces_however_they_come():
    for seed in range(50):
        draw = random.Random(seed)
        pieces = [draw.choices(range(100), k=draw.randint(0, 20)) for _ in range(8)]
        ids = np.zeros(1000, np.uint16)
        output = _OrderedOutput(ids)

        for number in draw.sample(range(8), 8):
            given = np.array(pieces[number], np.uint16)
            output.add(number, given)
            given[:] = 999

        assert ids[: output.length].tolist() == [i for piece in pieces for i in piece], seed
