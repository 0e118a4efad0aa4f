import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.files import (
    atomic_file,
    atomic_write_bytes,
    atomic_write_text,
    draft_folder,
    regular,
    temporary_name,
)


def test_written_bytes_and_text_are_read_back_unchanged(tmp_path: Path) -> None:
    data = bytes(range(256)) * 100
    atomic_write_bytes(tmp_path / "data", data)
    atomic_write_text(tmp_path / "text", "grün\r\n\rend\n")
    assert (tmp_path / "data").read_bytes() == data
    assert (tmp_path / "text").read_bytes() == b"gr\xc3\xbcn\r\n\rend\n"
    assert sorted(os.listdir(tmp_path)) == ["data", "text"]


def test_a_new_file_has_the_permissions_of_any_other_new_file(tmp_path: Path) -> None:
    (tmp_path / "ordinary").write_bytes(b"")
    atomic_write_bytes(tmp_path / "atomic", b"")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_the_name_is_free_while_the_block_runs(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "x", "wb") as file:
        file.write(b"half")
        file.flush()
        assert not (tmp_path / "x").exists()
    assert (tmp_path / "x").read_bytes() == b"half"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_block_that_raises_leaves_no_trace(tmp_path: Path, overwrite: bool) -> None:
    def write_half() -> None:
        with atomic_file(tmp_path / "x", "wb", overwrite=overwrite) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert os.listdir(tmp_path) == []


def test_an_existing_file_is_kept_unless_overwriting_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(NapkinError, match=r"x'.*overwritten: remove"):
        atomic_write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    atomic_write_bytes(path, b"new", overwrite=True)
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["x"]


def test_a_file_that_has_these_bytes_already_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "x"
    atomic_write_bytes(path, "grün\r\n".encode())
    before = path.stat()
    atomic_write_bytes(path, "grün\r\n".encode())
    atomic_write_text(path, "grün\r\n")
    after = path.stat()
    # All but the time of the last look at it.
    assert (after[:7], after.st_mtime_ns, after.st_ctime_ns) == (before[:7], before.st_mtime_ns, before.st_ctime_ns)
    for other in ("", "grün\n", "grün\r\n\n", "grun\r\n."):
        with pytest.raises(NapkinError, match="exists"):
            atomic_write_text(path, other)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert os.listdir(tmp_path) == ["x"]


def test_a_broken_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "x").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NapkinError, match="exists"):
        atomic_write_bytes(tmp_path / "x", b"new")


def test_a_file_that_appears_while_the_block_runs_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x"

    def write_late() -> None:
        with atomic_file(path, "wb") as file:
            file.write(b"late")
            path.write_bytes(b"early")

    with pytest.raises(NapkinError, match="exists"):
        write_late()
    assert path.read_bytes() == b"early"
    assert os.listdir(tmp_path) == ["x"]


def test_a_missing_folder_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(NapkinError, match="cannot be written") as caught:
        atomic_write_bytes(tmp_path / "missing" / "x", b"")
    assert "\n" not in str(caught.value)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NapkinError, match="cannot be written"):
        atomic_write_bytes(tmp_path / "file" / "x", b"")


def test_errors_of_other_files_keep_their_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="other"), atomic_file(tmp_path / "x", "wb"):
        (tmp_path / "other").read_bytes()


def test_a_file_that_outgrows_what_the_disk_gives_is_told_and_removed(tmp_path: Path) -> None:
    limit = 10_000
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
from napkin.errors import NapkinError
from napkin.files import atomic_write_bytes
try:
    atomic_write_bytes({str(tmp_path / "x")!r}, bytes({limit} + 1))
except NapkinError as error:
    print(error)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "x' cannot be written" in result.stdout
    assert os.listdir(tmp_path) == []


ABANDONED = f".x.{'0123' * 4}.tmp"


def test_what_a_killed_writer_has_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    kept = {".x.mine.tmp", ".x.0123.tmp", f".y.{'0123' * 4}.tmp", f".x.{'0123' * 4}.tmp.txt"}
    for name in (*kept, ABANDONED):
        (tmp_path / name).touch()
    atomic_write_bytes(tmp_path / "x", b"")
    assert set(os.listdir(tmp_path)) == {"x", *kept}
    (tmp_path / ABANDONED).touch()
    # The second writer of a file that was complete when the first was killed, and one that is refused.
    atomic_write_bytes(tmp_path / "x", b"")
    assert set(os.listdir(tmp_path)) == {"x", *kept}
    (tmp_path / ABANDONED).touch()
    with pytest.raises(NapkinError, match="exists"):
        atomic_write_bytes(tmp_path / "x", b"other")
    assert set(os.listdir(tmp_path)) == {"x", *kept}


def test_folders_that_killed_writers_have_left_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ABANDONED / "inner").mkdir(parents=True)
    with draft_folder(tmp_path / "x") as draft:
        assert os.listdir(tmp_path) == [draft.name]
        # Another process makes the same, and does not take ours for abandoned.
        with draft_folder(tmp_path / "x") as other:
            assert set(os.listdir(tmp_path)) == {draft.name, other.name}
        draft.rename(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"]


def test_two_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "x", "wb", overwrite=True) as first:
        first.write(b"first")
        atomic_write_bytes(tmp_path / "x", b"second", overwrite=True)
    assert (tmp_path / "x").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["x"]


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        with open(tmp_path / name, "rb", opener=regular) as file:
            assert file.read() == b"content"
    os.mkfifo(tmp_path / "fifo")
    for name, what in (("fifo", "a fifo"), ("/dev/zero", "a device")):
        with pytest.raises(OSError, match=f"{what}.*file"):
            regular(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        regular(tmp_path)


def test_the_drafts_of_two_files_with_long_names_that_begin_alike_are_told_apart(tmp_path: Path) -> None:
    library, digest = tmp_path / f"{'c' * 52}.main.so", tmp_path / f"{'c' * 52}.main.so.sha256"
    draft = temporary_name(library)
    draft.touch()
    atomic_write_text(digest, "0")
    assert draft.exists()
    atomic_write_text(library, "1")
    assert not draft.exists()
