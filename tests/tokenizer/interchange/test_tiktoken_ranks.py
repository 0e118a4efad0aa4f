"""Rank files, against tiktoken itself."""

import random
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
from tiktoken._educational import bpe_train
from tiktoken.load import load_tiktoken_bpe

from napkin.errors import NapkinError
from napkin.tokenizer.bpe import BPETokenizer, ByteTokenizer
from napkin.tokenizer.interchange.huggingface import read_huggingface
from napkin.tokenizer.interchange.huggingface_fields import expression_of
from napkin.tokenizer.interchange.tiktoken import read_tiktoken, write_tiktoken
from tokenizer.interchange.conftest import CL100K, CUSTOM, END, SPECIAL

GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
SPELLINGS = {"gpt2": GPT2, "gpt4": CL100K, CUSTOM: CUSTOM}


def theirs_of(ranks: dict[bytes, int], pattern: str, special_tokens: dict[str, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens)


def write_ranks(path: Path, ranks: Mapping[bytes, int]) -> Path:
    path.write_bytes(b"".join(b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    return path


def test_what_napkin_trained_gives_napkins_ids_there(napkins: BPETokenizer, strings: list[str], tmp_path: Path):
    path = tmp_path / "written.tiktoken"
    write_tiktoken(napkins, path)
    theirs = theirs_of(load_tiktoken_bpe(str(path)), SPELLINGS[napkins.pattern], napkins.special_tokens)

    for text in strings:
        assert theirs.encode_ordinary(text) == napkins.encode(text)
        # Which of two special tokens that begin alike is found, tiktoken leaves open.
        assert theirs.encode(text, allowed_special={END}, disallowed_special=()) == napkins.encode(
            text, allowed_special={END}
        )
    again = read_tiktoken(path, pattern=napkins.pattern, special_tokens=SPECIAL)
    assert again.fingerprint == napkins.fingerprint


def test_what_hugging_faces_library_trained_gives_its_ids_in_all_three(
    theirs: tokenizers.Tokenizer, strings: list[str], tmp_path: Path
):
    theirs.save(str(tmp_path / "tokenizer.json"))
    ours = read_huggingface(tmp_path / "tokenizer.json")
    write_tiktoken(ours, tmp_path / "ours.tiktoken")
    pattern = {"gpt2": GPT2, "gpt4": CL100K}.get(getattr(ours, "pattern"), CUSTOM)  # noqa: B009
    third = theirs_of(load_tiktoken_bpe(str(tmp_path / "ours.tiktoken")), pattern, ours.special_tokens)

    for text in strings:
        if not any(token in text for token in SPECIAL):
            assert third.encode_ordinary(text) == ours.encode(text) == theirs.encode(text).ids


@pytest.mark.thorough
def test_what_tiktoken_trained_gives_its_ids(corpus: list[str], strings: list[str], tmp_path: Path):
    ranks = bpe_train("".join(corpus)[-20_000:], 330, CL100K, visualise=None)
    path = write_ranks(tmp_path / "theirs.tiktoken", ranks)
    theirs = theirs_of(ranks, CL100K, {END: 340, "<|fim|>": 335})

    ours = read_tiktoken(path, pattern=CL100K, special_tokens={END: 340, "<|fim|>": 335})

    assert ours.vocab_size == theirs.n_vocab
    assert ours.special_tokens["<|unused_336|>"] == 336
    for text in strings:
        assert ours.encode(text) == theirs.encode_ordinary(text)


def test_the_available_pair_of_lowest_rank_is_merged_as_in_llama_3(tmp_path: Path):
    # Tokens of signs that Llama 3 has, in its order: ".:.:" is made of ".:.", which has a higher rank.
    signs = [b":.", b".:", b".:.:", b".:.", b" .", b":.:.", b" .:"]
    ranks = {token: i for i, token in enumerate([*(bytes([byte]) for byte in range(256)), *signs])}
    ours, theirs = (
        read_tiktoken(write_ranks(tmp_path / "ranks.tiktoken", ranks), pattern="gpt4"),
        theirs_of(ranks, CL100K, {}),
    )
    draw = random.Random(0)
    texts = ["the .:.: end", *("".join(draw.choices(".: ", k=draw.randint(1, 200))) for _ in range(300))]
    assert [ours.encode(text) for text in texts] == [theirs.encode_ordinary(text) for text in texts]
    write_tiktoken(ours, tmp_path / "written.tiktoken")
    assert (tmp_path / "written.tiktoken").read_bytes() == (tmp_path / "ranks.tiktoken").read_bytes()


def test_any_ranks_give_the_ids_of_the_library(tmp_path: Path):
    """Tokens of any bytes in any order: made of others in several ways, too late, or not at all."""
    draw = random.Random(0)
    texts = ["".join(draw.choices("abc  ", k=draw.randint(1, 12))) for _ in range(200)]
    for _ in range(80):
        tokens = [bytes([byte]) for byte in range(256)]
        draw.shuffle(tokens)
        made: dict[bytes, None] = {}
        for _ in range(draw.randint(1, 20)):
            parts = draw.choices([b"a", b"b", b"c", *made], k=2) if draw.random() < 0.8 else draw.choices([b"ab", b"c"])
            made.setdefault(b"".join(parts))
        ordered = [token for token in made if 1 < len(token) < 9]
        if draw.random() < 0.3:
            draw.shuffle(ordered)
        ranks = {token: rank for rank, token in enumerate([*tokens, *ordered])}
        path = write_ranks(tmp_path / "ranks.tiktoken", ranks)
        ours = read_tiktoken(path, pattern="gpt2")
        theirs = theirs_of(ranks, GPT2, {})
        assert [ours.encode(text) for text in texts] == [theirs.encode_ordinary(text) for text in texts]


PUBLISHED = {
    "gpt2": GPT2,
    "cl100k": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
        r"|\s+(?!\S)|\s"
    ),
    "o200k": "|".join(
        [
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
            r"\p{N}{1,3}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        ]
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_patterns_that_tiktoken_has_are_known_by_name(
    name: str, corpus: list[str], strings: list[str], tmp_path: Path
):
    ranks = {bytes([i]): i for i in range(256)}
    for token in sorted({text[i : i + 2] for text in corpus[-9:] + strings[:300] for i in range(len(text))}):
        if len(token.encode()) == 2:
            ranks[token.encode()] = len(ranks)
    theirs = theirs_of(ranks, PUBLISHED[name], {})
    written = theirs_of(ranks, expression_of(name), {})

    ours = read_tiktoken(write_ranks(tmp_path / "ranks.tiktoken", ranks), pattern=name)

    for text in strings:
        assert ours.encode(text) == theirs.encode_ordinary(text) == written.encode_ordinary(text)


def test_special_tokens_have_the_ids_given_or_the_ones_that_follow(tmp_path: Path):
    path = write_ranks(tmp_path / "bytes.tiktoken", {bytes([i]): i for i in range(256)})

    assert read_tiktoken(path, pattern="gpt2", special_tokens=["a", "b"]).special_tokens == {"a": 256, "b": 257}
    mixed = read_tiktoken(path, pattern="gpt2", special_tokens={"a": None, "b": 258, "c": None})
    assert mixed.special_tokens == {"a": 256, "<|unused_257|>": 257, "b": 258, "c": 259}


BYTES = [b64encode(bytes([i])) + b" %d" % i for i in range(256)]


@pytest.mark.parametrize(
    ("lines", "options", "line"),
    [
        ([], {}, "it contains no tokens"),
        ([b"", b"\r"], {}, "it contains no tokens"),
        (BYTES[:-1], {}, "1 of the 256 bytes have no token, among them 0xFF"),
        ([*BYTES[:-1], b"/w== "], {}, r"line 256 is '/w== '"),
        ([*BYTES, b"dGg= 256", b"dGhl"], {}, "line 258 is 'dGhl': a token's bytes in base64, a space and its rank"),
        ([*BYTES, b"dGg 256"], {}, "line 257, 'dGg 256', is truncated or altered: Incorrect padding"),
        ([*BYTES, b"dG*= 256"], {}, "line 257, .* is truncated or altered"),
        ([*BYTES, b"dGg= 2x"], {}, "line 257 is 'dGg= 2x'"),
        ([*BYTES, b"dGg= -1"], {}, "line 257 is 'dGg= -1'"),
        ([*BYTES, b"dGg= 1 2"], {}, "line 257 is"),
        ([*BYTES, b"dGg= " + b"9" * 10_000], {}, r"line 257 is 'dGg= 9+\.\.\.'"),
        ([*BYTES, b"\xff\xfe\0\x1b 256"], {}, "line 257"),
        ([*BYTES, b"dGg= 255"], {}, r"id 255 is given to b'\\xff' and to b'th'"),
        ([*BYTES, b"dGg= 256", b"dGg= 257"], {}, "line 258 gives b'th' a second rank, 257: it already has 256"),
        ([*BYTES, b"dGg= 257"], {}, "no token has id 256, and 1 ids below the largest, 257, are unused"),
        ([*BYTES, b"dGg= 999999999999999999"], {}, "no token has id 256"),
        ([*BYTES, b64encode(b"x" * 5000) + b" 256"], {}, "5,000 bytes long: at most 4,096"),
        (BYTES, {"special_tokens": {END: 255}}, "id 255 is given to"),
        (BYTES, {"special_tokens": {END: 10**12}}, "has id 1,000,000,000,000, but there are 257 tokens"),
        (BYTES, {"special_tokens": {"<|unused_256|>": 300}}, "has the name that is reserved for an unused id"),
        (BYTES, {"special_tokens": ["a", "a"]}, "'a' is given twice"),
        (BYTES, {"special_tokens": [""]}, "a special token is empty"),
        (BYTES, {"pattern": "("}, "is not a regular expression"),
    ],
)
def test_what_is_damaged_is_refused_in_a_line(lines: list[bytes], options: dict[str, Any], line: str, tmp_path: Path):
    path = tmp_path / "bad.tiktoken"
    path.write_bytes(b"\n".join(lines))

    with pytest.raises(NapkinError, match=line) as caught:
        read_tiktoken(path, **{"pattern": "gpt2", **options})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_shortened_file_gives_other_ids(tmp_path: Path):
    path = write_ranks(tmp_path / "cut.tiktoken", {bytes([255 - i]): i for i in range(256)})
    whole = path.read_bytes().rstrip()
    # The last id may lose a digit; what is left of it is another token's.
    for size in range(len(whole) - 40, len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(NapkinError, match=r"cut\.tiktoken"):
            read_tiktoken(path, pattern="gpt2")


@pytest.mark.parametrize(
    ("tokenizer", "line"),
    [
        (ByteTokenizer(), "of kind 'bytes' has no merges"),
        (
            BPETokenizer([(97, 97), (256, 97), (97, 256)]),
            "cannot represent this tokenizer exactly: line .* a second rank",
        ),
        (
            BPETokenizer([(97, 98), (98, 99), (97, 257)]),
            "cannot represent this tokenizer exactly: it would give other ids",
        ),
    ],
)
def test_what_ranks_cannot_say_is_not_written(tokenizer: Any, line: str, tmp_path: Path):
    with pytest.raises(NapkinError, match=line):
        write_tiktoken(tokenizer, tmp_path / "written.tiktoken")
    assert not list(tmp_path.iterdir())


def test_ids_in_another_order_than_the_merges_are_not_written(tmp_path: Path):
    from napkin.tokenizer.bpe import RemappedBPETokenizer

    tokenizer = RemappedBPETokenizer([(97, 98), (98, 99)], ids=[*range(256), 257, 256])
    with pytest.raises(NapkinError, match=r"order.*merges"):
        write_tiktoken(tokenizer, tmp_path / "written.tiktoken")
