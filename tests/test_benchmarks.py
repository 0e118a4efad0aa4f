"""Scripts of benchmarks/: each says what it does and takes, without measuring anything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = sorted(str(path) for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8"))
HELPS = """
import contextlib, io, json, pathlib, runpy, sys
told = {}
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    sys.path[0] = str(pathlib.Path(script).parent)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            runpy.run_path(script, run_name="__main__")
            status = None
        except SystemExit as end:
            status = end.code
        except BaseException as error:
            status = repr(error)
    told[script] = status, said.getvalue()
print(json.dumps(told))
"""


@pytest.mark.thorough
def test_every_benchmark_answers_help() -> None:
    # One process for all: what takes seconds is the import of torch.
    command = [sys.executable, "-c", HELPS, *SCRIPTS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert {script: status for script, (status, _) in told.items() if status != 0} == {}
    for script, (_, said) in told.items():
        about = " ".join(said.split())
        assert "--help" in about, script
        assert len(about) > 100, script
