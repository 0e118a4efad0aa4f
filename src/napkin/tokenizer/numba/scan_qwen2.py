"""Qwen 2's pattern, compiled."""

from napkin.machine_code.compiled_function import CompiledFunction
from napkin.tokenizer.numba.scanners import scan_gpt4 as scan


@CompiledFunction
def scan_qwen2(text, start, stop, limit, classes, ends, room):
    """The scanner of Qwen 2's pattern: GPT-4's, with each digit alone."""
    return scan(text, start, stop, classes, ends, room, False, 1)
