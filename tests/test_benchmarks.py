"""Scripts of benchmarks/: each says what it does and takes, without measuring anything."""

import ast
import json
import re
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


def test_every_benchmark_names_the_machine() -> None:
    # All by one function; tuning_beside_trl.py prints the heading of its callers. Those left out start others, or
    # measure nothing.
    left_out = {"curation.py", "gallery.py", "language_corpus.py"}
    silent = [
        Path(script).name
        for script in SCRIPTS
        if not re.search(r"\bheading\(|from tuning_beside_trl import", Path(script).read_text(encoding="utf-8"))
    ]
    assert set(silent) == left_out


def test_readme_names_every_file_of_benchmarks() -> None:
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    names = [path.stem for path in BENCHMARKS.glob("*.py")]
    assert [name for name in names if f"`{name}`" not in readme] == []


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
        written = ast.get_docstring(ast.parse(Path(script).read_text(encoding="utf-8")))
        assert written is not None, script
        # The title and whatever else the docstring says: an option may follow, but nothing is left out.
        assert " ".join(written.split()) in about, script
