"""GPT-4's pattern in its first published form."""

from napkin.machine_code.compiled_function import CompiledFunction
from napkin.tokenizer.numba.scanners import scan_gpt4 as scan


@CompiledFunction
def scan_gpt4(text, start, stop, limit, classes, ends, room):
    """The scanner of GPT-4's pattern."""
    return scan(text, start, stop, classes, ends, room, False, 3)
