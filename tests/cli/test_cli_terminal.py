"""What reaches the screen: one line of progress, no tracebacks from pipes, colour where there is a terminal."""

import doctest
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from napkin.cli import commands
from napkin.cli.common import progress, terminal

NAPKIN = [sys.executable, "-m", "napkin"]
LONG = "step 10000/10000  loss 9.123  12.3 k tok/s  MFU 45%  812 MB"


def run(*arguments: str | bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*NAPKIN, *arguments], capture_output=True, env={**os.environ, **environment}, check=False, timeout=300
    )


def test_the_examples_in_the_docstrings_are_true() -> None:
    assert all(doctest.testmod(module).failed == 0 for module in (commands, progress, terminal))


def test_a_line_of_progress_is_never_wider_than_the_terminal() -> None:
    name, left = "training runs/a-name-that-is-long", "12 min 03 s left"
    for width, fraction, details in itertools.product([20, 40, 77, 120], [None, 0.0, 0.37, 1.0], ["", LONG]):
        line = progress.compose_line(name, fraction, details, left, width=width)
        assert len(line.plain) <= width, (width, fraction, details)


def test_what_training_tells_fits_into_80_columns() -> None:
    assert progress.compose_line("training runs/run", 0.5, LONG, "12 min 03 s left", width=77).plain == (
        f"{LONG}  12 min 03 s left"
    )


def test_without_a_terminal_progress_is_a_line_at_a_time(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds, lines in ((1e9, 0), (0.0, 50)):
        monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", seconds)
        with progress.progress_line("working") as line:
            for done in range(50):
                line(done, 100, "x" * 200)
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", lines)
        assert all(each.startswith("working") for each in err.splitlines())


def test_time_left_is_told_from_the_steps_of_this_process(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with progress.progress_line("training") as line:
        line(900, 1000)
        time.sleep(0.02)
        line(901, 1000)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "training  90%"
    # One step took 20 ms or more, and 99 are left; over all 901 it would be milliseconds.
    assert re.fullmatch(r"training  90%  (\S+ s|\d+ min \d+ s) left", second)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_on_a_terminal_of_80_columns_progress_is_one_line_in_colour(place: Path) -> None:
    frames = on_a_terminal("tokenizer", "train", "docs", "--out", "new.json", columns=80)
    spinning = [frame for frame in frames if re.search("[⠀-⣿]", frame)]
    assert spinning
    assert all(len(bare(frame)) < 80 for frame in spinning)
    assert any("\x1b[3" in frame for frame in spinning)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no pseudo-terminals")
def test_no_color_is_respected(place: Path) -> None:
    frames = on_a_terminal("tokenizer", "train", "docs", "--out", "new.json", columns=80, NO_COLOR="1")
    assert not any(re.search(r"\x1b\[(3\d|4\d|9\d|38|48)[;m]", frame) for frame in frames)


def test_output_that_is_no_terminal_has_no_colour(place: Path) -> None:
    done = run("tokenizer", "train", "docs", "--out", "new.json")
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout + done.stderr


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("arguments", ["recipe", "train --help", "--help", "hardware"])
def test_a_reader_that_leaves_early_is_no_error_to_tell(arguments: str) -> None:
    process = subprocess.Popen(
        [*NAPKIN, *arguments.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_the_output_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*NAPKIN, "recipe"], stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"recipe: the output cannot be written")
    assert done.stderr.count(b"\n") == 1


def test_an_encoding_without_the_character_is_no_error() -> None:
    done = run("train", "--help", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere arguments are text")
def test_arguments_that_are_no_text_are_refused() -> None:
    done = run("tokenizer", "train", b"caf\xe9.txt")
    assert done.returncode == 2
    assert done.stderr == (
        b"tokenizer: argument 'caf\\udce9.txt' is not UTF-8 at character 3: rename the file, or convert the text\n"
    )


def test_a_name_cannot_steer_the_terminal(napkin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert napkin("report", "a\x1b[31m\nb").err == (
        "report: 'a\\x1b[31m b' is not a run, it does not exist: name a folder that `napkin train` made\n"
    )


def on_a_terminal(*arguments: str, columns: int, **environment: str) -> list[str]:
    """What a command writes to a terminal, cut where the cursor goes back to the line's beginning."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    unset = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"}
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        [*NAPKIN, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**inherited, "TERM": "xterm-256color", **environment},
    )
    os.close(theirs)
    written = b""
    try:
        while data := os.read(ours, 2**16):
            written += data
    except OSError:  # Linux says so that the other side has closed.
        pass
    os.close(ours)
    assert process.wait() == 0
    return re.split(r"\r|\n", written.decode())


def bare(frame: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame)
