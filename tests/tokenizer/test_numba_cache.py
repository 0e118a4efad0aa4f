"""The compiled core's machine code: whatever lies in its cache, only what this user's napkin wrote whole is run."""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from napkin.tokenizer.numba import code_cache
from napkin.tokenizer.numba.code_cache import is_cached, read_code, write_code

CODE = {"first": b"\x7fELF" + bytes(range(256)), "second": b"\n{}\n", "third": b""}

# The smallest module, loaded and called; no unpickling meanwhile.
LOAD = """
import numba, numpy as np, pickle, sys
from napkin.tokenizer.numba.loading import load, scanner_of

def refuse(*arguments, **settings):
    raise AssertionError("a pickle is read")

if "strict" in sys.argv:
    pickle.load = pickle.loads = pickle.Unpickler = refuse
load("scan_whole")
text, ends = np.zeros(64, np.uint8), np.zeros(600, np.int64)
count = scanner_of("whole")(text.ctypes.data, 0, 64, 64, 0, ends.ctypes.data, 512)
print(count, ends[count - 1])
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(code_cache, "code_folder", lambda: tmp_path)
    return tmp_path


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


def test_what_was_written_is_read(folder: Path) -> None:
    write_code("module", CODE)
    assert is_cached("module")
    assert read_code("module") == CODE
    assert read_code("another") is None


def test_a_file_that_lacks_bytes_or_has_other_ones_is_removed(folder: Path) -> None:
    write_code("module", CODE)
    file = folder / "module.code"
    whole, choose = file.read_bytes(), random.Random(0)
    damaged = [whole[:length] for length in range(len(whole))]
    for _ in range(500):
        flipped = bytearray(whole)
        flipped[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
        damaged.append(bytes(flipped))
    damaged += [whole + b"\0", pickle.dumps(CODE), b"\xff" * 300, whole[:65] + b"[[[" * 9999]
    for content in damaged:
        file.write_bytes(content)
        assert read_code("module") is None
        assert not file.exists()


@pytest.mark.skipif(os.name == "nt", reason="owners and links of this kind are not those of Windows")
def test_a_file_of_another_user_or_a_link_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_code("module", CODE)
    (folder / "linked.code").symlink_to(folder / "module.code")
    assert read_code("linked") is None
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert read_code("module") is None


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

    (file,) = (tmp_path / "cache").glob("machine-code/*/scan_whole.code")
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
