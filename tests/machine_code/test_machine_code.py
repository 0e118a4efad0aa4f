"""Compiled functions of a package: built in a process of their own, with the options they ask for, and loaded."""

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from napkin.machine_code.compiled_function import CompiledFunction
from napkin.machine_code.loading import MachineCode

# A sum of float32 from 2^24 on: in order, each further 1 is lost; in any order, they are summed beside it.
SUMS = """
import numpy as np
from napkin.machine_code.compiled_function import CompiledFunction, jitted, jitted_with

def summed(n):
    total = np.float32(2**24)
    for i in range(n):
        total += np.float32(i & 1)
    return np.int64(total)

in_order = jitted(summed)
in_any_order = jitted_with(fastmath={"reassoc"})(summed)
inlined = jitted_with(inline="always")(summed)

@CompiledFunction
def strict(n):
    return in_order(n)

@CompiledFunction.with_options(fastmath={"reassoc"})
def fast(n):
    return inlined(n)

@CompiledFunction.with_options(fastmath={"reassoc"})
def fast_with_strict(n):
    return in_order(n)

@CompiledFunction
def strict_with_fast(n):
    return in_any_order(n)

@CompiledFunction
def nothing(n):
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "__init__.py").touch()
    (tmp_path / "made" / "sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("NAPKIN_CACHE_DIR", str(tmp_path / "cache"))
    return "made"


@pytest.mark.thorough
def test_functions_are_compiled_with_their_own_options_and_built_once(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = MachineCode(package, "building")
    assert code.not_cached(("sums",)) == ["sums"]
    threads = [Thread(target=code.load, args=("sums",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert capsys.readouterr().err == "building\n"
    assert code.is_loaded(("sums",))

    sums = import_module("made.sums")
    assert sums.strict(1000) == sums.fast_with_strict(1000) == 2**24
    assert sums.fast(1000) > 2**24
    assert sums.strict_with_fast(1000) > 2**24
    assert sums.nothing(3) == 0

    # Another process: nothing is compiled.
    for name in ("made.sums", "made"):
        monkeypatch.delitem(sys.modules, name)
    again = MachineCode(package, "building")
    assert not again.is_loaded(("sums",))
    assert again.not_cached(("sums",)) == []
    again.load("sums")
    assert capsys.readouterr().err == ""

    # Its machine code runs without numba.
    program = f"""
import sys
from napkin.machine_code.loading import MachineCode
MachineCode({package!r}, "building").load("sums")
from {package}.sums import strict
print(strict(1000), "numba" in sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    assert subprocess.check_output([sys.executable, "-c", program], env=environment, text=True) == f"{2**24} False\n"


@pytest.mark.thorough
@pytest.mark.skipif(os.name == "nt", reason="Windows has no limits of this kind")
def test_where_no_file_can_be_written_a_module_is_compiled_once_per_process(package: str, tmp_path: Path) -> None:
    # To be compiled it is imported.
    with open(tmp_path / package / "sums.py", "a") as source:
        source.write(f"open({str(tmp_path / 'imports')!r}, 'a').write('imported\\n')\n")
    program = f"""
import resource
from napkin.machine_code.loading import MachineCode
# As on a full disk: beyond so many bytes a write fails.
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
MachineCode({package!r}, "building").load("sums")
from {package}.sums import strict
print(strict(1000))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=True)
    assert done.stdout == f"{2**24}\n"
    message, line = done.stderr.splitlines()
    assert message == "building"
    assert "keeps no machine code (" in line
    assert (tmp_path / "imports").read_text() == "imported\n"


@pytest.mark.thorough
def test_processes_that_start_together_compile_a_module_once(package: str, tmp_path: Path) -> None:
    # To be compiled it is imported.
    with open(tmp_path / package / "sums.py", "a") as source:
        source.write(f"open({str(tmp_path / 'imports')!r}, 'a').write('imported\\n')\n")
    code = f"from napkin.machine_code.loading import MachineCode; MachineCode({package!r}, '').build('sums')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert (tmp_path / "imports").read_text() == "imported\n"
    assert [path.name for path in (tmp_path / "cache").rglob("*.code")] == ["sums.code"]


def test_a_function_that_needs_the_runtime_of_numba_is_refused() -> None:
    def makes_an_array(n: int) -> int:
        numbers = np.empty(n, np.int64)
        for i in range(n):
            numbers[i] = i
        return numbers[n // 2]

    with pytest.raises(TypeError, match="makes_an_array"):
        CompiledFunction(makes_an_array)(9)
