"""tokenizer.json, against Hugging Face's own library."""

import json
import random
import sys
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from napkin.errors import NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer, ByteTokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.interchange.assembly import to_characters
from napkin.tokenizer.interchange.huggingface import read_huggingface, write_huggingface
from napkin.tokenizer.pre_tokenization import PreTokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer
from tokenizer.interchange.conftest import END, SPECIAL


def written(tokenizer: Tokenizer, folder: Path) -> tokenizers.Tokenizer:
    write_huggingface(tokenizer, folder / "written.json")
    return tokenizers.Tokenizer.from_file(str(folder / "written.json"))


def read(document: Any, folder: Path, **options: Any) -> Tokenizer:
    path = folder / "read.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return read_huggingface(path, **options)


@pytest.mark.sampled(every=3)
def test_what_the_library_trained_gives_its_ids(theirs: tokenizers.Tokenizer, strings: list[str], tmp_path: Path):
    ours = read(theirs.to_str(), tmp_path)

    assert ours.vocab_size == theirs.get_vocab_size()
    for text in strings:
        ids = theirs.encode(text).ids
        assert ours.encode(text, allowed_special="all") == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False) == text
    assert ours.encode_to_numpy(strings[0]).tolist() == ours.encode(strings[0])


def test_what_napkin_trained_gives_napkins_ids_there(napkins: BPETokenizer, strings: list[str], tmp_path: Path):
    theirs = written(napkins, tmp_path)

    assert theirs.get_vocab_size() == napkins.vocab_size
    for text in strings:
        assert theirs.encode(text).ids == napkins.encode(text, allowed_special="all")


@pytest.mark.sampled(every=4)
def test_writing_undoes_reading_and_reading_writing(
    theirs: tokenizers.Tokenizer, napkins: BPETokenizer, strings: list[str], tmp_path: Path
):
    ours = read(theirs.to_str(), tmp_path)
    again = written(ours, tmp_path)

    assert read_huggingface(tmp_path / "written.json").fingerprint == ours.fingerprint
    assert all(again.encode(text).ids == theirs.encode(text).ids for text in strings[::5])
    write_huggingface(napkins, tmp_path / "napkins.json")
    assert read_huggingface(tmp_path / "napkins.json").fingerprint == napkins.fingerprint


def test_a_tokenizer_read_is_kept_in_napkins_own_file(theirs: tokenizers.Tokenizer, strings: list[str], tmp_path: Path):
    ours = read(theirs.to_str(), tmp_path)
    ours.save(tmp_path / "napkin.json")
    loaded = load_tokenizer(tmp_path / "napkin.json")

    assert loaded.fingerprint == ours.fingerprint
    assert loaded.encode_batch(strings[::5]) == ours.encode_batch(strings[::5])


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("pattern", ["gpt2", "gpt4", "cl100k", "o200k", "qwen2"])
def test_every_character_is_cut_alike(pattern: str, tmp_path: Path):
    # Characters that are newer than this edition of Unicode may be of another class in one of the libraries; of those
    # that are in no case and for private use, tens of thousands, a sample does.
    classes = ((chr(i), unicodedata.ucd_3_2_0.category(chr(i))) for i in range(sys.maxunicode + 1))
    many = {"Lo": 40, "Co": 1000}
    known = [c for c, category in classes if category not in ("Cn", "Cs") and ord(c) % many.get(category, 1) == 0]
    theirs = written(BPETokenizer([], pattern=pattern), tmp_path).pre_tokenizer
    ours = PreTokenizer(pattern)
    for start in range(0, len(known), 100):
        text = "".join(f"a{each}1{each} {each}{each}'{each}s\n" for each in known[start : start + 100])
        pieces = [to_characters(piece.encode()) for piece in ours.split(text)]
        assert [piece for piece, _ in theirs.pre_tokenize_str(text)] == pieces
    assert len(known) > 10_000


def test_a_text_without_pre_tokenization_is_one_piece(corpus: list[str], tmp_path: Path):
    ours = train_bpe(corpus[-5:], 400, [END], "whole")
    theirs = written(ours, tmp_path)

    assert read_huggingface(tmp_path / "written.json").fingerprint == ours.fingerprint
    for text in ["a b\nc", corpus[-1], SPECIAL[0]]:
        assert theirs.encode(text).ids == ours.encode(text, allowed_special="all")


