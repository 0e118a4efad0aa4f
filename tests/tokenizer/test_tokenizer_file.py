"""Tokenizer files: what is saved is what is loaded, and nothing else is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest

from napkin.errors import CorruptFile, NapkinError
from napkin.tokenizer.base import Tokenizer
from napkin.tokenizer.bpe import BPETokenizer, ByteTokenizer, RemappedBPETokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.tokenizer_file import load_tokenizer, save_tokenizer
from napkin.tokenizer.word_level import CharacterTokenizer, WordTokenizer

TEXT = 'the "cat"\\ in\r\n the\u2028hat 你好 🌍 \x00'
KINDS: list[Tokenizer] = [
    train_bpe([TEXT], 262),
    BPETokenizer([(97, 97)], pattern="[a-z]+"),
    ByteTokenizer(["<é>"]),
    CharacterTokenizer.train([TEXT], ["<end>"]),
    WordTokenizer.train([TEXT], 9, ["<end>"]),
    RemappedBPETokenizer([(97, 97)], ["<s>"], ids=range(258, -1, -1), unmerged=[b"\xe4\xbd"], whole=True),
]

every_kind = pytest.mark.parametrize("tokenizer", KINDS, ids=lambda tokenizer: tokenizer.kind)


@every_kind
def test_a_loaded_tokenizer_is_the_one_that_was_saved(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(tokenizer, path)

    loaded = load_tokenizer(path)

    assert type(loaded) is type(tokenizer)
    assert loaded.to_dict() == tokenizer.to_dict() == json.loads(path.read_text("utf-8"))
    assert loaded.vocabulary == tokenizer.vocabulary
    assert loaded.special_tokens == tokenizer.special_tokens
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)


def test_a_file_has_a_line_a_merge(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    BPETokenizer([(116, 104), (256, 101)], ["<end>"]).save(path)

    lines = path.read_text("utf-8").splitlines()

    assert lines[:-2] == [
        *["{", '"format": "napkin-tokenizer",', '"version": 1,', '"kind": "bpe",', '"pattern": "gpt2",'],
        '"unicode": "16.0",',
        *['"special_tokens": [', '  "<end>"', "],", '"merges": [', "  [116, 104],", "  [256, 101]", "],"],
    ]


def test_an_existing_file_is_kept_unless_told_otherwise(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_text("mine")

    with pytest.raises(NapkinError, match=r"tokenizer\.json"):
        ByteTokenizer().save(path)
    assert path.read_text() == "mine"

    save_tokenizer(ByteTokenizer(), path, overwrite=True)
    assert load_tokenizer(path).fingerprint == ByteTokenizer().fingerprint
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.sampled(every=2)
@every_kind
def test_no_changed_byte_goes_unnoticed(tokenizer: Tokenizer, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    whole = path.read_bytes()

    # Of the longest file, which is mostly a list of numbers, a sample of the bytes.
    for i in range(0, len(whole), 1 + len(whole) // 1000):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(CorruptFile, match=r"tokenizer\.json"):
            load_tokenizer(path)


def test_no_shortened_file_is_loaded(tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    KINDS[0].save(path)
    whole = path.read_bytes().rstrip()

    for size_bytes in range(len(whole)):
        path.write_bytes(whole[:size_bytes])
        with pytest.raises(CorruptFile, match=r"tokenizer\.json.*intact tokenizer"):
            load_tokenizer(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "format is 'other'"),
        ({"version": 2}, "version 2, this napkin reads 1"),
        ({"version": True}, "got `bool`"),
        ({"kind": "syllables"}, "'syllables'"),
        ({"kind": "words"}, "unknown field `merges`"),
        ({"ids": list(range(259))}, "of the fields `ids`, `unmerged` and `whole`"),
        ({"ids": list(range(258)), "unmerged": [], "whole": False}, "258 ids are given for 259 tokens"),
        ({"ids": [*range(258), 0], "unmerged": [], "whole": False}, "id 0 is given to two tokens"),
        ({"ids": [*range(258), 259], "unmerged": [], "whole": False}, "id 259 is outside 0 to 258"),
        ({"ids": [*range(258), -1], "unmerged": [], "whole": False}, "id -1 is outside"),
        ({"ids": list(range(260)), "unmerged": ["xy"], "whole": False}, "'xy' is not bytes in hexadecimal"),
        ({"ids": list(range(260)), "unmerged": ["6161"], "whole": False}, "is also a byte, .*: remove it"),
        ({"ids": list(range(260)), "unmerged": [""], "whole": False}, "unmerged token is empty"),
        ({"kind": "bytes"}, "unknown field"),
        ({"comment": ""}, "unknown field `comment`"),
        ({"pattern": "("}, "not a regular expression"),
        ({"pattern": "whole"}, "its fingerprint is"),
        ({"special_tokens": ["<b>"]}, "its fingerprint is"),
        ({"special_tokens": ["<a>", "<a>"]}, "given twice"),
        ({"merges": [[97, 98]]}, "its fingerprint is"),
        ({"merges": [[97, 98], [97, 98]]}, "given twice"),
        ({"merges": [[97, 256]]}, "joins ids 97 and 256"),
        ({"merges": [[97, True]]}, "got `bool`"),
        ({"merges": [[97, 98, 99]]}, "length 2"),
        ({"fingerprint": "0" * 64}, "its fingerprint is 0000"),
    ],
)
def test_an_altered_file_is_refused_with_the_reason(change: dict[str, Any], message: str, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    document = BPETokenizer([(97, 97), (256, 97)], ["<a>"]).to_dict() | change
    path.write_text(json.dumps(document))

    with pytest.raises(CorruptFile, match=message) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[]", b"null", b"[" * 10**5, b'{"format":' * 10**5])
def test_what_is_no_tokenizer_file_at_all_is_refused(content: bytes, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)

    with pytest.raises(CorruptFile, match=r"tokenizer\.json"):
        load_tokenizer(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(NapkinError, match=r"missing\.json"):
        load_tokenizer(tmp_path / "missing.json")
