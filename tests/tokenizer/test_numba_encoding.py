"""The compiled encoder against the plain one and against tiktoken, at every code point, cut and thread count."""

import copy
import itertools
import random
import sys
import tracemalloc
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tiktoken import Encoding

from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.character_bpe import merge_symbols
from napkin.tokenizer.numba.encoding import Encoder
from napkin.tokenizer.pre_tokenization import PATTERNS, PreTokenizer
from napkin.tokenizer.text_input import find_split_before, split_into_pieces
from oracles.naive_bpe import lowest_rank_first, merges_in_any_order
from oracles.tiktoken_encodings import published_pattern, tiktoken_encoding

CUT = ["gpt2", "cl100k", "o200k"]
ALL = [*CUT, "gpt4", "qwen2", "whole"]
SAMPLE = (
    "the cat in the hat isn't THE rat's. " * 4
    + "naïve 你好 你好 🌍🌍 \n\n    indented\n\n12345 1234, don't; ΑΒΓ αβγ x=-1\t"
)
TRICKY = "'sdmtlvreST aé19½Ⅳ.,_-/\t\n\r\x1c\x85\u00a0\u3000\u0301你🌍ʰſKǅ"
TEXTS = (
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.text(alphabet=TRICKY, max_size=300)
    | st.lists(st.sampled_from([*TRICKY, "the", " the", "'ll", "  ", "\n\n", "a" * 70, "你" * 30, "1" * 20])).map(
        "".join
    )
)


def every_pair_of_bytes() -> list[tuple[int, int]]:
    """Merges that show where text was cut: any two bytes make a token, in an order that has no reason."""
    pairs = list(itertools.product(range(256), range(256)))
    random.Random(0).shuffle(pairs)
    return pairs


# Made when a test asks for them: each worker imports this file, and one runs it.
@cache
def trained() -> list[tuple[int, int]]:
    return train_bpe([SAMPLE], 420, ()).merges


@cache
def plain(pattern: str) -> BPETokenizer:
    return BPETokenizer(trained(), pattern=pattern)


@cache
def compiled(pattern: str) -> Encoder:
    return Encoder(trained(), pattern)


@cache
def witness(pattern: str) -> Encoding:
    return tiktoken_encoding(pattern, plain(pattern))


@cache
def pairs() -> BPETokenizer:
    return BPETokenizer(every_pair_of_bytes())


@cache
def pairs_compiled(pattern: str) -> Encoder:
    return Encoder(pairs().merges, pattern)


@cache
def pairs_witness(pattern: str) -> Encoding:
    return tiktoken_encoding(pattern, pairs())


def twin(tokenizer: BPETokenizer, text: str) -> list[int]:
    """Ids by the plain functions alone, whatever else the process has loaded."""
    pieces = PreTokenizer(tokenizer.pattern).split(text)
    merges = {pair: 256 + i for i, pair in enumerate(tokenizer.merges)}
    made = range(256 + len(merges))
    return [i for piece in pieces for i in merge_symbols(list(piece.encode()), merges, made)]


def check_all_patterns(text: str) -> None:
    data = text.encode()
    for pattern in ALL:
        assert compiled(pattern).encode(data)[0].tolist() == twin(plain(pattern), text), pattern
    for pattern in CUT:
        assert witness(pattern).encode_ordinary(text) == compiled(pattern).encode(data)[0].tolist(), pattern
        assert pairs_witness(pattern).encode_ordinary(text) == pairs_compiled(pattern).encode(data)[0].tolist(), pattern


@settings(max_examples=75)
@given(TEXTS)
@example("")
@example("x \n \n ")
@example("\u0301ABC'ſ!\u0301/\n/")
def test_ids_equal_those_of_the_plain_form_and_of_tiktoken(text: str):
    check_all_patterns(text)