def test_all_ways_to_split_a_token_are_one_merge(theirs: tokenizers.Tokenizer, strings: list[str], tmp_path: Path):
    """As Llama 3 is converted: each split of a token in two is a merge, and a whole pre-token needs none."""
    document = json.loads(theirs.to_str())
    vocab = document["model"]["vocab"]
    merges = [
        [token[:cut], token[cut:]]
        for token in vocab
        if token not in SPECIAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    document["model"]["merges"] = sorted(merges, key=lambda pair: vocab["".join(pair)])
    end = len(vocab)
    for i, token in enumerate(["Ġunmade", "unmadetoo", "ä½", to_characters("日本".encode())]):
        vocab[token] = end + i
    for whole in (True, False):
        document["model"]["ignore_merges"] = whole
        other = tokenizers.Tokenizer.from_str(json.dumps(document))
        ours = read(document, tmp_path)
        for text in [*strings[::6], "unmade unmade unmadetoo", "日本 日本語"]:
            assert ours.encode(text, allowed_special="all") == other.encode(text).ids
        assert (end + 1 in ours.encode("unmadetoo")) is whole
        write_huggingface(ours, tmp_path / f"{whole}.json")
        assert read_huggingface(tmp_path / f"{whole}.json").fingerprint == ours.fingerprint


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("whole", [False, True])
def test_any_list_of_merges_gives_the_ids_of_the_library(whole: bool, tmp_path: Path):
    """Merges in any order, of tokens that others make later, by several ways, or not at all."""
    draw = random.Random(whole)
    texts = ["".join(draw.choices("abc", k=draw.randint(1, 12))) for _ in range(200)]
    for _ in range(60):
        tokens, merges = list("abc"), []
        for _ in range(draw.randint(1, 14)):
            pair = draw.choice(tokens), draw.choice(tokens)
            if len("".join(pair)) < 8 and pair not in merges:
                merges.append(pair)
                tokens.append("".join(pair))
        if draw.random() < 0.5:
            draw.shuffle(merges)
        tokens += ["".join(draw.choices("abc", k=3)) for _ in range(2)]
        ordinary = dict.fromkeys([*tokenizers.pre_tokenizers.ByteLevel.alphabet(), *tokens])
        document = gpt2_like({token: i for i, token in enumerate(ordinary)}, merges)
        document["model"]["ignore_merges"] = whole
        ours = read(document, tmp_path)
        theirs = tokenizers.Tokenizer.from_str(json.dumps(document))
        assert [ours.encode(text) for text in texts] == [theirs.encode(text).ids for text in texts]
        write_huggingface(ours, tmp_path / "written.json", overwrite=True)
        assert read_huggingface(tmp_path / "written.json").fingerprint == ours.fingerprint


def gpt2_like(vocab: dict[str, int], merges: list[Any], **fields: Any) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": merges}
    return {"added_tokens": [], "pre_tokenizer": byte_level, "decoder": byte_level, "model": model, **fields}


BYTES = {character: i for i, character in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
SMALL = gpt2_like({**BYTES, "th": 256, "the": 257, END: 258}, ["t h", "th e"])


def changed(**changes: Any) -> dict[str, Any]:
    """The small file with some fields, or fields of its model, changed."""
    model = {name.removeprefix("model_"): value for name, value in changes.items() if name.startswith("model_")}
    fields = {name: value for name, value in changes.items() if not name.startswith("model_")}
    return {**SMALL, "model": {**SMALL["model"], **model}, **fields}


def added(content: str, i: int, **flags: Any) -> dict[str, Any]:
    none = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": i, "content": content, "special": True, **none, **flags}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def normalizers(*types: str) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [{"type": each} for each in types]}


def split(pattern: str = r"\s+|\S+", behavior: str = "Isolated", *, invert: bool = False) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
PUNCTUATION = {"type": "Punctuation", "behavior": "Isolated"}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [259], "tokens": ["<s>"]}},
}


