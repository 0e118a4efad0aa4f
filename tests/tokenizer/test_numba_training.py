"""The compiled trainer against the plain one: ties, threads, thresholds, files."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.tokenizer.bpe_training import learn_merges, train_bpe
from napkin.tokenizer.numba.counting import PreTokenCounter
from napkin.tokenizer.numba.learn_merges import learn_merges_compiled
from napkin.tokenizer.pre_tokenization import count_pre_tokens
from napkin.tokenizer.text_input import read_chunks

END = "<|end of text|>"
ALPHABETS = ["a", "ab", "aab b", "abc \n", "né 你'tsl1.", "abcdefgh "]


def learn(texts: list[str], n_merges: int, pattern: str = "gpt2", threads: int = 1, threshold: int | None = None):
    counts = PreTokenCounter(pattern, threads)
    for text in texts:
        counts.add(text.encode(), [len(text.encode())])
    counts.finish()
    return learn_merges_compiled(counts.words(), n_merges, threshold=threshold)


def plain(texts: list[str], n_merges: int, pattern: str = "gpt2"):
    return learn_merges(count_pre_tokens(texts, (), pattern, lambda *call: None), n_merges)


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize("alphabet", ALPHABETS)
def test_merges_equal_those_of_the_plain_trainer_with_any_number_of_threads_and_any_threshold(alphabet: str):
    for seed in range(40):
        draw = random.Random(seed)
        texts = ["".join(draw.choices(alphabet, k=draw.choice([0, 5, 60, 1000]))) for _ in range(draw.randint(1, 6))]
        texts.append(alphabet)
        n_merges = draw.randint(0, 60)
        pattern = draw.choice(["gpt2", "gpt2", "whole"])
        expected = plain(texts, n_merges, pattern)

        for threads, threshold in ((1, None), (2, 1), (1, 3), (1, 10**6)):
            assert learn(texts, n_merges, pattern, threads, threshold) == expected


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4", "cl100k", "o200k"])
def test_pre_tokens_of_every_length_are_counted_as_the_plain_form_counts_them(pattern: str):
    draw = random.Random(0)
    words = ["x" * k for k in (1, 7, 8, 15, 16, 17, 255, 256, 700)] + [" é" * 9, "!" * 16, "12345", "don't", "\n\n"]
    texts = [" ".join(draw.choices(words, k=50)) for _ in range(80)]

    assert learn(texts, 200, pattern, threads=2) == plain(texts, 200, pattern)


def test_more_words_than_the_first_table_holds_are_all_counted():
    texts = [" ".join(f"w{i * 7919 % 99991} {i:020d}" for i in range(start, start + 15_000)) for start in (0, 9_000)]

    assert learn(texts, 50, threads=2) == plain(texts, 50)


@pytest.fixture
def compiled_from_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("napkin.tokenizer.numba.dispatch.MIN_BYTES_CACHED", 0)
    monkeypatch.setattr("napkin.tokenizer.numba.dispatch.MIN_BYTES_NOT_CACHED", 0)


@pytest.mark.usefixtures("compiled_from_the_first_byte")
@pytest.mark.parametrize("as_texts", [list, iter])
def test_train_bpe_gives_the_same_tokenizer_by_the_core_with_special_tokens_as_boundaries(as_texts: Callable):
    texts = [f"low{END}er lower{END}{END}lowest", "a low tower " * 20, ""]
    calls: list[tuple[str, int, int]] = []

    tokenizer = train_bpe(as_texts(texts), 290, [END], progress=lambda *call: calls.append(call), threads=2)

    parts = [part for text in texts for part in text.split(END)]
    assert tokenizer.merges == plain(parts, 290 - 257)
    assert ("counting", 3, 3) in calls
    assert calls[-1] == ("merging", len(tokenizer.merges), len(tokenizer.merges))


@pytest.mark.usefixtures("compiled_from_the_first_byte")
def test_an_empty_corpus_is_refused_by_the_core_too():
    with pytest.raises(NapkinError, match="no text"):
        train_bpe(["", END], 300, [END])


@pytest.mark.parametrize("pattern", ["gpt2", "o200k", "whole", "[a-z]+"])
def test_files_read_in_chunks_give_the_vocabulary_of_the_whole_files(tmp_path: Path, pattern: str):
    draw = random.Random(0)
    words = ["the cat", " sat.\n", "Mat ", END, "  \n", "你好 ", "don't\n", "x\n\n", "=" * 20]
    texts = ["".join(draw.choices(words, k=500)) for _ in range(3)]
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text.encode())

    for size in (50, 1_000, 10**6):
        chunks = list(read_chunks(files, [END], pattern=pattern, chunk_bytes=size))
        assert "".join(chunks) == "".join(texts)
        assert train_bpe(chunks, 330, [END], pattern).fingerprint == train_bpe(texts, 330, [END], pattern).fingerprint
    assert pattern not in ("gpt2", "o200k") or len(list(read_chunks(files, [END], chunk_bytes=50))) > 50


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a" * 200 + b"\xff", "not UTF-8 at byte 200"), (b"ELF\0\1", "NUL"), (None, "No such file")],
)
def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path, content: bytes | None, message: str):
    if content is not None:
        (tmp_path / "file").write_bytes(content)

    with pytest.raises(NapkinError, match=f"file'.*{message}"):
        list(read_chunks([tmp_path / "file"], chunk_bytes=64))
