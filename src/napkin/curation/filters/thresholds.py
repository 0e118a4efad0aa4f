"""How rules compare a value of a text with a threshold, and say what they found."""

from collections.abc import Iterable

from napkin.curation.stage import Dropped
from napkin.errors import NapkinError

Comparison = tuple[str, float, str, float]
"""The name of a rule, the value of the text, the comparison for which the text is dropped, and the threshold."""

_FAILS = {
    "<": lambda value, threshold: value < threshold,
    "<=": lambda value, threshold: value <= threshold,
    ">": lambda value, threshold: value > threshold,
    ">=": lambda value, threshold: value >= threshold,
}


def first_failure(comparisons: Iterable[Comparison]) -> Dropped | None:
    """The first rule whose comparison holds, as a reason to drop the text."""
    for rule, value, comparison, threshold in comparisons:
        if _FAILS[comparison](value, threshold):
            return Dropped(rule, f"{value:.4g} {comparison} {threshold:.4g}")
    return None


def failures(comparisons: Iterable[Comparison]) -> list[str]:
    """The names of all rules whose comparisons hold."""
    return [rule for rule, value, comparison, threshold in comparisons if _FAILS[comparison](value, threshold)]


def share(part: float, whole: float) -> float:
    """part / whole; 0 for nothing of nothing."""
    return part / whole if whole else 0.0


def check_fractions(**options: float) -> None:
    """Raise NapkinError for the first option that is not between 0 and 1."""
    for name, value in options.items():
        if not 0 <= value <= 1:
            raise NapkinError(f"{name} is {value}: use a fraction from 0 to 1")


def check_counts(**options: float) -> None:
    """Raise NapkinError for the first option that is negative or not a number."""
    for name, value in options.items():
        if not value >= 0:
            raise NapkinError(f"{name} is {value}: use 0 or more")
