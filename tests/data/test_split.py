import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.data import Document, is_validation
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
from napkin.data.split import Document, is_validation
print([i for i in range(200) if is_validation(Document("", f"text {i}"), 0.1)])
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    here = [i for i in range(200) if is_validation(Document("", f"text {i}"), 0.1)]
    assert result.stdout.strip() == str(here)


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_an_impossible_fraction_is_refused(fraction: float) -> None:
    with pytest.raises(NapkinError, match="0 to 1"):
        is_validation(Document("", ""), fraction)
