import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.data import Document, is_validation
from napkin.data.corpus import split_documents
from napkin.errors import NapkinError


@given(st.text(), st.text(), st.text(), st.floats(0, 1))
def test_the_same_text_is_on_one_side_whatever_its_name(one: str, other: str, text: str, fraction: float) -> None:
    assert is_validation(Document(one, text), fraction) == is_validation(Document(other, text), fraction)


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_holds_out_all_that_a_smaller_one_does(text: str, one: float, other: float) -> None:
    document = Document("", text)
    small, large = sorted((one, other))
    assert not is_validation(document, small) or is_validation(document, large)


@given(st.text())
def test_a_fraction_of_none_holds_out_nothing_and_of_one_everything(text: str) -> None:
    assert not is_validation(Document("", text), 0.0)
    assert is_validation(Document("", text), 1.0)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_about_the_fraction_is_held_out(fraction: float) -> None:
    n = 20_000
    held_out = sum(is_validation(Document("", f"text {i}"), fraction) for i in range(n))
    deviation = (n * fraction * (1 - fraction)) ** 0.5
    assert abs(held_out - n * fraction) < 5 * deviation


def test_another_process_decides_alike() -> None:
    script = """
from napkin.data import Document, is_validation
print([i for i in range(200) if is_validation(Document("", f"text {i}"), 0.1)])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    here = [i for i in range(200) if is_validation(Document("", f"text {i}"), 0.1)]
    assert result.stdout.strip() == str(here)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_an_impossible_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(NapkinError, match="0 to 1"):
        is_validation(Document("", ""), fraction)


def sides(documents: list[Document], fraction: float) -> tuple[list[Document], list[Document]]:
    return (
        list(split_documents(documents, fraction, "training")),
        list(split_documents(documents, fraction, "validation")),
    )


@given(st.lists(st.text(min_size=1), min_size=2), st.floats(0, 1))
def test_every_document_is_on_one_side(texts: list[str], fraction: float) -> None:
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    training, validation = sides(documents, fraction)
    assert sorted(training + validation, key=lambda document: int(document.name)) == documents
    assert not {document.text for document in training} & {document.text for document in validation}


@given(st.text("ab \n\r🦊", min_size=1), st.floats(0.01, 0.99))
def test_the_parts_of_a_single_document_are_that_document(text: str, fraction: float) -> None:
    training, validation = sides([Document("one", text)], fraction)
    parts = [*training, *validation]
    assert all(part.text.strip() for part in parts)
    if len(parts) == 2:
        assert parts[0].text + parts[1].text == text


@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.5, 0.9])
@pytest.mark.parametrize(
    ("text", "boundary"),
    [
        ("a line of text\n" * 2000, "\n"),
        ("a title\n" + "words " * 5000, " "),
        ("x" * 30_000, "x"),
        ("first\n" + "x" * 30_000, "x"),
    ],
    ids=["lines", "one endless line", "no boundary", "a line and no boundary"],
)
def test_a_single_document_is_cut_near_the_fraction_at_a_boundary(text: str, boundary: str, fraction: float) -> None:
    (training,), (validation,) = sides([Document("one", text)], fraction)
    assert training.text.endswith(boundary)
    assert fraction * 0.9 <= len(validation.text) / len(text) <= fraction * 1.51


def test_a_single_document_too_short_for_two_parts_is_on_one_side() -> None:
    assert [len(side) for side in sides([Document("one", "hi")], 0.05)] == [1, 0]


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_split_by_an_impossible_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(NapkinError, match="0 to 1"):
        list(split_documents([Document("one", "some text")], fraction, "training"))
