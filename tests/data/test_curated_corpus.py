"""A corpus of `napkin data` is a text: its documents are read, in every format that is written."""

import json
from pathlib import Path

import pytest

from napkin.cli import main
from napkin.curation.engine.pipeline_file import pipeline_of
from napkin.curation.engine.pipeline_run import curate
from napkin.data.corpus import read_documents
from napkin.errors import CorruptFile

pytest.importorskip("zstandard")
TEXTS = [f"document {number}: {'Grüße ' * number}\n" for number in range(50)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("raw.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return tmp_path


def make(output_format: str, name: str = "corpus") -> Path:
    output = {"format": output_format, "shard_bytes": 3000}
    curate(pipeline_of({"input": {"paths": ["raw.jsonl"]}, "output": output}), Path(name))
    return Path(name)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("output_format", ["jsonl.zst", "jsonl.gz", "jsonl", "parquet", "text"])
def test_the_documents_are_those_that_were_written(place: Path, output_format: str) -> None:
    corpus = make(output_format)
    assert len(list((corpus / "documents").iterdir())) > 2
    found = list(read_documents([corpus]))
    assert [document.text for document in found] == TEXTS
    if output_format != "text":
        assert [document.name for document in found] == [f"raw.jsonl#{number}" for number in range(1, 51)]
        again = pipeline_of({"input": {"paths": ["corpus/documents"]}})
        manifest = curate(again, Path("again")).manifest
        assert (manifest.documents, manifest.set_aside) == (50, {})


def test_large_documents_come_in_parts_that_are_the_document(place: Path) -> None:
    found = list(read_documents([make("jsonl")], part_bytes=100))
    assert len(found) > 100
    assert "".join(document.text for document in found) == "".join(TEXTS)
    assert [document.name for document in found if not document.continues] == [f"raw.jsonl#{n}" for n in range(1, 51)]
    assert max(len(document.data) for document in found) <= 100


def test_a_tokenizer_is_trained_on_a_corpus(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make("jsonl.zst")
    assert main(["tokenizer", "train", "corpus", "--vocab-size", "270", "--out", "tokenizer.json"]) == 0
    assert main(["tokenizer", "encode", "corpus", "--tokenizer", "tokenizer.json", "--out", "tokens"]) == 0
    assert capsys.readouterr().out.count("documents") == 2


@pytest.mark.parametrize("output_format", ["jsonl.zst", "jsonl.gz", "parquet"])
def test_a_damaged_file_is_named(place: Path, output_format: str) -> None:
    corpus = make(output_format)
    path = corpus / "documents" / f"00000-001.{output_format}"
    data = path.read_bytes()
    path.write_bytes(data[:20] + bytes(len(data) - 20))
    with pytest.raises(CorruptFile, match=r"00000-001.*is damaged"):
        list(read_documents([corpus]))
    path.write_bytes(data[:-10])
    with pytest.raises(CorruptFile, match=r"00000-001.* bytes instead of"):
        list(read_documents([corpus]))
    path.unlink()
    with pytest.raises(CorruptFile, match=r"00000-001.* is missing"):
        list(read_documents([corpus]))