def test_a_file_without_what_may_be_missing_is_read(tmp_path: Path):
    document = changed(added_tokens=[added(END, 258), added("<s>", 259, special=False)], normalizer=None)
    del document["model"]["type"]

    ours = read(document, tmp_path, special_tokens=[END, "<|more|>"])

    assert ours.special_tokens == {END: 258, "<s>": 259, "<|more|>": 260}
    assert ours.encode("the<s>", allowed_special="all") == [257, 259]


@pytest.mark.sampled(every=10)
@pytest.mark.parametrize(
    "steps",
    [
        [
            split(r"\p{N}{1,3}"),
            split("[一-龥\u3040-ゟ゠-ヿ]+"),
            split(r"[!-/:-~][A-Za-z]+|[^\r\n\p{L}]?\p{L}+|\s+(?!\S)|\s+"),
        ],
        [{"type": "Digits", "individual_digits": True}],
        [{"type": "Digits", "individual_digits": False}, PUNCTUATION],
        [PUNCTUATION | {"behavior": "Contiguous"}, split(r"\s+(?!\S)|\s+")],
        [split(r"[&|~^$]+|[a|b]"), split(r"\p{Lu}")],
    ],
    ids=["deepseek", "digits", "numbers", "runs of punctuation", "signs"],
)
@pytest.mark.parametrize("use_regex", [False, True])
def test_pieces_are_split_again_as_in_the_library(
    steps: list[dict[str, Any]], use_regex: bool, strings: list[str], tmp_path: Path
):
    # Every pair of bytes that stands in the texts is a token: the ids tell where they were split.
    pairs = sorted({pair for text in strings for pair in pairwise(to_characters(text.encode()))})
    vocab = BYTES | {first + second: 256 + i for i, (first, second) in enumerate(pairs)}
    last = {**BYTE_LEVEL, "trim_offsets": True, "use_regex": use_regex}
    document = gpt2_like(vocab, list(map(" ".join, pairs)), pre_tokenizer=sequence(*steps, last))
    theirs = tokenizers.Tokenizer.from_str(json.dumps(document))

    ours = read(document, tmp_path)

    assert [ours.encode(text) for text in strings] == [theirs.encode(text).ids for text in strings]
    write_huggingface(ours, tmp_path / "written.json")
    assert read_huggingface(tmp_path / "written.json").fingerprint == ours.fingerprint
    ours.save(tmp_path / "ours.json")
    assert load_tokenizer(tmp_path / "ours.json").encode(strings[0]) == ours.encode(strings[0])


def test_added_tokens_that_are_not_special_may_be_said(tmp_path: Path):
    document = changed(added_tokens=[added(END, 258), added("<think>", 259, special=False)])

    ours = read(document, tmp_path)

    assert ours.text_tokens == {"<think>"}
    write_huggingface(ours, tmp_path / "written.json")
    written = json.loads((tmp_path / "written.json").read_bytes())["added_tokens"]
    assert {each["content"]: each["special"] for each in written} == {END: True, "<think>": False}
    ours.save(tmp_path / "ours.json")
    for again in (read_huggingface(tmp_path / "written.json"), load_tokenizer(tmp_path / "ours.json")):
        assert again.text_tokens == {"<think>"}
        assert again.fingerprint == ours.fingerprint
    assert (
        ours.fingerprint != read(changed(added_tokens=[added(END, 258), added("<think>", 259)]), tmp_path).fingerprint
    )


