"""The stage `language`, and documents in several languages."""

import pytest

from napkin.curation import Dropped, Record, apply_stages, make_stage
from napkin.errors import NapkinError
from napkin.languages import language_shares, paragraph_languages
from napkin.languages.classifier import close_to_wanted, packaged_classifier

ENGLISH = "The old bridge over the river was closed after the storm."
GERMAN = "Die alte Brücke über den Fluss wurde nach dem Sturm gesperrt."


@pytest.mark.thorough
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


# Of the first two sentences Bosnian is the most probable language, of the third Croatian; all of them are Croatian.
CROATIAN = [
    "Svatko ima pravo na slobodu kretanja i boravka unutar granica svake države.",
    "Prošlog tjedna znanstvenici su objavili rezultate istraživanja o okolišu.",
    "Roditelji imaju pravo birati vrstu obrazovanja za svoju djecu.",
]
BOSNIAN = "Niko ne smije biti podvrgnut mučenju."
CYRILLIC = "Сва људска бића рађају се слободна и једнака у достојанству и правима."
SLOVENE = "Vsi ljudje se rodijo svobodni in imajo enako dostojanstvo in enake pravice."
INDONESIAN = "Semua orang dilahirkan merdeka dan mempunyai martabat dan hak yang sama."


@pytest.mark.parametrize("keep", ["hr", "bs"])
def test_a_language_that_is_hardly_told_from_the_wanted_one_is_kept_as_that(keep: str) -> None:
    stage = make_stage("language", {"keep": [keep]})
    for text in (*CROATIAN, BOSNIAN):
        kept = stage.apply(Record("a", text))  # type: ignore[union-attr]
        assert isinstance(kept, Record)
        assert kept.fields["language"] == keep
        # Its own probability is told, not that of the group.
        own = packaged_classifier().probabilities(text)[keep]
        assert kept.fields["language_probability"] == pytest.approx(own, abs=1e-4)
        if own < 0.5:
            assert "close" in kept.trace[-1].note
    for text in (CYRILLIC, SLOVENE, INDONESIAN, ENGLISH):
        assert isinstance(stage.apply(Record("a", text)), Dropped)  # type: ignore[union-attr]


def test_close_languages_are_told_apart_where_that_is_asked_for() -> None:
    strict = make_stage("language", {"keep": ["hr"], "close_languages": False})
    for text in (*CROATIAN, BOSNIAN):
        kept = strict.apply(Record("a", text))  # type: ignore[union-attr]
        assert isinstance(kept, Record) == (packaged_classifier().identify(text).language == "hr")
    indonesian = make_stage("language", {"keep": ["id"]})
    assert isinstance(indonesian.apply(Record("a", INDONESIAN)), Record)  # type: ignore[union-attr]
    assert isinstance(make_stage("language", {"keep": ["sl"]}).apply(Record("a", CROATIAN[0])), Dropped)  # type: ignore[union-attr]


def test_a_share_of_a_group_decides_and_the_group_together_is_probable_enough() -> None:
    probabilities = {"bs": 0.5, "hr": 0.4, "sl": 0.1}
    assert close_to_wanted(probabilities, ["hr"], 0.5) == ("hr", 0.4, 0.9)
    assert close_to_wanted(probabilities, ["hr", "bs"], 0.5) == ("bs", 0.5, 0.9)
    assert close_to_wanted(probabilities, ["hr"], 0.95) is None
    assert close_to_wanted({"bs": 0.91, "hr": 0.08}, ["hr"], 0.5) is None
    assert close_to_wanted(probabilities, ["sl", "en"], 0.05) is None


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
