"""A folder or a file that another user could have made or filled is not read."""

import os
import stat
from pathlib import Path

import pytest

from napkin.files import private_folder, read_private_file

pytestmark = pytest.mark.skipif(os.name == "nt", reason="owners and modes of this kind are not those of Windows")


def another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, all files belong to somebody else."""
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)


def test_a_new_folder_is_of_this_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert folder is not None
    assert folder == tmp_path / "a" / "b"
    assert folder is not None
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_an_own_folder_that_others_could_only_read_is_closed_to_them(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert private_folder(tmp_path) == tmp_path
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_into_which_others_may_write_is_refused_in_one_line(
    mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(mode)
    assert private_folder(tmp_path) is None
    told = capsys.readouterr().err
    assert "other users may write into it" in told
    assert told.count("\n") == 1


def test_a_folder_of_another_user_a_link_and_a_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "bad\x1b[31m\nname").touch()
    assert private_folder(tmp_path / "file") is None
    assert private_folder(tmp_path / "link") is None
    assert private_folder(tmp_path / "bad\x1b[31m\nname") is None
    assert private_folder(tmp_path / "file" / "below") is None
    another_user(monkeypatch)
    assert private_folder(tmp_path / "folder") is None
    told = capsys.readouterr().err
    assert told.count("it is not a folder") == 3
    assert told.count("it belongs to another user") == 1
    assert told.count("\n") == 5
    assert "\x1b" not in told


def test_only_regular_files_of_this_user_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"own")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "fifo")
    assert read_private_file(tmp_path / "file") == b"own"
    for name in ("link", "fifo", "missing", "."):
        assert read_private_file(tmp_path / name) is None
    another_user(monkeypatch)
    assert read_private_file(tmp_path / "file") is None
