"""GPT-4's pattern in tiktoken's current form."""

from napkin.machine_code.compiled_function import CompiledFunction
from napkin.tokenizer.numba.scanners import scan_gpt4 as scan


@CompiledFunction
def scan_cl100k(text, start, stop, limit, classes, ends, room):
    """The scanner of GPT-4's pattern in which white space at the end of a text is one pre-token."""
    return scan(text, start, stop, classes, ends, room, True, 3)
