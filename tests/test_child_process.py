"""Child processes import nothing from the folder in which the user works, and their failure is one line."""

import ast
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import napkin
from napkin.child_process import failure_of, interrupts_wait, run_program, start_python

SOURCE = Path(napkin.__file__).parent


def test_a_module_in_the_current_folder_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("numba", "numpy", "json", "napkin", "sitecustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w'); raise SystemExit(7)")
    assert failure_of(start_python("import numpy, json; from napkin import errors")) is None
    assert not (tmp_path / "ran").exists()


def test_modules_are_found_where_this_process_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_the_user.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert failure_of(start_python("import of_the_user")) is None


def test_a_failure_is_told_in_one_line() -> None:
    assert failure_of(start_python("print('a lot' * 99); raise ValueError('what was wrong')")) == (
        "ValueError: what was wrong"
    )
    assert failure_of(start_python("import sys; sys.exit(3)")) == "exit status 3"
    killed = start_python("import os, sys; os.kill(os.getpid(), int(sys.argv[1]))", str(int(signal.SIGTERM)))
    assert failure_of(killed) == (f"signal {int(signal.SIGTERM)}" if os.name != "nt" else f"exit status {15}")


def test_ctrl_c_while_processes_are_started_is_answered_when_all_are_known() -> None:
    handler, known = signal.getsignal(signal.SIGINT), list[str]()

    def start() -> None:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            known.append("a process")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert known
    assert signal.getsignal(signal.SIGINT) is handler
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: interrupts_wait().__enter__()).result()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_program_begins_outside_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.name == "nt":
        pytest.skip("there is no pwd")
    monkeypatch.chdir(tmp_path)
    assert run_program(["pwd"]).stdout == b"/\n"
    assert run_program(["cat"], b"input").stdout == b"input"
    with pytest.raises(OSError, match="no_such_program"):
        run_program(["no_such_program"])


def test_no_other_part_starts_processes_but_the_compiler_for_torch_and_the_helper_that_forks_itself() -> None:
    starting = {"subprocess", "multiprocessing", "pty"}
    ways = ("system", "popen", "exec", "spawn", "posix_spawn", "fork")
    calls = {f"os.{name}" for name in dir(os) if name.startswith(ways)}
    names_of_calls = {call.removeprefix("os.") for call in calls}
    found: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            is_call = isinstance(node, ast.Attribute) and node.attr in names_of_calls and ast.unparse(node) in calls
            if is_call or any(name.split(".")[0] in starting for name in names):
                found.add(file.relative_to(SOURCE).as_posix())
    # A rehearsed script's calls of nvidia-smi are answered without a process.
    stand_in = "planning/rehearsal/stand_ins.py"
    assert found == {"child_process.py", "torch_compile.py", "grading/sandbox/fork_server.py", stand_in}
