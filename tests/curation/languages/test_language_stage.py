"""The stage `language`, and documents in several languages."""

import pytest

from napkin.curation import Dropped, Record, apply_stages, make_stage
from napkin.curation.languages import language_shares, paragraph_languages
from napkin.errors import NapkinError

ENGLISH = "The old bridge over the river was closed after the storm."
GERMAN = "Die alte Brücke über den Fluss wurde nach dem Sturm gesperrt."


def test_stage_adds_the_language_and_drops_others_by_name() -> None:
    texts = {"a": ENGLISH, "b": GERMAN, "c": "12345 67890"}
    dropped: dict[str, str] = {}

    def on_drop(record: Record, stage: str, why: Dropped) -> None:
        dropped[record.identity] = f"{stage}: {why.rule}"

    stage = make_stage("language", {"keep": ["en"]})
    kept = list(apply_stages([Record(identity, text) for identity, text in texts.items()], [stage], on_drop))
    assert [record.identity for record in kept] == ["a"]
    assert kept[0].fields["language"] == "en"
    assert 0.9 < kept[0].fields["language_probability"] <= 1
    assert kept[0].trace[0].note.startswith("en ")
    assert dropped == {"b": "language: other language", "c": "language: unknown language"}


def test_without_keep_every_document_goes_on() -> None:
    stage = make_stage("language", {"shares": True})
    kept = list(apply_stages([Record("a", f"{ENGLISH}\n\n{GERMAN}"), Record("b", "12")], [stage]))
    assert [record.fields["language"] for record in kept][1] == "unknown"
    assert kept[0].fields["languages"] == pytest.approx({"de": 61 / 118, "en": 57 / 118}, abs=1e-4)


def test_wrong_options_are_named() -> None:
    with pytest.raises(NapkinError, match="'xx' is not known"):
        make_stage("language", {"keep": ["en", "xx"]})
    with pytest.raises(NapkinError, match="least_probability is 2"):
        make_stage("language", {"least_probability": 2.0})


def test_paragraphs_stand_where_they_say() -> None:
    text = f"\n{GERMAN}\n \n{ENGLISH}\n1 2 3"
    found = list(paragraph_languages(text))
    assert [(text[each.start : each.end], each.guess.language) for each in found] == [
        (GERMAN, "de"),
        (ENGLISH, "en"),
        ("1 2 3", "unknown"),
    ]
    assert sum(language_shares(text).values()) == pytest.approx(1)
    assert language_shares("\n \n") == {}
