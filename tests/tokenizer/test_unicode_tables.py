"""Character classes are the project's own: the same whichever `regex` is installed, and those of other libraries."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import regex
import tokenizers

from napkin.errors import CorruptFile, NapkinError
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.bpe_training import train_bpe
from napkin.tokenizer.interchange.huggingface_fields import expression_of
from napkin.tokenizer.numba.character_classes import KIND, LETTER, NUMBER, SPACE, character_classes
from napkin.tokenizer.pre_tokenization import PreTokenizer
from napkin.tokenizer.tokenizer_file import load_tokenizer
from napkin.tokenizer.unicode_tables import generate, tables
from napkin.tokenizer.word_level import WordTokenizer

PATTERNS = ["gpt2", "cl100k", "o200k"]
# Letters since Unicode 17 or 18.
NEW_LETTERS = "\u05c8\u0cdc\U000326a7"
EVERYTHING = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]


def pieces_of_tokenizers(expression: str, text: str) -> list[str]:
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


def check_pieces(pattern: str, characters: Iterable[str]) -> None:
    text = "".join(f"a{c}b {c}{c}A1{c}'s!{c} \n{c}\u00e9" for c in characters)
    assert list(PreTokenizer(pattern).split(text)) == pieces_of_tokenizers(expression_of(pattern), text)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_pieces_at_the_ends_of_every_range_are_those_of_tokenizers(pattern: str) -> None:
    ranges = [each for version in tables.VERSIONS for each in tables.ranges(version)]
    edges = {i for first, last, _ in ranges for i in (first, last, last + 1)}
    chosen = sorted(i for i in edges if i < 0x110000 and not 0xD800 <= i < 0xE000)
    check_pieces(pattern, [*NEW_LETTERS, *map(chr, chosen[::3])])


@pytest.mark.torture
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pieces_at_every_code_point_are_those_of_tokenizers(pattern: str) -> None:
    for start in range(0, len(EVERYTHING), 2**12):
        check_pieces(pattern, EVERYTHING[start : start + 2**12])


@pytest.mark.torture
@pytest.mark.parametrize("matches", [generate.by_tiktoken, generate.by_tokenizers])
def test_the_table_of_imported_tokenizers_is_that_of_the_library(matches: generate.Matches) -> None:
    path = Path(tables.__file__).with_name(f"{tables.DEFAULT_VERSION}.txt")
    assert path.read_text().splitlines() == generate.ranges_of(generate.categories_of(matches))


@pytest.mark.parametrize("version", tables.VERSIONS)
def test_the_plain_patterns_and_the_compiled_table_have_the_same_classes(version: str) -> None:
    classes = character_classes(version)
    for pattern, kind in ((r"\p{L}", LETTER), (r"\p{N}", NUMBER), (r"\s", SPACE)):
        # Between matches are the gaps, so each matched character is a piece of its own, and so is each run of others.
        text = "".join(EVERYTHING)
        seen = PreTokenizer(pattern, version)._as_seen(text)
        found = np.zeros(0x110000, bool)
        places = [ord(text[match.start()]) for match in regex.finditer(pattern, seen)]
        found[places] = True
        assert (found == (classes & KIND == kind)).all()


def test_a_library_with_other_categories_does_not_change_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"a{c}b {c}1" for c in [*NEW_LETTERS, "é", "你"])
    assert tables.VERSIONS == ("16.0", "18.0")
    assert list(PreTokenizer("gpt2", "16.0").split(text)) != list(PreTokenizer("gpt2", "18.0").split(text))
    monkeypatch.setattr(tables, "regex", _Older())
    tables.stand_ins.cache_clear()
    try:
        assert tables.stand_ins("18.0") is not None
        assert tables.stand_ins("16.0") is not None
    finally:
        tables.stand_ins.cache_clear()


class _Older:
    """`regex` to which the first letters of Greek are not assigned."""

    def findall(self, pattern: str, text: str) -> list[str]:
        unknown = "αβγ"
        found = regex.findall(pattern, text)
        if pattern.startswith(r"\P"):
            return [*found, *(c for c in unknown if c in text and pattern != r"\P{Cn}+")]
        return [c for c in found if c not in unknown]


def test_a_saved_tokenizer_names_its_classes_and_is_read_by_them(tmp_path: Path) -> None:
    for version in tables.VERSIONS:
        for tokenizer in (
            train_bpe(["the cat the hat"], 260, unicode_version=version),
            WordTokenizer(["a"], unicode_version=version),
        ):
            path = tmp_path / f"{tokenizer.kind}-{version}.json"
            tokenizer.save(path)
            assert json.loads(path.read_text())["unicode"] == version
            read = load_tokenizer(path)
            assert isinstance(read, BPETokenizer | WordTokenizer)
            assert (read.unicode_version, read.fingerprint) == (version, tokenizer.fingerprint)


def test_a_file_without_a_version_keeps_its_fingerprint_and_is_read_by_the_one_it_was_made_with(tmp_path: Path) -> None:
    old = BPETokenizer([(116, 104)], ["<end>"], unicode_version=None)
    old.save(tmp_path / "old.json")
    assert "unicode" not in json.loads((tmp_path / "old.json").read_text())
    read = load_tokenizer(tmp_path / "old.json")
    assert isinstance(read, BPETokenizer)
    assert (read.unicode_version, read.fingerprint) == ("18.0", old.fingerprint)
    # As written before versions were named.
    assert old.fingerprint == "ad2b5269a424c68a2881d00699db5990e075bf254e3d1ff4140faa4d48369f19"


def test_a_version_without_a_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match=r"Unicode '9.0'.*choose.*16.0, 18.0"):
        BPETokenizer([], unicode_version="9.0")
    path = tmp_path / "tokenizer.json"
    BPETokenizer([]).save(path)
    path.write_text(path.read_text().replace('"16.0"', '"19.0"'))
    with pytest.raises(CorruptFile, match=r"19\.0"):
        load_tokenizer(path)


def test_a_long_text_has_the_ids_of_the_table_too() -> None:
    text = "".join(f"a{c}b {c}1 " for c in NEW_LETTERS) * 200_000
    for version in tables.VERSIONS:
        tokenizer = BPETokenizer([(116, 104), (0xCC, 0x9C)], unicode_version=version)
        pieces = PreTokenizer("gpt2", version).split(text[:4000])
        plain = [i for piece in pieces for i in tokenizer.encode(piece)]
        assert tokenizer.encode_to_numpy(text)[: len(plain) - 50].tolist() == plain[:-50]
