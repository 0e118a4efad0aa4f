import os
import shutil
from pathlib import Path

import pytest

from napkin.data.mixing import TokenGuard
from napkin.data.token_file import TokenFile
from napkin.errors import CorruptFile
from oracles.tiny_run import write_tiny_text


@pytest.fixture
def tokens(tmp_path: Path) -> TokenFile:
    write_tiny_text(tmp_path)
    os.utime(tmp_path / "train.tokens", ns=(0, 0))
    return TokenFile.open(tmp_path / "train.tokens")


def test_a_file_that_lies_as_it_lay_is_no_news(tokens: TokenFile) -> None:
    TokenGuard(tokens).verify_unchanged()


def test_tokens_changed_in_place_are_refused(tokens: TokenFile) -> None:
    guard = TokenGuard(tokens)
    with open(tokens.path, "r+b") as file:
        file.seek(100)
        file.write(b"\x07\x00")
    with pytest.raises(CorruptFile, match=r"train\.tokens' was altered"):
        guard.verify_unchanged()


def test_a_file_that_has_shrunk_is_refused_unread(tokens: TokenFile) -> None:
    guard = TokenGuard(tokens)
    os.truncate(tokens.path, 10)
    with pytest.raises(CorruptFile, match="shrunk"):
        guard.verify_unchanged()


def test_a_new_date_on_the_same_tokens_is_no_change(tokens: TokenFile) -> None:
    guard = TokenGuard(tokens)
    os.utime(tokens.path)
    guard.verify_unchanged()
    guard.verify_unchanged()


def test_a_file_that_was_replaced_or_removed_is_still_mapped_as_it_was(tokens: TokenFile) -> None:
    guard = TokenGuard(tokens)
    other = tokens.path.with_name("other")
    shutil.copy(tokens.path, other)
    os.truncate(other, 10)
    os.replace(other, tokens.path)
    guard.verify_unchanged()
    tokens.path.unlink()
    guard.verify_unchanged()
    tokens.verify()