@settings(max_examples=75)
@given(merges_in_any_order(), st.text(alphabet="abc", max_size=60))
@example([(257, 97), (97, 98)], "ab")
# Ranks far enough apart to be in two words of the set of ranks.
@example([(326, 97), *((0, i) for i in range(69)), (97, 98)], "ab")
def test_merges_in_any_order_are_applied_lowest_rank_first(merges: list[tuple[int, int]], text: str):
    # Pieces of up to 64 bytes and longer ones are merged by two functions.
    texts = [text, *((text * 200)[:size] for size in (64, 65, 200))]
    ids, counts = Encoder(merges, "whole").encode("".join(texts).encode(), list(itertools.accumulate(map(len, texts))))
    expected = [lowest_rank_first(each.encode(), merges) for each in texts]
    assert ids.tolist() == [i for each in expected for i in each]
    assert counts.tolist() == [len(each) for each in expected]


@pytest.mark.torture
def test_ids_of_a_hundred_thousand_texts_equal_those_of_the_plain_form_and_of_tiktoken():
    texts: set[str] = set()

    # A call an example would check more types than ids.
    @settings(max_examples=110_000, phases=[Phase.generate], database=None)
    @given(TEXTS)
    def collect(text: str):
        texts.add(text)

    collect()
    assert len(texts) > 100_000
    in_order = sorted(texts)
    for start in range(0, len(in_order), 5_000):
        some = in_order[start : start + 5_000]
        for pattern in ALL:
            ids = [twin(plain(pattern), text) for text in some]
            check_at_once(compiled(pattern), some, ids, pattern)
        for pattern in CUT:
            for encoder, expected in (compiled, witness), (pairs_compiled, pairs_witness):
                check_at_once(encoder(pattern), some, map(expected(pattern).encode_ordinary, some), pattern)


def in_contexts(character: str) -> list[str]:
    """A character alone and between letters, digits, blanks, signs, apostrophes and line ends."""
    around = ["", "a", "A", "1", " ", "!", "'", "'s", "\n", "\u00a0", "é", character]
    return [before + character + after for before in around for after in around]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("pattern", CUT)
def test_characters_at_the_ends_of_every_class_are_cut_as_tiktoken_cuts_them(pattern: str):
    # Where a class begins or ends a table would be wrong first; every eighth end, every eighth beginning.
    from napkin.tokenizer.numba.character_classes import character_classes
    from napkin.tokenizer.unicode_tables.tables import DEFAULT_VERSION

    edges = np.flatnonzero(np.diff(character_classes(DEFAULT_VERSION)))
    check_contexts(pattern, {*edges[::8].tolist(), *(edges[4::8] + 1).tolist(), *range(256)})


@pytest.mark.torture
@pytest.mark.parametrize("pattern", CUT)
def test_every_code_point_is_cut_as_tiktoken_cuts_it(pattern: str):
    for start in range(0, sys.maxunicode + 1, 2**12):
        check_contexts(pattern, range(start, start + 2**12))


def check_contexts(pattern: str, codes: Iterable[int]) -> None:
    characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    texts = [text for character in characters for text in in_contexts(character)]
    check_at_once(pairs_compiled(pattern), texts, map(pairs_witness(pattern).encode_ordinary, texts), pattern)


def check_at_once(encoder: Encoder, texts: Sequence[str], expected: Iterable[list[int]], what: str) -> None:
    data = [text.encode() for text in texts]
    ids, counts = encoder.encode(b"".join(data), list(itertools.accumulate(map(len, data))))
    found, end = ids.tolist(), 0
    for text, count, theirs in zip(texts, counts.tolist(), expected, strict=True):
        begin, end = end, end + count
        assert found[begin:end] == theirs, f"{text!r} in {what}"
    assert end == len(found)


@pytest.mark.parametrize("pattern", CUT)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_documents_that_end_at_any_byte_of_a_block_have_the_ids_they_have_alone(pattern: str, threads: int):
    draw = random.Random(1)
    texts = ["".join(draw.choices(TRICKY, k=k % 140)) for k in range(500)]
    data = [text.encode() for text in texts]

    ids, counts = pairs_compiled(pattern).encode(
        b"".join(data), list(itertools.accumulate(map(len, data))), dtype="uint32", threads=threads
    )

    expected = [pairs_witness(pattern).encode_ordinary(text) for text in texts]
    assert counts.tolist() == list(map(len, expected))
    assert ids.tolist() == [i for each in expected for i in each]


