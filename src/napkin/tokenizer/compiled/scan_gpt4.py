"""GPT-4's pattern as published first (`gpt4`), and as tiktoken has it now (`cl100k`)."""

from napkin.tokenizer.compiled.machine_code import Scanner
from napkin.tokenizer.compiled.scanners import scan_gpt4 as scan


@Scanner
def scan_gpt4(text, start, stop, limit, classes, ends, room):
    """The scanner of GPT-4's pattern."""
    return scan(text, start, stop, classes, ends, room, False)


@Scanner
def scan_cl100k(text, start, stop, limit, classes, ends, room):
    """The scanner of GPT-4's pattern that keeps the white space at the end of a text together."""
    return scan(text, start, stop, classes, ends, room, True)
