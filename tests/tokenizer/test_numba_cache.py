"""The compiled core's machine code is built once, and what is damaged in its cache again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# One module, loaded and called; no unpickling meanwhile.
LOAD = """
import numba, numpy as np, pickle, sys
from napkin.tokenizer.numba.dispatch import CORE

def refuse(*arguments, **settings):
    raise AssertionError("a pickle is read")

if "strict" in sys.argv:
    pickle.load = pickle.loads = pickle.Unpickler = refuse
CORE.load("scanners")
from napkin.tokenizer.numba.scanners import scan_whole
text, ends = np.zeros(64, np.uint8), np.zeros(600, np.int64)
count = scan_whole(text.ctypes.data, 0, 64, 64, 0, ends.ctypes.data, 512)
print(count, ends[count - 1])
"""


def load(cache: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOAD, *arguments],
        env={**os.environ, "NAPKIN_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
    assert done.stdout == "1 64\n", done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.torture
def test_a_cache_that_is_damaged_is_built_again_and_a_whole_one_is_loaded_without_pickle(tmp_path: Path) -> None:
    # What a stranger may have put beside the user's text.
    beside = tmp_path / "beside"
    beside.mkdir()
    for name in ("numba", "llvmlite", "numpy", "napkin"):
        (beside / f"{name}.py").write_text(f"open({str(beside / 'ran')!r}, 'w')")
    built = load(tmp_path / "cache", cwd=beside)
    assert "compiling the tokenizer" in built.stderr
    assert "failed" not in built.stderr
    assert not (beside / "ran").exists()
    assert load(tmp_path / "cache", "strict").stderr == ""

    (file,) = (tmp_path / "cache").glob("machine-code/*/scanners.code")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = load(tmp_path / "cache")
    assert "compiling the tokenizer" in again.stderr
    assert file.read_bytes() != content
    if os.name != "nt":
        file.parent.chmod(0o777)
        refused = load(tmp_path / "cache")
        assert "other users may write into it" in refused.stderr
        file.parent.chmod(0o700)
    assert load(tmp_path / "cache").stderr == ""
