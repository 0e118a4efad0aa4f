"""Documents that come in parts: the same tokens, in bounded memory, and each side of a split its share of a part."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.data.corpus import Document, read_documents, split_documents
from napkin.data.token_file import SEPARATOR
from napkin.data.token_writer import write_token_file
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer, ByteTokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.word_level import WordTokenizer

PROSE = "The cat sat, and didn't say 123 words.\nThen  it   left:\n\ta mat; 你好 世界 grün\n" * 60
PIECES = st.lists(
    st.sampled_from(["cat", " ", "\n", "a b", ".\nNo", "'s", "12", "你", "<|endoftext|>\n"]), max_size=400
)


@settings(max_examples=60)
@given(PIECES, st.integers(32, 200))
def test_parts_joined_are_the_documents(tmp_path_factory: pytest.TempPathFactory, pieces: list[str], part_bytes: int):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes("".join(["x", *pieces]).encode())

    parts = list(read_documents([path], part_bytes=part_bytes))

    joined: list[str] = []
    for part in parts:
        if part.continues:
            joined[-1] += part.text
        else:
            joined.append(part.text)
    assert joined == [document.text for document in read_documents([path])]


@pytest.mark.parametrize("line_end", ["\n", " "])
def test_parts_are_of_about_the_size_asked_for(tmp_path: Path, line_end: str):
    (tmp_path / "text.txt").write_text(PROSE.replace("\n", line_end) * 10)
    parts = list(read_documents([tmp_path / "text.txt"], part_bytes=2**15))
    assert len(parts) > 1
    assert max(len(part.text.encode()) for part in parts) < 2**16
    assert [part.continues for part in parts] == [False] + [True] * (len(parts) - 1)


@pytest.mark.parametrize(
    "tokenizer",
    [
        train_bpe([PROSE], 400, [SEPARATOR]),
        train_bpe([PROSE], 400, [SEPARATOR], pattern="o200k"),
        WordTokenizer.train([PROSE], 40, [SEPARATOR]),
        ByteTokenizer([SEPARATOR]),
    ],
    ids=lambda tokenizer: tokenizer.kind,
)
def test_the_tokens_of_parts_are_those_of_the_whole(tmp_path: Path, tokenizer: Tokenizer):
    assert tokenizer.is_splittable
    (tmp_path / "text.txt").write_text(PROSE * 20)
    for name, part_bytes in (("whole", None), ("parts", 2**15)):
        documents = read_documents([tmp_path / "text.txt"], part_bytes=part_bytes)
        assert write_token_file(tmp_path / name, documents, tokenizer, threads=2).n_documents == 1
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()


def test_a_pattern_that_may_cut_anywhere_is_not_to_be_cut():
    assert not BPETokenizer([], [SEPARATOR], pattern=r"\w+ \w+|.").is_splittable


def test_documents_encoded_together_have_the_ids_of_each_alone():
    tokenizer = train_bpe([PROSE], 400, [SEPARATOR])
    texts = [PROSE * 40, "", "a cat", PROSE[:77]]
    for threads in (1, 2, 3):
        ids, counts = tokenizer.encode_documents(texts, threads=threads)
        parts = [ids[a:b].tolist() for a, b in pairwise(np.cumsum([0, *counts]))]
        assert parts == [tokenizer.encode(text) for text in texts]


@pytest.mark.parametrize("others", [[], [Document("other", "short")]])
def test_of_each_part_the_last_share_is_held_out(others: list[Document]):
    parts = [Document("long", f"{i}" * 99 + "\n" + "v" * 900, continues=i > 0) for i in range(5)]
    documents = [*parts, *others]
    training, validation = (
        [document for document in split_documents(documents, 0.9, side) if document not in others]
        for side in ("training", "validation")
    )
    assert [part.text for part in training] == [part.text[:100] for part in parts]
    assert [part.text for part in validation] == [part.text[100:] for part in parts]
    # What is between them is gone, so that neither goes on with the one before.
    assert not any(document.continues for document in training + validation)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_with_nothing_held_out_parts_stay_parts(fraction: float):
    parts = [Document("long", "text", continues=i > 0) for i in range(3)]
    side = "training" if fraction == 0 else "validation"
    assert list(split_documents(parts, fraction, side)) == parts
