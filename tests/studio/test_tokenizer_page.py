"""The tokenizers' page: tokens and merges beside those of the library, in a real browser; hostile texts are text."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from napkin.tokenizer import BPETokenizer, Tokenizer, train_bpe
from oracles.browser import Browser
from reliability.harness import Napkin
from studio.conftest import Studio, started

HOSTILE = "<img src=x onerror=document.title='taken'> the then \u202e\x00 \ud83d\ude00"
TEXT = "the then them there, Straße 123 こんにちは " * 30


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([TEXT], vocab_size=300)


@pytest.fixture(scope="module")
def studio_of_tokenizers(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]
) -> Iterator[Studio]:
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "one").mkdir()
    tokenizer.save(folder / "one" / "tokenizer.json")
    (folder / "broken").mkdir()
    (folder / "broken" / "tokenizer.json").write_text("{")
    with started(Napkin(tmp_path_factory.mktemp("place"), server), str(folder)) as studio:
        yield studio


def test_tokens_and_merges_are_the_librarys(studio_of_tokenizers: Studio, tokenizer: Tokenizer) -> None:
    studio = studio_of_tokenizers
    assert isinstance(tokenizer, BPETokenizer)
    names = studio.ask("/api/tokenizers").json
    assert names == ["bytes of UTF-8", "broken/tokenizer.json", "one/tokenizer.json"]
    by_bytes, broken, one = studio.ask("/api/tokenizers/encode", {"text": TEXT, "names": names}).json
    assert [each[0] for each in one["tokens"]] == tokenizer.encode(TEXT)
    assert bytes.fromhex("".join(each[1] for each in one["tokens"])) == TEXT.encode()
    assert [each[0] for each in by_bytes["tokens"]] == [*TEXT.encode()]
    assert "broken" in broken["error"]
    (piece,) = studio.ask("/api/tokenizers/merges", {"text": "there", "name": "one/tokenizer.json"}).json
    assert piece["steps"][0]["tokens"] == [*"there"]
    last = tokenizer.encode("there")
    assert piece["steps"][-1]["tokens"] == [tokenizer.vocabulary[i].decode() for i in last]
    for step in piece["steps"][1:]:
        assert tokenizer.merges[step["merge"]] == tuple(
            tokenizer.vocabulary.index(each.encode()) for each in step["joins"]
        )


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("encode", {"text": "x" * 20_001, "names": ["bytes of UTF-8"]}, "use up to 20,000"),
        ("encode", {"text": "x", "names": ["../one/tokenizer.json"]}, "there is no tokenizer"),
        ("encode", {"text": "x", "names": ["bytes of UTF-8"] * 13}, "use up to 12"),
        ("merges", {"text": "", "name": "one/tokenizer.json"}, "use 1 to 200"),
        ("merges", {"text": "x", "name": "bytes of UTF-8"}, "has no merges"),
    ],
)
def test_what_is_wrong_is_named(studio_of_tokenizers: Studio, path: str, body: object, said: str) -> None:
    told = studio_of_tokenizers.ask(f"/api/tokenizers/{path}", body)
    assert told.status in (400, 422)
    assert said in told.json["error"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
def test_a_text_is_coloured_and_a_word_is_built(studio_of_tokenizers: Studio, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(studio_of_tokenizers.address)
        browser.open(f"http://127.0.0.1:{studio_of_tokenizers.port}/tokenizer")
        browser.wait_for("document.querySelectorAll('#encoded > div').length === 3")
        before = browser.run("document.body.dataset.encoded")
        browser.run("(t => { t.focus(); t.select(); })(document.querySelector('#text'))")
        browser.type(HOSTILE)
        browser.wait_for(f"document.body.dataset.encoded !== '{before}'")
        tokens = "document.querySelector('[data-tokenizer=\"one/tokenizer.json\"] .tokens')"
        assert "<img src=x" in browser.run(f"{tokens}.textContent")
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert browser.run("document.title") == "Tokenizers · napkin"
        browser.run(f"[...{tokens}.children].find((each) => each.textContent.startsWith(' then')).click()")
        browser.wait_for("document.querySelectorAll('#merges .step').length > 1")
        assert browser.run("[...document.querySelectorAll('#merges .step')].at(-1).innerText").endswith(" then")
        for width in (390, 1280):
            browser.size(width, 900)
            assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.complaints == []
