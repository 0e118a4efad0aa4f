"""Answers to held-out tasks: read as they were written, and as from a stranger."""

from pathlib import Path

import pytest

from napkin.errors import CorruptFile
from napkin.report.page import render_report
from napkin.runs.run_record import Answered, Answers, RunRecord, Said, read_newest_answers, write_answers

RIGHT = Answered((Said("user", "1+1="), Said("assistant", "2")), 1.0, 2, "done")
WRONG = Answered((Said("user", "<b>&"), Said("assistant", "<script>\0\x1b[2J")), 0.0, 3, "cut", "it raised")


def test_the_newest_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_newest_answers(tmp_path) is None
    write_answers(tmp_path, 9, [WRONG])
    write_answers(tmp_path, 10, [RIGHT, WRONG])
    (tmp_path / "answers" / "notes.jsonl").write_text("mine")
    assert read_newest_answers(tmp_path) == Answers(10, (RIGHT, WRONG))


@pytest.mark.parametrize("damage", [b"{", b"[]\n", b'{"reward": 1}\n', b'{"other": 1}\n', b"\xff\n", b"[" * 100_000])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    write_answers(tmp_path, 1, [RIGHT])
    (tmp_path / "answers" / "step-00000001.jsonl").write_bytes(damage)
    with pytest.raises(CorruptFile, match=r"step-00000001\.jsonl' is malformed"):
        read_newest_answers(tmp_path)


def test_the_report_shows_them_escaped_the_wrong_ones_first() -> None:
    record = RunRecord("run", "", None, (), None, None, None, answers=Answers(10, (RIGHT, WRONG)))
    page = render_report(record)
    assert "&lt;b&gt;&amp;" in page
    assert "<script>\0" not in page
    assert "\0" not in page
    assert page.index("&lt;script&gt;") < page.index("1+1=")
    assert "Of 2 greedy answers" in page
