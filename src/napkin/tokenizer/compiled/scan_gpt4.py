"""GPT-4's pattern as published first."""

from napkin.tokenizer.compiled.machine_code import Scanner
from napkin.tokenizer.compiled.scanners import scan_gpt4 as scan


@Scanner
def scan_gpt4(text, start, stop, limit, classes, ends, room):
    """The scanner of GPT-4's pattern."""
    return scan(text, start, stop, classes, ends, room, False)
