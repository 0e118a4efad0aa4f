"""GPT-4o's pattern, compiled."""

from napkin.machine_code.compiled_function import CompiledFunction
from napkin.tokenizer.numba.scanners import scan_o200k as scan


@CompiledFunction
def scan_o200k(text, start, stop, limit, classes, ends, room):
    """The scanner of GPT-4o's pattern."""
    return scan(text, start, stop, classes, ends, room)
