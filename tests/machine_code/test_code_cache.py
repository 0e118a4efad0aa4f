"""Whatever lies in a cache of machine code, only what this user's napkin wrote whole is run."""

import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from napkin.machine_code import loading
from napkin.machine_code.loading import CodeCache

CODE = {"first": b"\x7fELF" + bytes(range(256)), "second": b"\n{}\n", "third": b""}


@pytest.fixture
def cache(tmp_path: Path) -> CodeCache:
    cache = CodeCache("napkin.tokenizer.numba")
    cache.folder = tmp_path
    return cache


def test_what_was_written_is_read(cache: CodeCache) -> None:
    cache.write("module", CODE)
    assert cache.has("module")
    assert cache.read("module") == CODE
    assert cache.read("another") is None


def test_a_file_that_lacks_bytes_or_has_other_ones_is_removed(cache: CodeCache, tmp_path: Path) -> None:
    cache.write("module", CODE)
    file = tmp_path / "module.code"
    whole, choose = file.read_bytes(), random.Random(0)
    damaged = [whole[:length] for length in range(len(whole))]
    for _ in range(500):
        flipped = bytearray(whole)
        flipped[choose.randrange(len(whole))] ^= 1 << choose.randrange(8)
        damaged.append(bytes(flipped))
    damaged += [whole + b"\0", pickle.dumps(CODE), b"\xff" * 300, whole[:65] + b"[[[" * 9999]
    for content in damaged:
        file.write_bytes(content)
        assert cache.read("module") is None
        assert not file.exists()


@pytest.mark.skipif(os.name == "nt", reason="owners and links of this kind are not those of Windows")
def test_a_file_of_another_user_or_a_link_is_not_read(
    cache: CodeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write("module", CODE)
    (tmp_path / "linked.code").symlink_to(tmp_path / "module.code")
    assert cache.read("linked") is None
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert cache.read("module") is None


def test_packages_have_folders_of_their_own_and_other_sources_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("package_a", "package_b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    folders = [CodeCache("package_a").folder, CodeCache("package_b").folder]
    (tmp_path / "package_a" / "module.py").write_text("x = 1\n")
    folders.append(CodeCache("package_a").folder)
    (tmp_path / "package_a" / "module.py").write_text("x = 2\n")
    folders.append(CodeCache("package_a").folder)
    assert len(set(folders)) == 4
    assert CodeCache("package_a").folder == folders[-1]


def test_nobody_waits_without_end_for_a_process_that_is_suspended(
    cache: CodeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "MOST_SECONDS", 0.1)
    with cache.locked("module"), cache.locked("module"):
        cache.write("module", {"function": b"code"})
    assert cache.read("module") == {"function": b"code"}


def test_a_system_without_flags_for_links_has_locks_all_the_same(tmp_path: Path) -> None:
    # As on Windows.
    program = f"""
import os
del os.O_NOFOLLOW, os.O_CLOEXEC
from pathlib import Path
from napkin.machine_code.loading import CodeCache
cache = CodeCache("napkin.tokenizer.numba")
cache.folder = Path({str(tmp_path)!r})
with cache.locked("module"):
    print("locked")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "locked\n"
