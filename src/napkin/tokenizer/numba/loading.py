"""Loading the compiled core: which of its modules do what.

Building takes about half a minute, loading about half a second. See dispatch.py for when either is worth it.
"""

import importlib
from typing import Any

from napkin.machine_code.loading import MachineCode

# Pre-tokenization patterns that have a scanner: the one function of the module `scan_NAME`.
COMPILED_PATTERNS = ("gpt2", "gpt4", "cl100k", "o200k", "qwen2", "whole")

CORE = MachineCode(
    "napkin.tokenizer.numba", "napkin: compiling the tokenizer for this machine (once, about half a minute)"
)


def modules_for_encoding(pattern: str) -> tuple[str, ...]:
    """The modules of this folder whose compiled functions encode text that is split by `pattern`."""
    return "pre_token_table", "apply_merges", "encode_documents", f"scan_{pattern}"


def modules_for_training(pattern: str) -> tuple[str, ...]:
    """The modules of this folder whose compiled functions train on text that is split by `pattern`."""
    return "pre_token_table", "count_documents", "pair_table", "learn_merges", f"scan_{pattern}"


def scanner_of(pattern: str) -> Any:
    name = f"scan_{pattern}"
    return getattr(importlib.import_module(f"{__package__}.{name}"), name)
