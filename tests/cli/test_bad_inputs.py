"""Sixty bad inputs per command: status 2 and one line, or 0 where the input is right after all; nothing else."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from bad_inputs import BASES, TRIES, VALUES, Try, bad_inputs, make_files

from cli.conftest import Done, Napkin, contents

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
LIMIT_SECONDS = 60
QUICK = {
    "recipe": 20,
    "formats": 20,
    "hardware": 12,
    "fit": 8,
    "runs": 8,
    "tokenizer show": 8,
    "train": 6,
    "sweep": 6,
    "ladder": 6,
    "budget": 6,
    "export": 6,
    "launch": 12,
    "contamination": 8,
    "data run": 6,
    "data why": 6,
    "law fit": 8,
    "law predict": 8,
    "law compare": 6,
}
"""Tries of the ordinary suite."""


class Late(BaseException):
    """Raised in a command that takes too long; no command catches it."""


def complaint(
    done: Done, before: dict[str, bytes | None], after: dict[str, bytes | None], *, writes_text: bool = False
) -> str | None:
    """What is wrong with the answer to a bad input; None if it is right."""
    if "Traceback" in done.out + done.err:
        return "traceback"
    if done.status not in (0, 2):
        return f"status {done.status}"
    # What a model writes is given to a pipe as it is.
    if CONTROL.search(done.err) or (not writes_text and CONTROL.search(done.out.replace("\t", ""))):
        return "a control character passes through"
    if done.status == 2:
        # A plan that does not fit is printed before the line that says so.
        lines = [line for line in done.err.splitlines() if "warning: " not in line]
        if len(lines) != 1:
            return f"{len(lines)} lines"
        if len(lines[0]) > 3000:
            return f"a line of {len(lines[0])} characters"
        if after != before:
            return f"wrote {sorted(after.keys() ^ before.keys())}"
    return None


def attempt(napkin: Napkin, tried: Try) -> str | None:
    """Run one bad input, in time; what is wrong with the answer."""
    import signal

    def late(*_: object) -> None:
        raise Late

    before = contents()
    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_SECONDS)
    try:
        done = napkin(*tried.arguments)
    except Late:
        return "hangs"
    except BaseException as error:
        return f"raises {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    after = contents()
    return complaint(done, before, after, writes_text=tried.arguments[0] == "generate")


@pytest.fixture
def campaign(napkin: Napkin, place: Path) -> Callable[[str, int], dict[str, str]]:
    """Try bad inputs of a command; the failures."""

    def run(command: str, n: int) -> dict[str, str]:
        import shutil

        make_files(Path())
        known = set(Path().iterdir())
        failures: dict[str, str] = {}
        for tried in bad_inputs(command, n):
            wrong = attempt(napkin, tried)
            if wrong is not None:
                failures[tried.what] = wrong
            # What a right input has made.
            for path in set(Path().iterdir()) - known:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        return failures

    return run


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize("command", QUICK)
def test_some_bad_inputs_are_answered_with_one_line(campaign, command: str) -> None:
    assert campaign(command, QUICK[command]) == {}


@pytest.mark.torture
@pytest.mark.parametrize("command", BASES)
def test_sixty_bad_inputs_are_answered_with_one_line(campaign, command: str, record_property) -> None:
    failures = campaign(command, TRIES)
    print(f"\nbad inputs: {command}: {TRIES} tries, {len(failures)} failures", file=sys.__stdout__)
    assert failures == {}


@pytest.mark.torture
@pytest.mark.parametrize("kind", [kind for kind in VALUES if kind not in ("null", "lone surrogate")])
def test_a_process_of_its_own_answers_alike(place: Path, kind: str) -> None:
    make_files(Path())
    for arguments in (
        ["formats", VALUES[kind]],
        ["report", VALUES[kind]],
        ["recipe", f"--model.d-model={VALUES[kind]}"],
    ):
        before = contents()
        done = subprocess.run(
            [sys.executable, "-m", "napkin", *arguments],
            capture_output=True,
            text=True,
            errors="backslashreplace",
            check=False,
            timeout=LIMIT_SECONDS,
            env={**os.environ, "COLUMNS": "80"},
        )
        assert complaint(Done(done.returncode, done.stdout, done.stderr), before, contents()) is None, arguments


def test_there_are_sixty_different_tries_of_each_command() -> None:
    for command in BASES:
        tries = bad_inputs(command)
        assert len(tries) == TRIES, command
        assert max(Counter(str(tried.arguments) for tried in tries).values()) == 1, command
