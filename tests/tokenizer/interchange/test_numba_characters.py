"""The compiled encoder with vocabularies on characters: against plain merging of whole texts, and SentencePiece's."""

import copy
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napkin.tokenizer.character_bpe import SPACE, CharacterBPETokenizer, merge_by_heap, merge_by_scanning
from napkin.tokenizer.interchange.gguf import read_gguf_tokenizer
from peers import peer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = [*"ab \n", "é", "日", "🌍"]
LACKING = [*"cZ\t\0", "ß", "本", "👩", "\uffff", "\U0010ffff"]
TEXTS = (
    st.text(alphabet=LETTERS, max_size=80)
    | st.text(alphabet=[*LETTERS, *LACKING], max_size=200)
    | st.lists(st.sampled_from([*LETTERS, *LACKING, "a" * 70, " " * 300, "日" * 30, "ab" * 40, "本" * 22])).map("".join)
)


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, Any]:
    """The arguments of a tokenizer: tokens of a few characters, all pairs that make one of them, in an order that has
    no reason or is by token."""
    longer = draw(st.lists(st.text(alphabet=LETTERS, min_size=2, max_size=5), max_size=25, unique=True))
    tokens = [*BYTES, *LETTERS, *longer]
    ids = {token: i for i, token in enumerate(tokens) if i >= 256}
    pairs = [
        (ids[token[:cut]], ids[token[cut:]], i)
        for i, token in enumerate(longer)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    order = draw(st.permutations(pairs))
    if draw(st.booleans()):
        order = sorted(pairs, key=lambda pair: pair[2])
    elif draw(st.booleans()):
        # As where tokens have one score: by the lengths of their parts.
        order = sorted(pairs, key=lambda pair: -len(tokens[pair[0]]))
    return {
        "tokens": tokens,
        "merges": [pair[:2] for pair in order],
        "special_tokens": {},
        "byte_ids": range(256),
        "prefix": draw(st.sampled_from(["none", "always", "if_missing", "first_if_missing"])),
        "splits_spaces": draw(st.booleans()),
    }


def compiled(tokenizer: CharacterBPETokenizer, texts: Sequence[str], threads: int = 1) -> list[list[int]]:
    """Ids by the compiled core, whatever the sizes."""
    ids, counts = tokenizer._encode_compiled(texts, threads)
    ends = itertools.accumulate(counts.tolist(), initial=0)
    return [ids[start:end].tolist() for start, end in itertools.pairwise(ends)]


def merged(tokenizer: CharacterBPETokenizer, text: str, merge: Any = merge_by_scanning) -> list[int]:
    """Ids by merging a whole text, without pieces, but where each space begins one."""
    text = tokenizer._prefix_of(text, first=True) + text.replace(SPACE, " ")
    parts = [text]
    if tokenizer.splits_spaces:
        first, *others = text.split(" ")
        parts = [first, *(" " + part for part in others)]
    found: list[int] = []
    for part in parts:
        symbols: list[int] = []
        for character in part:
            i = tokenizer._id_of.get(character)
            symbols += [tokenizer.byte_ids[byte] for byte in character.encode()] if i is None else [i]
        found += merge(symbols, tokenizer._ranks, tokenizer._made)
    return found


@settings(max_examples=50)
@given(vocabularies(), st.lists(TEXTS, max_size=4))
def test_ids_are_those_of_merging_the_whole_text(arguments: dict[str, Any], texts: list[str]) -> None:
    tokenizer = CharacterBPETokenizer(**arguments)
    expected = [merged(tokenizer, text) for text in texts]
    assert compiled(tokenizer, texts) == expected
    assert [tokenizer.encode(text) for text in texts] == expected


def of_pairs(tokens: list[str], merges: list[tuple[str, str]]) -> CharacterBPETokenizer:
    all_tokens = [*BYTES, *tokens]
    ids = {token: 256 + i for i, token in enumerate(tokens)}
    return CharacterBPETokenizer(
        all_tokens, [(ids[a], ids[b]) for a, b in merges], {}, byte_ids=range(256), prefix="none"
    )


def test_pairs_of_one_token_may_stand_apart_in_the_list() -> None:
    # "aba" is made of "a" and "ba", as "ba" comes first; its other pair stands where it would come before "bb".
    tokens = ["a", "b", "aba", "ab", "ba", "bb", "abb"]
    merges = [("ab", "a"), ("b", "a"), ("b", "b"), ("a", "b"), ("a", "ba"), ("a", "bb")]
    tokenizer = of_pairs(tokens, merges)
    for length in range(1, 9):
        for letters in itertools.product("ab", repeat=length):
            text = "".join(letters)
            assert compiled(tokenizer, [text])[0] == merged(tokenizer, text), text


def test_a_vocabulary_that_merges_bytes_of_a_character_is_encoded_by_the_plain_form() -> None:
    byte = BYTES[0xC3]
    tokenizer = CharacterBPETokenizer([*BYTES, "a", byte + "a"], [(0xC3, 256)], {}, byte_ids=range(256), prefix="none")
    assert tokenizer._symbols is None
    assert tokenizer.encode_documents(["éa" * 5000])[1].tolist() == [3 * 5000]


@pytest.mark.parametrize("unit", ["a", " ", "\n", "ab", "=-", "日", "\x00", "ß", "🌍é"])
def test_long_runs_are_merged_as_the_plain_form_merges_them(unit: str) -> None:
    longer = {unit * n for n in (2, 3, 4, 8, 16, 32)}
    tokens = [*dict.fromkeys([*"ab \n=-", "日", "\x00", "🌍", "é", unit, *sorted(longer, key=len)])]
    halves = [(token[:cut], token[cut:]) for token in tokens for cut in range(1, len(token))]
    tokenizer = of_pairs(tokens, [pair for pair in halves if set(pair) <= set(tokens)])
    for length in (63, 64, 65, 255, 256, 257, 20_000):
        text = unit * length
        assert compiled(tokenizer, [text])[0] == merged(tokenizer, text, merge_by_heap), length


def test_a_tokenizer_gives_long_texts_to_the_core_and_the_same_ids_in_all_ways() -> None:
    tokens = [*"the ca", "th", "the", " the", "日"]
    tokenizer = of_pairs(tokens, [("t", "h"), ("th", "e"), (" ", "the")])
    text = "the cat the\u2581the 日本 \n" * 500
    expected = merged(tokenizer, text)
    short = merged(tokenizer, "the")
    tokenizer._encoder.encode(b"")

    for same in (tokenizer, copy.deepcopy(tokenizer)):
        assert same.encode(text) == expected
        assert same.encode_to_numpy(text, threads=2).tolist() == expected
        assert same.encode_batch([text, "", "the", text], threads=2) == [expected, [], short, expected]
        data = [part.encode() for part in (text, "the")]
        ids, counts = same.encode_utf8(b"".join(data), list(itertools.accumulate(map(len, data))), threads=2)
        assert (ids.tolist(), counts.tolist()) == (expected + short, [len(expected), len(short)])


def test_a_long_text_is_divided_among_threads_without_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(2)
    tokens = [*"the cansd\n", "th", "the", " the", "an", " an", "日日", "日"]
    tokenizer = of_pairs(tokens, [("t", "h"), ("th", "e"), (" ", "the"), ("a", "n"), (" ", "an"), ("日", "日")])
    text = "".join(draw.choices(["the", " the", " an", "sand", "\n", "日" * 70, "本"], k=5000))
    expected = merged(tokenizer, text, merge_by_heap)
    for size in (1, 100, 3_333):
        monkeypatch.setattr("napkin.tokenizer.numba.encoding._PIECE_BYTES", size)
        assert compiled(tokenizer, [text, "the", text], threads=2) == [expected, merged(tokenizer, "the"), expected]


SCRIPTS = "Größe Ελληνικά русский עברית हिन्दी 한국어 日本語 你好 🌍👩\u200d👧 é e\u0301 \u2581 \u00a0\x07\x1b\ufffd"


@pytest.mark.peers
def test_ids_are_those_of_sentencepiece(corpus: list[str], tmp_path: Path) -> None:
    """Of a model trained by the library, read as llama.cpp stores it."""
    sentencepiece = peer("sentencepiece")
    (tmp_path / "text").write_text("\n".join([*corpus, SCRIPTS]), "utf-8")
    options = {"byte_fallback": True, "remove_extra_whitespaces": False, "split_digits": True, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "model"),
        model_type="bpe",
        vocab_size=1500,
        character_coverage=0.999,
        normalization_rule_name="identity",
        allow_whitespace_only_pieces=True,
        **options,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "model.model"))
    numbers = range(theirs.vocab_size())
    kinds = [(theirs.is_unknown, 2), (theirs.is_control, 3), (theirs.is_byte, 6)]
    ours = read_gguf_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in numbers],
            "tokenizer.ggml.scores": [theirs.get_score(i) for i in numbers],
            "tokenizer.ggml.token_type": [next((kind for known, kind in kinds if known(i)), 1) for i in numbers],
        }
    )
    assert isinstance(ours, CharacterBPETokenizer)
    draw = random.Random(0)
    units = [*"the cat. \n\t<>12", SPACE, *SCRIPTS, " the", "    ", "\n\n", "a" * 70]
    texts = ["".join(draw.choices(units, k=draw.randint(0, 90))) for _ in range(3000)]
    texts += [*corpus, SCRIPTS, *(unit * 5000 for unit in units)]
    expected = [theirs.encode(text) for text in texts]
    assert compiled(ours, texts, threads=2) == expected
    assert ours.encode_batch(texts[:300]) == expected[:300]
