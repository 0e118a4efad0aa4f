"""The one reader of TOML beside the standard library's, and every way in which a file can be refused."""

import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.errors import NapkinError
from napkin.toml_files import MAX_DOTS, MOST_BYTES, parse_toml, read_toml


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[model", "'f.toml' is not TOML"),
        (b"\xff\xfe", "'f.toml' is not TOML"),
        (b"x = " + b"[" * 8000, r"holds a value that cannot be read \(nested too deeply\): correct it"),
        (b"x = " + b"9" * 10_000, "holds a value that cannot be read .*: correct it"),
        (b"a" + b".a" * (MAX_DOTS + 1) + b" = 1", f"a key has more than {MAX_DOTS} dots"),
        (b"#" * (MOST_BYTES + 1), f"has more than {MOST_BYTES:,} bytes: name a list"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.toml").write_bytes(data)
    with pytest.raises(NapkinError, match=reason) as refused:
        read_toml("f.toml", "a list")
    assert "\n" not in str(refused.value)


def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("absent", "does not exist"), ("", "Is a directory"), ("pipe", "a fifo"), ("nul\0", "null")):
        with pytest.raises(NapkinError, match=re.escape(reason)) as refused:
            read_toml(tmp_path / name, "a list")
        assert str(refused.value).endswith(": name a list")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_bytes(b"\xef\xbb\xbfx = 1\n")
    assert read_toml(tmp_path / "f.toml", "a list") == {"x": 1}


@given(st.dictionaries(st.text("ab.\"'#\\\n", max_size=8), st.text("ab.\"'#\\\n", max_size=200), max_size=4))
def test_strings_of_many_dots_are_read_as_the_standard_library_reads_them(values: dict[str, str]) -> None:
    import tomli_w

    text = tomli_w.dumps(values)
    assert parse_toml(text) == tomllib.loads(text) == values
