"""The page of samples: what a page from anywhere contains stands in it as text."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from napkin.cli import main
from napkin.curation.engine.document_story import write_sample_page
from napkin.errors import NapkinError

pytest.importorskip("zstandard")
HOSTILE = "<script>alert(1)</script></pre><img src=x onerror=alert(1)> & so on, in a long text"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_dropped_documents_stand_beside_those_that_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("raw").mkdir()
    Path("raw/<b>.txt").write_text(f"{HOSTILE}\n<|endoftext|>\n<i>short</i>\n")
    assert main(["data", "length", "raw", "--out", "corpus", "--least", "30", "--workers", "1"]) == 0
    assert "too short" in capsys.readouterr().out
    assert main(["data", "samples", "corpus"]) == 0
    parser = Tags()
    parser.feed(Path("corpus/samples.html").read_text())
    assert HOSTILE in parser.text
    assert "<i>short</i>" in parser.text
    assert "12 < 30 characters" in parser.text
    assert not {"script", "img", "i", "b"} & parser.tags
    assert main(["data", "why", "raw/<b>.txt#2", "--in", "corpus", "--json"]) == 0
    Path("mine.html").write_text("<p>mine</p>")
    with pytest.raises(NapkinError, match=r"mine\.html' exists"):
        write_sample_page(Path("corpus"), Path("mine.html"))
