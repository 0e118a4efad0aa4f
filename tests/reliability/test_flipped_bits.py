"""One flipped bit, in any file of a run: a message names what is wrong, or every result is what it would have been."""

import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from reliability.conftest import Tally
from reliability.harness import Command, Napkin, figures, weights

READING = (("runs", "run", "--json"), ("evaluate", "run", "--json"), ("generate", "run", "--tokens", "8", "--json"))
"""Commands that read a run; `napkin resume` comes after them."""
TORTURE_FLIPS = 20
"""Of each file."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, uninterrupted: Path, server: object) -> Path:
    """The uninterrupted run, evaluated: it has every file."""
    folder = tmp_path_factory.mktemp("finished")
    shutil.copytree(uninterrupted.parent, folder, dirs_exist_ok=True)
    assert Napkin(folder, server).run("evaluate", "run").status == 0  # type: ignore[arg-type]
    return folder / "run"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, uninterrupted: Path, server: object) -> Path:
    """The same run, killed half-way."""
    folder = tmp_path_factory.mktemp("killed")
    shutil.copytree(uninterrupted.parent, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "run")
    napkin = Napkin(folder, server)  # type: ignore[arg-type]
    command = napkin.run("train", "recipe.toml", "--run", "run", after_step=20, signals=[signal.SIGKILL])
    assert command.status == -signal.SIGKILL
    return folder / "run"


def files_of(run: Path) -> list[str]:
    """Files with bits to flip."""
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file() and path.stat().st_size)


def flip(file: Path, draw: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def assert_civil(command: Command) -> None:
    """Done, or refused in one line; never a traceback."""
    errors = command.err.read_text()
    assert command.status in (0, 2), errors
    assert "Traceback" not in errors
    assert command.status == 0 or command.errors


def results_of(napkin: Napkin, run: Path, commands: tuple[tuple[str, ...], ...]) -> Iterator[tuple[str, Command]]:
    """What each command says, as text that can be compared."""
    for arguments in commands:
        command = napkin.run(*arguments)
        assert_civil(command)
        if arguments[0] == "resume":
            yield json.dumps([figures(run), weights(run)]) if command.status == 0 else "", command
        else:
            yield command.out.read_text(), command


def outcome_of_flip(
    napkin: Napkin, original: Path, name: str, draw: random.Random, expected: list[str], commands: tuple
) -> Counter[str]:
    run = napkin.folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(original, run)
    flip(run / name, draw)
    flipped = (run / name).read_bytes()
    outcomes: Counter[str] = Counter()
    for wanted, (found, command) in zip(expected, results_of(napkin, run, commands), strict=True):
        if command.status == 2:
            outcomes["refused"] += 1
        elif command.errors:
            outcomes["named"] += 1
        else:
            assert found == wanted, f"a silent difference after a flip in {name}: {flipped!r}"
            outcomes["unharmed"] += 1
    return outcomes


def expected_results(napkin: Napkin, original: Path, uninterrupted: Path, commands: tuple) -> list[str]:
    run = napkin.folder / "run"
    shutil.copytree(original, run)
    expected = [found for found, command in results_of(napkin, run, commands) if command.status == 0]
    assert len(expected) == len(commands)
    if commands[-1][0] == "resume":
        assert expected[-1] == json.dumps([figures(uninterrupted), weights(uninterrupted)])
    return expected


SMALL = ("metrics.jsonl", "run.json", "recipe.toml", "plan.json", "measurement.json", "evaluation.json")


@pytest.mark.thorough
def test_no_flipped_bit_changes_what_is_listed_without_a_message(
    napkin: Napkin, finished: Path, uninterrupted: Path, tally: Tally
) -> None:
    commands = (READING[0],)
    expected = expected_results(napkin, finished, uninterrupted, commands)
    draw, flips = random.Random(0), 8
    for name in SMALL:
        for _ in range(flips):
            outcome_of_flip(napkin, finished, name, draw, expected, commands)
        tally(f"a bit flipped in {name}, runs", flips)


@pytest.mark.thorough
def test_a_run_with_a_flipped_bit_goes_on_or_says_why_not(
    napkin: Napkin, killed: Path, uninterrupted: Path, tally: Tally
) -> None:
    commands = (("resume", "run"),)
    expected = [json.dumps([figures(uninterrupted), weights(uninterrupted)])]
    draw = random.Random(1)
    for name in ("metrics.jsonl", "metrics.jsonl", "plan.json", "run.json", "recipe.toml"):
        outcome_of_flip(napkin, killed, name, draw, expected, commands)
        tally(f"a bit flipped in {name}, resume")


@pytest.mark.torture
@pytest.mark.parametrize("state", ["finished", "killed"])
def test_no_flipped_bit_in_any_file_changes_a_result_without_a_message(
    napkin: Napkin,
    state: str,
    uninterrupted: Path,
    request: pytest.FixtureRequest,
    tally: Tally,
    capsys: pytest.CaptureFixture[str],
) -> None:
    original: Path = request.getfixturevalue(state)
    commands = (*READING, ("resume", "run"))
    expected = expected_results(napkin, original, uninterrupted, commands)
    draw = random.Random(state)
    for name in files_of(original):
        outcomes: Counter[str] = Counter()
        for _ in range(TORTURE_FLIPS):
            outcomes += outcome_of_flip(napkin, original, name, draw, expected, commands)
        tally(f"a bit flipped in {name} of a {state} run", TORTURE_FLIPS)
        with capsys.disabled():
            counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
            print(f"\n{state}: {name}: {TORTURE_FLIPS} flips, {len(commands)} commands each: {counts}", end="")
