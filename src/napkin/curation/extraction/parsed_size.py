"""How large a page becomes when it is parsed; see `compiled/parser_cost.py` for how small ones become large."""

import math

import numpy as np

from napkin.curation.extraction.compiled.loading import EXTRACTION


def parsed_size(page: bytes, most_elements: int, most_attributes: int) -> tuple[int, int]:
    """At least as many elements as a parser makes of the page, and attributes that cost it as much as all tags have.

    Counting ends where either is more than the most that is wanted.
    """
    EXTRACTION.load("parser_cost")
    from napkin.curation.extraction.compiled.parser_cost import N_COUNTERS, parser_cost

    counters, result = np.zeros(N_COUNTERS, np.int64), np.zeros(2, np.int64)
    buffer = np.frombuffer(page + bytes(8), np.uint8)
    parser_cost(
        buffer.ctypes.data, len(page), counters.ctypes.data, result.ctypes.data, most_elements, most_attributes**2
    )
    return int(result[0]), math.isqrt(int(result[1]))
