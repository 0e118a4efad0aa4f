"""Which patterns have a compiled scanner."""

import importlib

from napkin.tokenizer.compiled.machine_code import Scanner

COMPILED_PATTERNS = {
    "gpt2": ("scan_gpt2", "scan_gpt2"),
    "gpt4": ("scan_gpt4", "scan_gpt4"),
    "cl100k": ("scan_gpt4", "scan_cl100k"),
    "o200k": ("scan_o200k", "scan_o200k"),
    "whole": ("scan_whole", "scan_whole"),
}


def scanner_of(pattern: str) -> Scanner:
    """The scanner of one of COMPILED_PATTERNS."""
    module, name = COMPILED_PATTERNS[pattern]
    return getattr(importlib.import_module(f"napkin.tokenizer.compiled.{module}"), name)
