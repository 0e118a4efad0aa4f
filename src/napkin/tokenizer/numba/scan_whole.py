"""The pattern that does not split text."""

from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.pointers import store_i64


@CompiledFunction
def scan_whole(text, start, stop, limit, classes, ends, room):
    """The scanner whose one pre-token is all remaining text."""
    store_i64(ends, stop)
    return 1
