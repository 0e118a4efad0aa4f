"""The first hour on a GPU in one command: tests by layer, then speeds, and one report that says what failed and how to
repeat it.

    make gpu                                        what is needed is installed first
    python benchmarks/gpu_first_hour.py
    python benchmarks/gpu_first_hour.py --device cpu      the same on the CPU, smaller, to see that it runs

Layers are run from the device up: the machine, kernels beside plain forms, the allocator beside its replay, plans
beside meters, training, inference, speeds. Nothing stops at a failure. Each step is a child process with a limit of
minutes, and all of them together have --minutes; what has passed on this commit and device is kept in first-hour/ and
not run again. The exit status is 1 if a step failed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import msgspec
import torch

from napkin.files import atomic_write_text
from result_files import heading, write_result

ROOT = Path(__file__).parent.parent
LINES_OF_A_FAILURE = 12
Outcome = Literal["passed", "failed", "too long", "not run"]


@dataclass(frozen=True)
class Step:
    """One command of the hour."""

    layer: str
    name: str
    arguments: tuple[str, ...]
    """Of this Python."""
    minutes: float
    """After which it is stopped."""
    on_cpu: tuple[str, ...] | None = ()
    """Further arguments for the CPU; None: the step needs a GPU."""


def _tests(layer: str, name: str, file: str, minutes: float, *, select: str = "", on_cpu: bool = True) -> Step:
    arguments = ("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", f"tests/gpu/{file}")
    return Step(layer, name, (*arguments, *(("-k", select) if select else ())), minutes, () if on_cpu else None)


STEPS = (
    _tests("device", "the host names the GPU", "test_gpu_memory.py", 2, select="host", on_cpu=False),
    Step("device", "doctor", ("-m", "napkin", "doctor"), 2),
    Step("kernels", "Triton kernels beside plain forms in fp64", ("benchmarks/gpu_kernels.py", "--check"), 5, None),
    _tests("allocator", "replay beside memory_stats", "test_gpu_memory.py", 2, select="allocator", on_cpu=False),
    _tests("allocator", "counted steps of plain modules", "test_gpu_memory.py", 3, select="modules", on_cpu=False),
    Step("plans", "32 recipes: plan beside meter", ("benchmarks/gpu_plan.py",), 8, ("--device", "cpu")),
    _tests("training", "gradients, losses, resuming", "test_gpu_training.py", 6),
    _tests("inference", "greedy text and the engine", "test_gpu_inference.py", 4),
    Step("speed", "kernels beside torch", ("benchmarks/gpu_kernels.py",), 6, None),
    Step("speed", "training beside peers", ("benchmarks/gpu_training.py",), 9, ("--tiny", "--device", "cpu")),
)  # fmt: skip


class Found(msgspec.Struct, frozen=True):
    """What came of a step."""

    outcome: Outcome
    seconds: float
    output: list[str]


def run(step: Step, device: str, seconds: float) -> Found:
    """Run a step in a child process for at most `seconds`."""
    begin = time.perf_counter()
    environment = os.environ | ({"NAPKIN_GPU_TESTS": "cpu"} if device == "cpu" else {})
    try:
        done = subprocess.run(
            [sys.executable, *command(step, device)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        return Found("too long", time.perf_counter() - begin, _lines(error.output or b""))
    outcome: Outcome = "passed" if done.returncode == 0 else "failed"
    return Found(outcome, time.perf_counter() - begin, _lines(done.stdout))


def _lines(output: bytes) -> list[str]:
    return output.decode(errors="replace").splitlines()


def command(step: Step, device: str) -> list[str]:
    """Return the arguments of Python that repeat a step."""
    return [*step.arguments, *((step.on_cpu or ()) if device == "cpu" else ())]


def report(found: dict[str, Found], device: str) -> list[str]:
    """Return the lines of the report: outcomes, failures with the command that repeats each, speeds."""
    lines = ["| layer | step | outcome | seconds |", "|---|---|---|---|"]
    for step in STEPS:
        each = found[step.name]
        lines.append(f"| {step.layer} | {step.name} | {each.outcome} | {each.seconds:.0f} |")
    prefix = "NAPKIN_GPU_TESTS=cpu " if device == "cpu" else ""
    for step in STEPS:
        each = found[step.name]
        if each.outcome in ("failed", "too long"):
            again = " ".join(["python", *command(step, device)])
            lines += ["", f"## {step.name}: {each.outcome}", "", f"    {prefix}{again}", "", "```"]
            lines += [*each.output[-LINES_OF_A_FAILURE:], "```"]
    for step in STEPS:
        if step.layer == "speed" and found[step.name].outcome == "passed":
            lines += ["", f"## {step.name}", "", *found[step.name].output]
    return lines


def main() -> int:
    """Run what has not passed yet, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=30, help="for all steps together (default: 30)")
    parser.add_argument("--again", action="store_true", help="run also what has passed")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use: --device cpu shows that the steps run")
    machine = machine_of(options.device)
    head = heading(f"The first hour on {machine.name}", machine.versions)
    file = ROOT / "first-hour" / f"{options.device}.json"
    passed = {} if options.again else kept(file, machine)
    end = time.monotonic() + 60 * options.minutes
    found: dict[str, Found] = {}
    for step in STEPS:
        left = min(60 * step.minutes, end - time.monotonic())
        if step.name in passed:
            found[step.name] = passed[step.name]
        elif left <= 0 or (options.device == "cpu" and step.on_cpu is None):
            found[step.name] = Found("not run", 0.0, [])
        else:
            print(f"{step.layer}: {step.name} …", flush=True)
            found[step.name] = run(step, options.device, left)
            print(f"    {found[step.name].outcome} after {found[step.name].seconds:.0f} s", flush=True)
        keep(file, machine, passed | found)
    lines = report(found, options.device)
    print("\n".join(lines))
    write_result(f"gpu-first-hour-{options.device}", [*head, *lines])
    return int(any(each.outcome in ("failed", "too long") for each in found.values()))


class Machine(msgspec.Struct, frozen=True):
    """What steps have passed on: the device with its driver, versions with the commit, and the day."""

    name: str
    versions: str
    day: str


def machine_of(device: str) -> Machine:
    """Return the device, its driver, versions and the commit."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        name = f"{properties.name}, {properties.total_memory / 1e9:.1f} GB, {_driver()}, CUDA {torch.version.cuda}"
    else:
        name = "the CPU, in place of a GPU"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, commit {commit.stdout.strip()}"
    return Machine(name, versions, f"{datetime.now(UTC):%Y-%m-%d}")


def _driver() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
        return f"driver {subprocess.run(asked, capture_output=True, text=True).stdout.strip()}"
    except OSError:
        return "driver unknown"


def kept(path: Path, machine: Machine) -> dict[str, Found]:
    """Return what has passed on this machine, with these versions, on this commit and day."""
    try:
        raw = json.loads(path.read_bytes())
        if msgspec.convert(raw["machine"], Machine) != machine:
            return {}
        return {
            name: each
            for name, each in msgspec.convert(raw["found"], dict[str, Found]).items()
            if each.outcome == "passed"
        }
    except (OSError, ValueError, KeyError, msgspec.ValidationError):
        return {}


def keep(path: Path, machine: Machine, found: dict[str, Found]) -> None:
    """Keep what was found beside the machine."""
    path.parent.mkdir(exist_ok=True)
    atomic_write_text(path, json.dumps(msgspec.to_builtins({"machine": machine, "found": found})), overwrite=True)


if __name__ == "__main__":
    sys.exit(main())
