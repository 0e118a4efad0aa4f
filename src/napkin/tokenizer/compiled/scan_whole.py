"""The pattern that does not cut."""

from napkin.tokenizer.compiled.intrinsics import store_i64
from napkin.tokenizer.compiled.machine_code import Scanner


@Scanner
def scan_whole(text, start, stop, limit, classes, ends, room):
    """The scanner that takes all that is left as one pre-token."""
    store_i64(ends, stop)
    return 1
