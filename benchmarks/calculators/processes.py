"""Runs a function in a process of its own: peers patch torch for good, need limits, and leave memory behind."""

import importlib
import importlib.metadata
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
MARK = "== result == "


def available(package: str | None) -> bool:
    """Whether a distribution of that name is installed."""
    try:
        return package is None or bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def in_process(function: str, *arguments: Any, seconds: float = 300, gibibytes: float = 12) -> Any:
    """What `module:name` returns for arguments that JSON can hold, or a string that says why there is nothing."""
    command = [sys.executable, "-m", "calculators.processes", function, json.dumps(arguments), str(gibibytes)]
    environment = os.environ | {"PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent / 'tests'}", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"no answer in {seconds:.0f} s"
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
    return (
        f"over {gibibytes:g} GiB" if "alloc" in last or "MemoryError" in last or done.returncode == -9 else last[:120]
    )


def peak_rss_bytes() -> int:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    function, arguments, gibibytes = sys.argv[1:]
    limit = int(float(gibibytes) * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    module, _, name = function.partition(":")
    begin = time.perf_counter()
    result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    print(f"{function} took {time.perf_counter() - begin:.1f} s", file=sys.stderr)
    print("\n" + MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
