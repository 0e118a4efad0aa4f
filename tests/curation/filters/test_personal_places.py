"""Places by machine code: the same is masked as where every pattern looks at all of a text."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curation.filters.test_personal_data import LEFT, MASKED
from napkin.curation.filters.personal_data import _PATTERNS, _PLACES, mask_at  # pyright: ignore[reportPrivateUsage]

PARTS = [
    *"abZ0123456789 ().-/+:@_%\\n,=`#&é一\ud800",
    "%3D",
    "\\n",
    "8.8.8.8",
    "2606:4700:",
    "GB82 WEST 1234 5698 7654 32",
]
PARTS += ["DE89370400440532013000", "(0", "+49", "@mail.example.com", "4111 1111 1111 1111", "-----BEGIN ", *_PATTERNS]


def same(text: str) -> None:
    for unassigned in (False, True):
        compiled = mask_at(text, _PLACES.compiled(text), unassigned=unassigned)
        assert compiled == mask_at(text, _PLACES.plain(text), unassigned=unassigned)


@pytest.mark.parametrize("text", [*(text for text, _ in MASKED), *LEFT])
def test_known_texts_are_masked_alike(text: str) -> None:
    for before, behind in (("", ""), ("Zürich, 一二: ", " – und\n"), ("a", "1")):
        same(before + text + behind)


@given(st.lists(st.sampled_from(PARTS), max_size=40).map("".join))
def test_any_text_is_masked_alike(text: str) -> None:
    same(text)


@given(st.text(st.sampled_from("0123456789 ().-/+:é"), max_size=60))
def test_any_number_is_masked_alike(text: str) -> None:
    same(text)


def test_keys_are_found_behind_whatever_may_stand_before_them() -> None:
    draw = random.Random(5)
    for prefix in _PATTERNS:
        body = "".join(draw.choice("abcdefABCDEF0123456789") for _ in range(60))
        for before in ("", " ", "é", "=", "\\n", "%3D", "%%3D", "\\\\n", "a", "_", "3D", "n"):
            same(before + prefix + body)


def test_places_are_the_spans_that_they_say() -> None:
    text = "é 12345678, 1.2.3.4 a@b GB82 2606:: (030) 123456"
    found = _PLACES.compiled(text)
    assert [text[begin:end].strip() for begin, end in found.numbers] == ["12345678", "(030) 123456"]
    assert [text[begin:end].strip() for begin, end in found.dotted] == ["1.2.3.4"]
    assert [text[at] for at in found.ats] == ["@"]
    assert [text[at : at + 4] for at in found.accounts] == ["GB82"]
    assert [text[at : at + 5] for at in found.addresses] == ["2606:"]
    key = f"{text}, AKIA"
    assert len(key) - len("AKIA") in _PLACES.compiled(key).keys