# What a block of 64 bytes decides by shifts and sums of masks: contractions, one symbol before a word or several, case,
# numbers, and runs of white space and line ends, also where only character by character is right.
DECIDED_IN_BLOCKS = [
    *("it's's", "don'tAbc", "IT'LLx", " 's", "\t's", "''s", "'ſa", "x'veB", "'lLa", "x!y", "!!y", " !y", "\t!y", "€y"),
    *("€€y", " €y", "\ty", "\n y", "aB", "ABc", "aéBÉ", "éÉ", "A你B", "你A", "1234567", "x1y12", "½12", "1½2345"),
    *(
        " \n  \n   y",
        "\t \r\n\n",
        "   \n",
        "      y",
        ";\n//x",
        ";\n\n  x",
        "!/\n/!b",
        "/\n/\n",
        "\u00a0x",
        "e\u0301X",
        "\x1c!",
    ),
]


@pytest.mark.parametrize("pattern", ["gpt2", "gpt4", "cl100k", "o200k", "qwen2"])
def test_cuts_at_every_byte_of_a_block_are_those_of_tiktoken(pattern: str):
    ranks = {token: i for i, token in enumerate(pairs().vocabulary)}
    published = PATTERNS[pattern] if pattern in ("gpt4", "qwen2") else published_pattern(pattern)
    peer = Encoding(pattern, pat_str=published, mergeable_ranks=ranks, special_tokens={})
    before, after = (
        "Some words, and-more words: 12 of(them) are here   to fill a block.",
        " and 64 bytes that follow, of words" * 3,
    )
    texts = [before[:k] + case + after for case in DECIDED_IN_BLOCKS for k in range(len(before))]
    texts += ["a" * k + case * 40 for case in DECIDED_IN_BLOCKS for k in range(3)]

    check_at_once(pairs_compiled(pattern), texts, map(peer.encode_ordinary, texts), pattern)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("pattern", ALL)
def test_the_ids_of_a_long_text_do_not_depend_on_threads_and_pieces(pattern: str, monkeypatch: pytest.MonkeyPatch):
    draw = random.Random(2)
    words = ["the", " cat", " hat\n", "don't", "  ", "\n\n", "x.\n", "你好", "\n \nA", "!?", "1234", " \u3000b", "'s"]
    text = "".join(draw.choices(words, k=20_000)).encode()
    whole = compiled(pattern).encode(text)[0].tolist()

    for size in (1, 100, 3_333):
        monkeypatch.setattr("napkin.tokenizer.numba.encoding._PIECE_BYTES", size)
        assert compiled(pattern).encode(text, threads=2)[0].tolist() == whole


@given(TEXTS, st.integers(1, 100))
def test_pieces_are_cut_only_where_every_pattern_ends_a_pre_token(text: str, size: int):
    data = text.encode()
    cuts = {piece.stop for piece in split_into_pieces(data, np.array([len(data)]), size, find_split_before)}

    for pattern in [*CUT, "gpt4"]:
        ends = itertools.accumulate(len(piece.encode()) for piece in PreTokenizer(pattern).split(text))
        assert cuts <= {len(data), *ends}
        parts = [data[a:b].decode() for a, b in itertools.pairwise([0, *sorted(cuts)])]
        assert [p for part in parts for p in PreTokenizer(pattern).split(part)] == list(
            PreTokenizer(pattern).split(text)
        )


@pytest.mark.parametrize("unit", ["a", " ", "\n", "ab", "=-", "你", "\x00"])
def test_long_pre_tokens_of_every_kind_are_merged_as_the_plain_form_merges_them(unit: str):
    merges = train_bpe([unit * 300, SAMPLE], 330, (), "whole").merges
    tokenizer = BPETokenizer(merges)

    for length in (63, 64, 65, 255, 256, 5_000):
        text = unit * length
        assert Encoder(merges, "gpt2").encode(text.encode())[0].tolist() == twin(tokenizer, text), length


