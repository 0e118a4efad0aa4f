"""Runs a function in a process of its own: peers patch torch for good, need limits, and leave memory behind."""

import importlib
import importlib.metadata
import json
import os
import resource
import signal
import subprocess
import sys
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


def in_process(function: str, *arguments: Any, seconds: int = 600, gibibytes: int = 12) -> Any:
    """What `module:name` returns for arguments that JSON can hold, or a string that says why there is nothing.

    Limits are of processor time and of memory.
    """
    limits = (str(seconds), str(gibibytes))
    command = [sys.executable, "-m", "calculators.processes", function, json.dumps(arguments), *limits]
    path = [str(HERE), str(HERE.parent / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode == -signal.SIGXCPU:
        return f"no answer in {seconds} s"
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
    """Run one function under limits and print what it returned."""
    function, arguments, seconds, gibibytes = sys.argv[1:]
    limit = int(gibibytes) * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    print("\n" + MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
