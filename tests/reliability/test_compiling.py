"""A run that compiles its blocks, stopped while the compiler works."""

import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from napkin.recipe.toml_file import format_recipe
from oracles.tiny_run import tiny_recipe
from reliability.harness import Command, Napkin, assert_same_run, checkpoints, start_python, wait_until

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")

# Answers what it is asked as g++ does; what it is to compile keeps it and a child busy.
SLOW_COMPILER = """#!/bin/sh
case " $* " in
*" -o "*) sleep 600 & echo $! >> {pids}; wait ;;
*) exec g++ "$@" ;;
esac
"""
TRAIN = ("train", "recipe.toml", "--run", "run")


def write_recipe(folder: Path) -> None:
    recipe = tiny_recipe(".", steps=4, precision="fp32", compile="on")
    (folder / "recipe.toml").write_text(format_recipe(recipe))


def start(folder: Path, *arguments: str, compiler: Path | str = "g++") -> Command:
    """In an interpreter of its own, with a cache of its own: torch reads both once."""
    cache = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    return start_python(folder, "-m", "napkin", *arguments, environment=cache)


@pytest.mark.torture
@pytest.mark.parametrize("what", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_compiler_and_leaves_a_run_that_resumes(napkin: Napkin, what: signal.Signals) -> None:
    write_recipe(napkin.folder)
    pids, compiler = napkin.folder / "pids", napkin.folder / "slow-g++"
    compiler.write_text(SLOW_COMPILER.format(pids=pids))
    compiler.chmod(0o755)
    command = start(napkin.folder, *TRAIN, compiler=compiler)
    wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"), command)
    # To the process alone, as a batch system does; a terminal's Ctrl-C does not reach the compiler either.
    command.send(what)
    assert command.wait() == 128 + what
    assert [line.split(":")[0] for line in command.errors if not line.startswith("compiling")] == [what.name]
    assert checkpoints(napkin.folder / "run") == [0]
    assert not [pid for pid in map(int, pids.read_text().split()) if is_alive(pid)]


@pytest.mark.torture
@pytest.mark.parametrize("what", [signal.SIGTERM, signal.SIGKILL])
def test_wherever_compiling_was_stopped_the_run_resumes_as_one_that_was_not(
    napkin: Napkin, what: signal.Signals
) -> None:
    write_recipe(napkin.folder)
    compiled = napkin.folder / "compiled"
    # So many pieces of machine code are there when the signal comes.
    for there in (0, 1, 4, 9):
        shutil.rmtree(napkin.folder / "run", ignore_errors=True)
        shutil.rmtree(compiled, ignore_errors=True)
        command = start(napkin.folder, *TRAIN)
        wait_until(lambda: begun(compiled) and len(files(compiled, ".so")) >= there, command)  # noqa: B023
        command.send(what)
        assert command.wait() == (-what if what == signal.SIGKILL else 128 + what)
        resumed = start(napkin.folder, "resume", "run")
        assert resumed.wait() == 0, resumed.errors
        if not (napkin.folder / "whole").exists():
            assert start(napkin.folder, "train", "recipe.toml", "--run", "whole").wait() == 0
        assert_same_run(napkin.folder / "run", napkin.folder / "whole")


def begun(compiled: Path) -> bool:
    """Whether there is C++ to be compiled."""
    return bool(files(compiled, ".cpp"))


def files(folder: Path, suffix: str) -> list[str]:
    """Those below a folder, in which names come and go."""
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith(suffix)]


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
