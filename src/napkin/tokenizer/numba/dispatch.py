"""The choice between the compiled core and plain Python, and its modules.

Importing numba and loading machine code takes about half a second, building it about half a minute. A text must be long
enough to make up for that; shorter ones are handled by the plain functions. Nothing here imports numba.
"""

from napkin.machine_code.loading import MachineCode

# Pre-tokenization patterns that have a scanner: `scan_NAME` of scanners.py.
COMPILED_PATTERNS = ("gpt2", "gpt4", "cl100k", "o200k", "qwen2", "whole")

CORE = MachineCode(
    "napkin.tokenizer.numba", "napkin: compiling the tokenizer for this machine (once, about half a minute)"
)


# The modules of this folder whose compiled functions encode, and those that train.
FOR_ENCODING = ("scanners", "characters", "pre_token_table", "apply_merges", "encoding")
FOR_TRAINING = ("scanners", "pre_token_table", "counting", "learn_merges")

# The text length from which on the core is faster: when it is loaded, when its machine code is on disk, and when that
# must be built first.
MIN_BYTES_LOADED = 2**11
MIN_BYTES_CACHED = 2**21
MIN_BYTES_NOT_CACHED = 2**25

# An id takes 20 bits in the tables of the core, and one value is reserved for "no token".
MAX_VOCAB_SIZE = 2**20 - 1

_bytes_encoded_plainly = 0


def can_encode(vocab_size: int, pattern: str) -> bool:
    """True if the core has a scanner for the pattern and its tables have room for so many ids."""
    return pattern in COMPILED_PATTERNS and vocab_size <= MAX_VOCAB_SIZE


def should_encode_compiled(n_bytes: int) -> bool:
    """True if the core should encode a text of about `n_bytes`.

    Texts that it did not encode add up, so a program that keeps encoding short ones switches to the core as well.
    """
    global _bytes_encoded_plainly
    if CORE.is_loaded(FOR_ENCODING):
        return n_bytes >= MIN_BYTES_LOADED
    _bytes_encoded_plainly += n_bytes
    if _bytes_encoded_plainly < MIN_BYTES_CACHED:
        return False
    return _bytes_encoded_plainly >= MIN_BYTES_NOT_CACHED or not CORE.not_cached(FOR_ENCODING)


def should_train_compiled(n_bytes: int, pattern: str) -> bool:
    """True if the core should train on a text of at least `n_bytes`."""
    if pattern not in COMPILED_PATTERNS:
        return False
    return n_bytes >= (MIN_BYTES_NOT_CACHED if CORE.not_cached(FOR_TRAINING) else MIN_BYTES_CACHED)
