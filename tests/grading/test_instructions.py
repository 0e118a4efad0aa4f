"""Every kind of verifiable instruction on answers at its boundary, and what is forgiven loosely."""

import json
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.grading.instructions import CHECKS, instructions_followed, sentences

AT_LEAST, LESS = {"relation": "at least"}, {"relation": "less than"}
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("keywords:existence", {"keywords": ["Rain", "sun"]}, ["rain and sunshine"], ["rain alone", "sun"]),
    ("keywords:frequency", {"keyword": "no", "frequency": 2, **AT_LEAST}, ["No, no.", "no no no"], ["no", "yes"]),
    ("keywords:frequency", {"keyword": "no", "frequency": 2, **LESS}, ["no", "yes"], ["no no"]),
    ("keywords:forbidden_words", {"forbidden_words": ["can"]}, ["candle", "pelican"], ["Yes, I CAN."]),
    (
        "keywords:letter_frequency",
        {"letter": "Q", "let_frequency": 2, "let_relation": "at least"},
        ["Quick q"],
        ["quick"],
    ),
    (
        "language:response_language",
        {"language": "de"},
        ["Die Katze sitzt auf dem Tisch und schaut aus dem Fenster in den Garten."],
        ["The cat is sitting on the table and looks out of the window into the garden."],
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, **AT_LEAST}, ["One. Two", "A? B!"], ["Mr. Smith."]),
    ("length_constraints:number_sentences", {"num_sentences": 2, **LESS}, ["It costs 3.50 e.g. here."], ["One. Two."]),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "***a *** b***"],
        ["a", "a***\n***b"],
    ),
    ("length_constraints:number_words", {"num_words": 3, **AT_LEAST}, ["one two, three"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, **LESS}, ["one two"], ["one-two-three"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Second"},
        ["first\n\nsecond, then", 'x\n\n"Second" y'],
        ["first\n\nthird", "second\n\nfirst\n\nx", "second"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] at [place]"], ["[name"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye\nP.S. more", "p. s. more"], ["Tips. Bye"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["x\nP.P.S more"], ["P.S. more"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n  - b"],
        ["* a", "**a**\n- b", "- a\n- b\n- c"],
    ),
    ("detectable_format:constrained_response", {}, ["Well: My answer is maybe."], ["Maybe."]),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* **b**"],
        ["*a*", "* * **", "*a\nb*"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSection 2\nb"],
        ["Section 1", "Section A Section B"],
    ),
    ("detectable_format:json_format", {}, ['{"a": [1]}', '```json\n{"a": 1}\n```'], ["{a}", 'Here: {"a": 1}']),
    ("detectable_format:title", {}, ["<<A poem>>\nRoses"], ["<A poem>", "<< >>", "<<a\nb>>"]),
    ("combination:two_responses", {}, ["one******two"], ["one", "one******one", "a******b******c"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, ["say it. It!"], ["It! Say it."]),
    ("startend:end_checker", {"end_phrase": "The end."}, ['"... the END."'], ["The end. Or not?"]),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["I SEE", "NASA and U.S."],
        ["I see", "Nasa"],
    ),
    ("change_case:english_capital", {}, ["THE WEATHER IS FINE TODAY AND THE SUN IS SHINING"], ["The weather is fine"]),
    (
        "change_case:english_lowercase",
        {},
        ["the weather is fine today and the sun is shining"],
        ["The weather is fine"],
    ),
    ("punctuation:no_comma", {}, ["a; b"], ["a, b"]),
    ("startend:quotation", {}, [' "a" '], ['"a', '"', "'a'"]),
]


def test_all_25_kinds_are_tried() -> None:
    assert len(CHECKS) == 25
    assert {name for name, *_ in CASES} == set(CHECKS)


@pytest.mark.parametrize(("name", "parameters", "good", "bad"), CASES, ids=[f"{c[0]}{n}" for n, c in enumerate(CASES)])
def test_an_instruction_is_followed_at_its_boundary(
    name: str, parameters: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    reference = json.dumps([[name, parameters]])
    assert [instructions_followed(text, reference)[0] for text in good] == [[True]] * len(good)
    assert [instructions_followed(text, reference)[0] for text in bad] == [[False]] * len(bad)
    # An empty answer follows nothing.
    assert instructions_followed(" \n", reference) == ([False], [False])


def test_loosely_an_introduction_and_markup_are_forgiven() -> None:
    reference = json.dumps([["startend:quotation", {}], ["punctuation:no_comma", {}], ["detectable_format:title", {}]])
    strict, loose = instructions_followed('Sure, here it is:\n**"all well"**\nAnything else, my friend?', reference)
    assert strict == [False, False, False]
    assert loose == [True, True, False]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("no mark", 1),
        ("One. Two! Three?", 3),
        ("Dr. No met J. Smith at 3.30 in the U.S. embassy.", 1),
        ("Wait... what?! Yes.", 3),
        ('He said "Go." She left.', 2),
        ("Is it e.g. this? Or etc.", 2),
    ],
)
def test_sentences_are_counted(text: str, count: int) -> None:
    assert sentences(text) == count


@pytest.mark.parametrize(
    ("reference", "complaint"),
    [
        ("[]", "not a list"),
        ("nothing", "not a list"),
        ('[["keywords:none", {}]]', "there is no instruction 'keywords:none'"),
        ('[["keywords:frequency", {"keyword": "a"}]]', "needs frequency"),
        ('[["length_constraints:number_words", {"num_words": 3, "relation": "more"}]]', "the relation 'more'"),
        ('[["keywords:existence", {"keywords": [["a"]]}]]', "that is not text"),
    ],
)
def test_what_is_no_instruction_is_named(reference: str, complaint: str) -> None:
    with pytest.raises(NapkinError, match=complaint.replace("[", r"\[")):
        instructions_followed("text", reference)
