"""The compiled core reads nothing outside its text, and runs on a processor with less than this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Text at the very beginning and end of a page whose neighbours may not be touched; in a process of its own, as the
# operating system ends it at the first wrong byte.
GUARDED = """
import ctypes, mmap, sys
import numpy as np
from napkin.tokenizer.character_bpe import CharacterBPETokenizer
from napkin.tokenizer.numba.encoding import Encoder
from napkin.tokenizer.numba.counting import PreTokenCounter

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
page = mmap.PAGESIZE
base = libc.mmap(None, 3 * page, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
assert libc.mprotect(base, page, 0) == 0 and libc.mprotect(base + 2 * page, page, 0) == 0
memory = np.ctypeslib.as_array((ctypes.c_uint8 * page).from_address(base + page))

if "touch" in sys.argv:
    ctypes.c_uint8.from_address(base + 2 * page).value

texts = ["the cat's", "'", "12345678", "你好🌍é", " \\u3000 \\u00a0", "x" * 300, "\\n \\n", "don't!?\\r\\n"]
bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
merges = [(256, 257), (258, 258), (260, 261)]
on_characters = CharacterBPETokenizer([*bytes_, *"thx 你é", "th", "xx", "你é"], merges, {}, byte_ids=range(256))
for pattern in sys.argv[1].split(","):
    if pattern == "characters":
        encoder, pattern = on_characters._encoder, "whole"
    else:
        encoder = Encoder([(116, 104), (256, 101), (32, 97)], pattern)
    counts = PreTokenCounter(pattern, 1)
    for repeated in texts:
        for length in [*range(1, 20), *range(46, 84), *range(126, 132), 300, page]:
            text = (repeated * (length // len(repeated.encode()) + 1)).encode()[:length]
            text = text.decode(errors="ignore").encode() or b"x"
            for place in (memory[: len(text)], memory[page - len(text) :]):
                place[:] = np.frombuffer(text, np.uint8)
                assert encoder.encode(place)[0].tolist() == encoder.encode(text + b"\\0" * 99, [len(text)])[0].tolist()
                counts.add(place, [len(place)])
                counts._wait_for(0)
    # Bytes that are not UTF-8 never come this far; if they did, no more would be read.
    for cut in range(1, 4):
        place = memory[page - 64 - cut :]
        place[:] = np.frombuffer((b"a" * 64 + "🌍".encode()[:cut]), np.uint8)
        encoder.encode(place)
print("all read")
"""

NARROW = """
from napkin.tokenizer.bpe import BPETokenizer
from napkin.tokenizer.numba.encoding import Encoder
from napkin.tokenizer.bpe_training import learn_merges
text = "the cat isn't in THE hat. 你好 1234 \\n\\n  é" * 50
merges = learn_merges({word: 1 for word in text.split(" ")}, 60)
ids = Encoder(merges, "gpt2").encode(text.encode())[0].tolist()
assert ids == BPETokenizer(merges).encode(text)
print("same ids")
"""


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "win32", reason="pages are guarded by mprotect")
def test_no_byte_before_or_behind_the_text_is_read():
    done = run(GUARDED, "gpt2,gpt4,cl100k,o200k,qwen2,whole,characters")

    assert done.stdout == "all read\n", done.stderr[-2000:]


@pytest.mark.skipif(sys.platform == "win32", reason="pages are guarded by mprotect")
def test_the_guard_page_does_guard():
    assert run(GUARDED, "gpt2", "touch").returncode < 0


@pytest.mark.torture
@pytest.mark.parametrize("processor", [{"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}])
def test_a_processor_without_wide_vectors_gives_the_same_ids(tmp_path: Path, processor: dict[str, str]):
    done = run(NARROW, NAPKIN_CACHE_DIR=str(tmp_path), **processor)

    assert done.stdout == "same ids\n", done.stderr[-2000:]
    assert "compiling the tokenizer for this machine" in done.stderr


def test_a_short_text_is_encoded_without_numba():
    script = """
import sys
from napkin.tokenizer.bpe import BPETokenizer
assert BPETokenizer([(116, 104)]).encode("the" * 100) and BPETokenizer([]).encode_batch(["a", "b"])
print([name for name in ("numba", "numpy") if name in sys.modules])
"""
    assert run(script).stdout == "[]\n"
