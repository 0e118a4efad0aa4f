"""Repeated passages equal those that brute force finds, and the first of each stays."""

import random
from pathlib import Path

import pytest

from curation.deduplication.test_document_stages import decided
from napkin.curation import Dropped, Record
from napkin.curation.deduplication import passages
from napkin.curation.deduplication.passages import PassageFile, RepeatedPassages, without_spans, write_passages
from napkin.curation.deduplication.stages import DuplicateSubstrings
from napkin.errors import NapkinError


def brute_force(texts: list[bytes], n: int) -> list[list[bool]]:
    """For each byte whether it is in a window of n bytes that stands n or more bytes before."""
    first: dict[bytes, int] = {}
    found = []
    offset = 0
    for text in texts:
        marked = [False] * len(text)
        for place in range(len(text) - n + 1):
            window = text[place : place + n]
            if offset + place - first.setdefault(window, offset + place) >= n:
                marked[place : place + n] = [True] * n
        found.append(marked)
        offset += len(text)
    return found


def texts_with_copies(count: int, seed: int) -> list[str]:
    """Random letters, passages of texts before, runs of one letter, and short periods."""
    draw = random.Random(seed)
    texts: list[str] = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randrange(5)):
            kind = draw.randrange(4)
            if kind == 0 or not any(texts):
                parts.append("".join(draw.choices("abcdé界", k=draw.randrange(80))))
            elif kind == 1:
                parts.append(draw.choice("ab") * draw.randrange(100))
            elif kind == 2:
                parts.append("".join(draw.choices("ab", k=3)) * draw.randrange(30))
            else:
                source = draw.choice(texts)
                start = draw.randrange(len(source) + 1)
                parts.append(source[start : start + draw.randrange(120)])
        texts.append("".join(parts))
    return texts


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("shortest", [16, 33])
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("fullest", [0.7, 0.05])
def test_repeated_bytes_are_those_of_brute_force(
    shortest: int, seed: int, fullest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The emptier the table must be, the more parts the hashes are divided into.
    monkeypatch.setattr(passages, "_FULLEST", fullest)
    texts = texts_with_copies(150, seed)
    parts = [texts[:60], texts[60:61], [], texts[61:]]
    for number, part in enumerate(parts):
        write_passages(tmp_path / str(number), part, shortest)
    files = [PassageFile(tmp_path / str(number), shortest) for number in range(len(parts))]
    found = RepeatedPassages(files, shortest, tmp_path, 2**24)
    data = [text.encode() for text in texts]
    marked = [[False] * len(each) for each in data]
    for number, start in enumerate((0, 60, 61, 61)):
        for record, spans in found.of_records(number):
            for first, last in spans:
                marked[start + record][first:last] = [True] * (last - first)
    expected = brute_force(data, shortest)
    assert sum(map(sum, expected)) > 1000
    assert marked == expected


@pytest.mark.parametrize("seed", range(8))
def test_passages_with_a_common_middle_are_told_apart(seed: int, tmp_path: Path) -> None:
    """A middle that stands many times, close to itself too, with one of few beginnings and ends around it."""
    draw = random.Random(seed)
    n = 40
    middles, sides = (["".join(draw.choices("abcdefgh", k=k)) for _ in range(3)] for k in (26, 12))
    texts = ["".join(draw.choice(draw.choice([middles, sides])) for _ in range(draw.randrange(9))) for _ in range(300)]
    write_passages(tmp_path / "passages", texts, n)
    found = RepeatedPassages([PassageFile(tmp_path / "passages", n)], n, tmp_path, 2**24)
    data = [text.encode() for text in texts]
    marked = [[False] * len(each) for each in data]
    for record, spans in found.of_records(0):
        for first, last in spans:
            marked[record][first:last] = [True] * (last - first)
    assert marked == brute_force(data, n)


def test_characters_that_are_partly_repeated_stay_whole() -> None:
    data = "a界é界b".encode()
    for first in range(len(data) + 1):
        for last in range(first, len(data) + 1):
            rest = without_spans(data, [(first, last)]).decode()
            whole = [("a", 0, 1), ("界", 1, 4), ("é", 4, 6), ("界", 6, 9), ("b", 9, 10)]
            assert rest == "".join(c for c, begin, end in whole if not (first <= begin and end <= last))


def test_the_first_occurrence_stays_and_what_was_removed_is_in_the_trace(tmp_path: Path) -> None:
    draw = random.Random(4)
    passage, before, behind = ("".join(draw.choices("abcdefgh ", k=300)) for _ in range(3))
    records = [Record("a#0", passage), Record("a#1", before + passage + behind), Record("a#2", passage)]
    records.append(Record("a#3", passage[:199]))
    found = decided(DuplicateSubstrings(), [records[:2], records[2:]], tmp_path / "run")
    assert found["a#0"] == passage
    assert found["a#1"] == before + behind
    assert found["a#2"] == Dropped("only duplicate substrings", "300 bytes in 1 passages")
    assert found["a#3"] == passage[:199]


def test_the_result_does_not_depend_on_memory(tmp_path: Path) -> None:
    draw = random.Random(5)
    pieces = ["".join(draw.choices("abcdefgh", k=400)) for _ in range(500)]
    records = [Record(f"a#{n}", "".join(draw.choices(pieces, k=5))) for n in range(700)]
    stage = DuplicateSubstrings(shortest=100)
    little = decided(stage, [records[:300], records[300:]], tmp_path / "little", memory=2**23)
    assert little == decided(stage, [records], tmp_path / "much", memory=2**30)
    assert sum(isinstance(each, Dropped) for each in little.values()) > 100


def test_damaged_files_and_wrong_options_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "passages"
    write_passages(path, texts_with_copies(20, 6), 16)
    whole = path.read_bytes()
    with pytest.raises(NapkinError, match="made for passages of 16"):
        PassageFile(path, 20)
    for size in (0, 8, len(whole) - 8, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(NapkinError, match="make it again"):
            PassageFile(path, 16)
    path.write_bytes(whole[8:])
    with pytest.raises(NapkinError, match="cut off"):
        PassageFile(path, 16)
    with pytest.raises(NapkinError, match="shortest"):
        DuplicateSubstrings(shortest=15)