@pytest.mark.parametrize("seed", range(20))
def test_merging_by_random_vocabularies_equals_the_plain_form(seed: int):
    draw = random.Random(seed)
    alphabet = draw.choice(["ab", "abc", "the cat", "é你a"])
    merges: list[tuple[int, int]] = []
    while len(merges) < draw.randint(1, 400):
        earlier = [*alphabet.encode(), *range(256, 256 + len(merges))]
        pair = draw.choice(earlier), draw.choice(earlier)
        if pair not in merges:
            merges.append(pair)
        if len(merges) > 12:
            break
    tokenizer, encoder = BPETokenizer(merges), Encoder(merges, "gpt2")
    for length in (1, 2, 7, 9, 10, 17, 30, 64, 65, 300):
        text = "".join(draw.choices(alphabet, k=length))
        assert encoder.encode(text.encode())[0].tolist() == twin(tokenizer, text)


def test_a_cache_too_small_for_the_text_is_emptied_and_changes_no_id():
    draw = random.Random(3)
    text = "".join(draw.choices("abcdefghij ", k=600_000)) + "".join(f" {i:0{i % 40 + 10}d}" for i in range(9_000))
    small, large = Encoder(trained(), "gpt2", cache_bytes=0), Encoder(trained(), "gpt2")

    assert small.encode(text.encode())[0].tolist() == large.encode(text.encode())[0].tolist()
    assert cache_bytes(small) < 2**22 < cache_bytes(large) < 2**26 + 2**22


def cache_bytes(encoder: Encoder) -> int:
    from napkin.tokenizer.numba import fields

    (workspace,) = encoder._idle
    return sum(workspace.array(field).nbytes for field in (fields.TABLE, fields.LONG_BYTES, fields.LONG_IDS))


def test_a_copy_of_an_encoder_has_tables_of_its_own_and_the_same_ids():
    encoder = Encoder(trained(), "gpt2")
    ids = encoder.encode(SAMPLE.encode())[0].tolist()
    twin_of_it = copy.deepcopy(encoder)
    del encoder

    assert twin_of_it.encode(SAMPLE.encode())[0].tolist() == ids


@pytest.mark.parametrize("pattern", ["gpt2", "o200k"])
def test_short_texts_have_the_same_ids_once_the_core_is_there(pattern: str):
    draw = random.Random(5)
    tokenizer, without_core = BPETokenizer(trained(), pattern=pattern), plain(pattern)
    # So many bytes of words that are all different that the table of pre-tokens is enlarged between short texts.
    texts = ["".join(draw.choices(TRICKY, k=draw.randrange(200))) for _ in range(300)]
    texts += [" ".join(str(draw.random()) for _ in range(50)) for _ in range(1_000)]
    tokenizer.encode_documents(["the core is loaded by a long text " * 100])
    tokenizer._encoder.encode(b"")

    for text in ["", "x", *texts]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert (
            ids == twin(without_core, text)
            if len(text) < 300
            else ids == tokenizer._encoder.encode(text.encode())[0].tolist()
        )


def test_lists_of_the_ids_of_short_texts_are_freed():
    encoder = Encoder(trained(), "gpt2")
    text = SAMPLE.encode()
    expected = encoder.encode(text)[0].tolist()
    assert encoder.encode_short(text) == expected
    tracemalloc.start()
    try:
        encoder.encode_short(text)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(2_000):
            encoder.encode_short(text)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    # Less than one byte for each list.
    assert after - before < 2_000
    assert encoder.encode_short(text) == expected


def test_a_tokenizer_gives_long_texts_to_the_core_and_the_same_ids_in_all_ways():
    tokenizer = BPETokenizer(trained(), ["<|end|>"])
    text = (SAMPLE + "<|end|>") * 200
    expected = twin(tokenizer, text)
    tokenizer._encoder.encode(b"")

    assert tokenizer.encode(text) == expected
    assert tokenizer.encode_to_numpy(text, threads=2).tolist() == expected
    assert tokenizer.encode_to_numpy(text).dtype == np.uint16
    assert tokenizer.encode_batch([text, "", "the", text]) == [expected, [], twin(tokenizer, "the"), expected]
    assert tokenizer.decode(tokenizer.encode(text, allowed_special="all")) == text
