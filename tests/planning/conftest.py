from collections.abc import Iterator

import pytest

from oracles.shared_counts import shared_counts


@pytest.fixture(scope="module", autouse=True)
def steps_are_counted_once() -> Iterator[None]:
    """Plans of one recipe on several devices, and searches around it, count the same steps again and again."""
    with shared_counts():
        yield
