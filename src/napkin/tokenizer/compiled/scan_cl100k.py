"""GPT-4's pattern as tiktoken has it now."""

from napkin.tokenizer.compiled.machine_code import Scanner
from napkin.tokenizer.compiled.scanners import scan_gpt4 as scan


@Scanner
def scan_cl100k(text, start, stop, limit, classes, ends, room):
    """The scanner of GPT-4's pattern that keeps the white space at the end of a text together."""
    return scan(text, start, stop, classes, ends, room, True)
