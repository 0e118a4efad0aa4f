"""The data page: what it shows is the corpus's, a threshold would drop what a rerun drops; in a real browser."""

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from napkin.curation.engine.corpus_files import read_manifest
from napkin.curation.engine.document_story import read_samples
from oracles.browser import Browser
from reliability.harness import Napkin
from studio.conftest import Studio, started
from studio.test_accessibility import AXE, violations

pytest.importorskip("zstandard")
HOSTILE = "<img src=x onerror=document.title='taken'>"
PIPELINE = """
[input]
paths = ["raw"]
[[stage]]
name = "length"
least = 30
[[stage]]
name = "gopher"
min_words = 20
[[stage]]
name = "gopher-repetition"
[[stage]]
name = "fineweb"
max_line_feeds_per_word = 0.4
[[stage]]
name = "personal-data"
"""


def texts() -> list[str]:
    """Documents of which each rule drops some, and of which some remain."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abdeilmnorstu", k=draw.randint(3, 8))) for _ in range(500)]

    def prose(lines: int) -> str:
        return "".join(f"The {' '.join(draw.choices(words, k=12))}, and that.\n" for _ in range(lines))

    plain = [prose(draw.randint(1, 7)) for _ in range(30)]
    twice = [prose(9) + "So be it, to the end.\n" * 2 for _ in range(5)]
    menus = [f"{HOSTILE}\n" + "Home\nAbout\nHome\n" * number for number in range(2, 12)]
    mails = [prose(3) + f"Write to anna{number}@example.org about that." for number in range(4)]
    hashes = [f"# these and those {number} " * 30 for number in range(5)]
    return [*plain, *twice, *menus, *mails, *hashes, prose(60), "x" * 2_000_000, "short\u202e\x1b[2J"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def data(place: Path, server: subprocess.Popen[str]) -> Iterator[Studio]:
    (place / "raw").mkdir()
    (place / "raw" / "<b>.txt").write_text("\n<|endoftext|>\n".join(texts()))
    (place / "pipeline.toml").write_text(PIPELINE)
    napkin = Napkin(place, server)
    done = napkin.run("data", "run", "pipeline.toml", "--out", "corpora/<i>one", "--workers", "1")
    assert done.wait() == 0, done.err.read_text()
    with started(napkin, "corpora") as studio:
        yield studio


def asked(studio: Studio, path: str, **body: Any) -> Any:
    told = studio.ask(f"/api/data/{path}", {"corpus": "<i>one", **body})
    assert told.status == 200, told.content
    return told.json


def test_the_flow_is_the_manifests(data: Studio, place: Path) -> None:
    assert data.ask("/api/data/corpora").json["corpora"] == ["<i>one"]
    found, manifest = asked(data, "flow"), read_manifest(place / "corpora" / "<i>one")
    assert found["read"]["documents"] == len(texts())
    assert [stage["remained"]["documents"] for stage in found["stages"]][-1] == manifest.documents
    for shown, stage in zip(found["stages"], manifest.stages, strict=True):
        assert {each["rule"]: each["documents"] for each in shown["dropped"]} == {
            rule: amount.documents for rule, amount in stage.dropped.items()
        }
    assert [stage["has_thresholds"] for stage in found["stages"]] == [True, True, True, True, False]


def test_documents_have_the_reason_marked(data: Studio, place: Path) -> None:
    samples = read_samples(place / "corpora" / "<i>one")
    (short,) = asked(data, "documents", stage=0, rule="too short")
    assert "".join(text for text, _ in short["parts"]) == "short\u202e\x1b[2J"
    assert short["why"].endswith("< 30 characters")
    hashes = asked(data, "documents", stage=1, rule="hash signs")
    assert all({text for text, is_marked in each["parts"] if is_marked} == {"#"} for each in hashes)
    remained = asked(data, "documents", stage=-1)
    assert len(remained) == len([each for each in samples if each.stage == -1])
    story = asked(data, "story", identity=short["identity"])
    assert story["ending"].startswith("dropped by length: too short")


@pytest.mark.parametrize(
    ("stage", "options", "command"),
    [
        (0, {"least": 200}, ["length", "--least", "200"]),
        (0, {"least": 0, "most": 700}, ["length", "--least", "0", "--most", "700"]),
        (1, {"min_words": 40}, ["gopher", "--min-words", "40"]),
        (1, {"min_words": 2, "max_symbols": 0.5}, ["gopher", "--min-words", "2", "--max-symbols", "0.5"]),
        (2, {"max_repeated_lines": 0.05}, ["gopher-repetition", "--max-repeated-lines", "0.05"]),
        (3, {"max_short_lines": 0.01}, ["fineweb", "--max-short-lines", "0.01", "--max-line-feeds-per-word", "0.4"]),
    ],
)
def test_a_moved_threshold_drops_what_a_rerun_drops(
    data: Studio,
    place: Path,
    tmp_path: Path,
    server: subprocess.Popen[str],
    stage: int,
    options: Any,
    command: list[str],
) -> None:
    samples = {each.identity: each.text for each in read_samples(place / "corpora" / "<i>one")}
    known = asked(data, "thresholds", stage=stage)
    identities = [each["identity"] for each in known["documents"]]
    told = asked(data, "try", stage=stage, options=options)

    # The same values and limits, compared as the page compares them.
    limits = [
        options.get(rule["option"], rule["limit"]) if rule["index"] is None else rule["limit"]
        for rule in known["rules"]
    ]
    fails = {"<": float.__lt__, "<=": float.__le__, ">": float.__gt__, ">=": float.__ge__}
    by_values = [
        next(
            (
                rule["rule"]
                for rule, value, limit in zip(known["rules"], each["values"], limits, strict=True)
                if fails[rule["how"]](float(value), float(limit))
            ),
            None,
        )
        for each in known["documents"]
    ]
    if "most" not in options:
        # The pipeline has no `most`, so the page has no slider for it.
        assert by_values == told
        assert by_values != [rule["before"] for rule in known["documents"]]

    # A rerun of the stage on the texts of the sample.
    lines = [json.dumps({"text": samples[identity]}) for identity in identities]
    (tmp_path / "sample.jsonl").write_text("".join(f"{line}\n" for line in lines))
    done = Napkin(tmp_path, server).run("data", command[0], "sample.jsonl", "--out", "again", *command[1:])
    assert done.wait() == 0, done.err.read_text()
    dropped = read_manifest(tmp_path / "again").stages[0].dropped
    expected = {rule: amount.documents for rule, amount in dropped.items()}
    assert {rule: told.count(rule) for rule in told if rule is not None} == expected


def test_each_moved_limit_is_of_its_own_option(data: Studio) -> None:
    rules = asked(data, "thresholds", stage=2)["rules"]
    assert [(rule["option"], rule["index"]) for rule in rules[-9:-5]] == [
        ("max_top_n_gram_characters", 0),
        ("max_top_n_gram_characters", 1),
        ("max_top_n_gram_characters", 2),
        ("max_repeated_n_gram_characters", 0),
    ]
    shared = [rule["option"] for rule in asked(data, "thresholds", stage=1)["rules"]]
    assert shared.count("max_symbols") == 2
    weights = asked(data, "thresholds", stage=0)
    assert sum(each["weight"] for each in weights["documents"]) == pytest.approx(weights["entered"])


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("flow", {"corpus": "../raw"}, "there is no corpus '../raw'"),
        ("thresholds", {"corpus": "<i>one", "stage": 9}, "use 0 to 4"),
        ("thresholds", {"corpus": "<i>one", "stage": 4}, "no thresholds"),
        ("try", {"corpus": "<i>one", "stage": 1, "options": {"min_word": 1}}, "min_words"),
        ("try", {"corpus": "<i>one", "stage": 1, "options": {"max_symbols": "<b>"}}, "max_symbols"),
        ("story", {"corpus": "<i>one", "identity": "raw/<b>.txt#999999"}, "there is no document"),
        ("text", {"corpus": "<i>one", "stage": 1, "identity": "x"}, "have no document 'x'"),
    ],
)
def test_what_is_wrong_is_named(data: Studio, path: str, body: object, reason: str) -> None:
    told = data.ask(f"/api/data/{path}", body)
    assert told.status == 422
    assert reason in told.json["error"]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser to look with")
@pytest.mark.parametrize("dark", [False, True])
def test_a_threshold_is_moved_by_keyboard_in_a_browser(data: Studio, tmp_path: Path, dark: bool) -> None:
    def choose(text: str) -> None:
        found = f"[...document.querySelectorAll('.rules button')].find((each) => each.textContent.startsWith('{text}'))"
        browser.run(f"{found}.focus()")
        browser.press("Enter")

    with Browser(tmp_path / "profile", dark=dark) as browser:
        browser.open(data.address)
        browser.open(f"http://127.0.0.1:{data.port}/data")
        browser.wait_for("'ready' in document.body.dataset")
        choose("too few words")
        browser.wait_for("document.querySelectorAll('#documents article').length > 0")
        assert HOSTILE in browser.run("document.querySelector('#documents').textContent")
        choose("hash signs")
        browser.wait_for("document.querySelectorAll('#documents mark').length > 0")
        browser.run("document.querySelector('#documents button').click()")
        browser.wait_for("document.querySelector('#documents').innerText.includes('dropped by gopher: hash signs')")
        stages = "[...document.querySelectorAll('.flow > li')]"
        gopher = f"{stages}.find((each) => each.textContent.startsWith('2. gopher'))"
        browser.run(f"{gopher}.querySelector('li:last-child button').click()")
        browser.wait_for("document.querySelectorAll('.limit-row').length === 10")
        browser.wait_for("'confirmed' in (document.querySelector('#limits > .soft')?.dataset ?? {})")
        before = browser.run("document.querySelector('.fate').textContent")
        browser.run("document.querySelector('.limit-row input').focus()")
        for _ in range(30):
            browser.press("ArrowRight")
        assert browser.run("document.querySelector('.limit-row input[type=number]').value") == "50"
        assert browser.run("document.querySelector('.fate').textContent") != before
        browser.wait_for("document.querySelector('#limits > .soft').textContent.includes('says the same')")
        browser.run("document.querySelector('.changed button').focus()")
        browser.press("Enter")
        browser.wait_for("document.querySelectorAll('#limits article').length === 1")
        assert browser.run("document.querySelectorAll('img, main b, main i').length") == 0
        for width in (390, 2560):
            browser.size(width, 900)
            assert browser.run("document.documentElement.scrollWidth") <= width
            if AXE.exists():
                assert violations(browser) == []
        outside = "performance.getEntriesByType('resource').filter(({ name }) => !name.startsWith(location.origin))"
        assert browser.run(f"{outside}.length") == 0
        assert browser.run("document.title") == "Data · napkin"
        assert browser.complaints == []