def test_a_template_is_dropped_where_that_is_asked_for(tmp_path: Path):
    document = changed(added_tokens=[added("<s>", 259)], post_processor=TEMPLATE)
    theirs = tokenizers.Tokenizer.from_str(json.dumps(document))

    ours = read(document, tmp_path, drop_template=True)

    assert theirs.encode("the the").ids == [259, *ours.encode("the the")]
    assert theirs.encode("the the", add_special_tokens=False).ids == ours.encode("the the")


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[" * 10**5, "it is nested too deeply|not of the expected type|not JSON"),
        ('{"model":' * 10**5, "it is nested too deeply"),
        ('{"model": {"type": "BPE", "x": ' + "[" * 10**5, "it is nested too deeply"),
        ("{}", "missing required field `model`"),
        ('{"model": {"type": "WordPiece"}}', "its model is of type 'WordPiece': only BPE is supported"),
        ('{"model": {"type": "Unigram", "vocab": []}}', "its model is of type 'Unigram'"),
        ('{"model": {"type": "BPE"}}', "missing required field `vocab`"),
        (changed(model_vocab={"a": "b"}), "Expected `int`, got `str`"),
        (changed(model_vocab={**BYTES, "th": 256, "the": 10**30}), "no token has id 257"),
        (changed(model_merges=[["a"]]), "length 2"),
        (changed(model_merges=["t h e"]), "merge 0 is 't h e': two tokens separated by one space"),
        (changed(model_merges=["th"]), "merge 0 is 'th': two tokens separated by one space"),
        (changed(model_merges=["t h", "q x"]), "merge 1 of 'q x' needs 'qx', which is not in the vocabulary"),
        (changed(model_merges=["t h", "th zz"]), "merge 1 of 'th zz' needs 'zz', which is not"),
        (changed(model_merges=["t h", "t h"]), "merge 1, of 't' and 'h', repeats merge 0"),
        (changed(model_vocab={**BYTES, "th": 256, "the": 258}), "no token has id 257, and 1 ids below the largest"),
        (changed(model_vocab={**BYTES, "th": 256, "the": 256}), "id 256 is given to b'th' and to b'the'"),
        (changed(model_vocab={**BYTES, "th": 256, "the": -1}), "token b'the' has id -1"),
        (changed(model_vocab={**BYTES, "th": 256, "the": 10**12}), r"no token has id 257, and 999,999,999,743 ids"),
        (changed(model_vocab={"t": 0, "h": 1, "e": 2, "th": 3, "the": 4}), "253 of the 256 bytes have no token"),
        (changed(model_vocab={**BYTES, "th": 256, "the": 257, "": 258}), "the token of id 258 is empty"),
        (changed(model_vocab={**BYTES, "th": 256, "the": 257, "a b": 258}), "character that represents no byte"),
        (changed(model_vocab={**BYTES, "th": 256, "the": 257, "x" * 5000: 258}), "5,000 bytes long"),
        (changed(normalizer={"type": "NFKC"}), "its normalizer is 'NFKC', which napkin's BPE does not support"),
        (changed(normalizer=normalizers("NFC", "Lowercase")), "its normalizer is 'Sequence'"),
        (
            changed(normalizer=normalizers("NFC"), added_tokens=[added("<s>", 259, normalized=True)]),
            "'<s>' is looked for in normalized text",
        ),
        (changed(truncation={"max_length": 512}), "its truncation is 512"),
        (changed(padding={"strategy": "BatchLongest"}), "its padding is 'on'"),
        (changed(decoder={"type": "Metaspace"}), "its decoder is 'Metaspace'"),
        (changed(model_dropout=0.1), "its model.dropout is 0.1"),
        (changed(model_continuing_subword_prefix="##"), "its model.continuing_subword_prefix is '##'"),
        (changed(model_end_of_word_suffix="</w>"), "its model.end_of_word_suffix is '</w>'"),
        (changed(post_processor=TEMPLATE), "'TemplateProcessing' adds '<s>' to every text, .* use --drop-template"),
        (
            changed(post_processor={"type": "Sequence", "processors": [BYTE_LEVEL, TEMPLATE]}),
            "'TemplateProcessing' adds '<s>' to every text",
        ),
        (changed(post_processor={"type": "BertProcessing", "sep": ["s", 1]}), "'BertProcessing' adds tokens to every"),
        (changed(pre_tokenizer=None), "its pre_tokenizer is missing: only ByteLevel"),
        (changed(pre_tokenizer={"type": "Whitespace"}), "its pre_tokenizer is Whitespace"),
        (changed(pre_tokenizer=sequence({"type": "Whitespace"}, BYTE_LEVEL)), "has Whitespace before ByteLevel"),
        (changed(pre_tokenizer=sequence(BYTE_LEVEL, split())), "its pre_tokenizer is ByteLevel and Split"),
        (changed(pre_tokenizer=sequence(split("a&&b"), split("[a&&b]"), BYTE_LEVEL)), r"has '\[a&&b\]' at character 0"),
        (changed(pre_tokenizer=sequence(PUNCTUATION | {"behavior": "Removed"}, BYTE_LEVEL)), "Punctuation is Removed"),
        (changed(pre_tokenizer={"type": "ByteLevel"}), "add_prefix_space, which inserts a space before every text"),
        (changed(pre_tokenizer=sequence(split(behavior="Removed"), BYTE_LEVEL)), "Split is Removed: only Isolated"),
        (changed(pre_tokenizer=sequence(split(invert=True), BYTE_LEVEL)), "Split is Isolated, inverted"),
        (changed(pre_tokenizer=sequence(split(r"\w+"), BYTE_LEVEL)), r"has '\\\\w\+' at character 0"),
        (changed(pre_tokenizer=sequence(split(r"a{1,3}+"), BYTE_LEVEL)), r"has '\{1,3\}\+' at character 1"),
        (changed(pre_tokenizer=sequence(split("a$"), BYTE_LEVEL)), r"has '\$' at character 1"),
        (changed(pre_tokenizer=sequence(split("(a"), BYTE_LEVEL)), "is not a regular expression"),
        (changed(added_tokens=[added(END, 258), added(END, 259)]), "'<|endoftext|>' is given twice"),
        (changed(added_tokens=[added(END, 300)]), r"has id 300, but the library would give it 258"),
        (changed(added_tokens=[added("<s>", 300)]), "has id 300, but the library would give it 259"),
        (changed(added_tokens=[added("the", 257)]), "merge 1 of 'th e' needs 'the', which is not in the vocabulary"),
        (changed(added_tokens=[added("<s>", 259, lstrip=True)]), "'<s>' has lstrip: napkin matches it anywhere"),
        (changed(added_tokens=[added("<s>", 259, single_word=True)]), "'<s>' has single_word"),
        (changed(added_tokens=[added("ab", 259), added("bc", 260, normalized=True)]), "'ab' and 'bc' can overlap"),
        (changed(added_tokens=[added("", 259)]), "a special token is empty"),
        (changed(added_tokens=[{"id": 259}]), "missing required field `content`"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "",
)
def test_what_is_damaged_or_not_exact_is_refused_in_a_line(document: Any, line: str, tmp_path: Path):
    with pytest.raises(NapkinError, match=line) as caught:
        read(document, tmp_path)
    assert str(tmp_path / "read.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [lambda data: data[:-40], lambda data: b"\xff\xfe" + data, lambda data: b"\0" * 50])
def test_bytes_that_are_no_json_are_refused(damage: Callable[[bytes], bytes], tmp_path: Path):
    path = tmp_path / "read.json"
    path.write_bytes(damage(json.dumps(SMALL).encode()))

    with pytest.raises(NapkinError, match="it is not JSON"):
        read_huggingface(path)


@pytest.mark.parametrize(
    ("tokenizer", "line"),
    [
        (ByteTokenizer(), "of kind 'bytes' has no merges: use one of kind 'bpe'"),
        (BPETokenizer([], pattern=r"\w+|\W+"), r"has '\\\\w\+\|\\\\W\+' at character 0"),
        (BPETokenizer([(97, 97), (256, 97), (97, 256)]), "cannot represent this tokenizer exactly"),
        (BPETokenizer([(97, 98), (98, 99), (97, 257)]), "cannot represent this tokenizer exactly"),
        (BPETokenizer([], ["Ġ"]), "cannot represent this tokenizer exactly"),
    ],
)
def test_what_the_format_cannot_say_is_not_written(tokenizer: Tokenizer, line: str, tmp_path: Path):
    with pytest.raises(NapkinError, match=line):
        write_huggingface(tokenizer, tmp_path / "written.json")
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_kept(tmp_path: Path):
    (tmp_path / "written.json").write_text("mine")

    with pytest.raises(NapkinError, match=r"exists.*overwritten"):
        write_huggingface(BPETokenizer([]), tmp_path / "written.json")
    assert (tmp_path / "written.json").read_text() == "mine"
