"""The checks of `napkin doctor`: what this machine has, what it lacks, what is broken. Each is tried, not assumed."""

import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from napkin.child_process import run_program
from napkin.files import cache_folder, free_disk_bytes
from napkin.hardware.host import read_limits, usable_cores
from napkin.machine_code.processor import cpu_name, instruction_sets
from napkin.units import format_bytes, format_gibibytes, format_seconds

State = Literal["fine", "lacking", "broken"]

LIMIT_SECONDS: float = 60
"""The most seconds of a program that a check starts."""
LITTLE_DISK = 10**9
OPTIONAL = {
    "triton": "the GPU forms of the kernels, and torch.compile on a GPU",
    "tensorboard": "metrics in TensorBoard",
    "wandb": "metrics in Weights & Biases",
    "trackio": "metrics in trackio",
}
LIBRARIES = """
import importlib, json, os, sys
sys.path[:] = json.loads(sys.argv[1])
found = {}
for name in ("numpy", "numba", "torch"):
    try:
        found[name] = importlib.import_module(name).__version__
    except BaseException as error:
        found[name] = None
        found[f"{name} error"] = f"{type(error).__name__}: {error}".partition(chr(10))[0]
if found["torch"]:
    import torch
    found["product"] = float((torch.ones(8, 8) @ torch.ones(8, 8)).sum())
    found["cuda build"] = torch.version.cuda or torch.version.hip
    found["gpus"] = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            found["gpus"].append([properties.name, properties.total_memory])
    from napkin.hardware.calibration_cache import calibration_path, load_calibration
    for device in ("cpu", *(["cuda"] if found["gpus"] else [])):
        known = load_calibration(device)
        if known:
            age = os.path.getmtime(calibration_path(known.machine))
            busy = known.conditions.describe() if known.disturbed else None
            found[f"calibration {device}"] = [str(calibration_path(known.machine)), age, busy]
    from napkin.hardware.host import use_all_cores
    from napkin.kernels.operator_forms import kept_choices
    use_all_cores()
    found["forms"] = {}
    for choice in kept_choices():
        forms = found["forms"].setdefault(choice.operator, {})
        forms[choice.form] = forms.get(choice.form, 0) + 1
print(json.dumps(found))
"""
PROGRAM = "#include <Python.h>\n#include <vector>\nint main() { return std::vector<int>{0}[0]; }\n"


@dataclass(frozen=True)
class Finding:
    """One line of the report of `napkin doctor`."""

    what: str
    found: str
    state: State = "fine"
    remedy: str = ""
    """The way out, where something is lacking or broken."""


class _Done(NamedTuple):
    """A program that has ended."""

    returncode: int
    stdout: str
    stderr: str


def examine() -> list[Finding]:
    """All findings, in the order in which they are printed; the slow checks run at the same time."""
    checks: list[Callable[[], Iterator[Finding]]] = [_processor, _memory, _libraries, _compiler, _optional, _caches]
    with ThreadPoolExecutor(len(checks)) as pool:
        return [finding for findings in pool.map(lambda check: list(check()), checks) for finding in findings]


def _processor() -> Iterator[Finding]:
    yield Finding("processor", cpu_name())
    known = instruction_sets()
    if known is None:
        yield Finding("instructions", "not reported by this system")
    elif known:
        yield Finding("instructions", ", ".join(known))
    else:
        remedy = "kernels are slow: nothing can be installed against that"
        yield Finding("instructions", "none of AVX2, AVX-512, AMX, NEON and SVE", "lacking", remedy)
    limit = read_limits().cores
    granted = f"; the control group grants {limit:g}" if math.isfinite(limit) else ""
    yield Finding("cores", f"{usable_cores()} usable of {os.cpu_count()}{granted}")


def _memory() -> Iterator[Finding]:
    memory, limits = psutil.virtual_memory(), read_limits()
    total, available = min(memory.total, limits.memory_bytes), min(memory.available, limits.available_bytes)
    limited = ", the control group's limit" if limits.memory_bytes < memory.total else ""
    yield Finding("memory", f"{format_gibibytes(total)}{limited}; {format_gibibytes(available)} available")


def _libraries() -> Iterator[Finding]:
    import napkin

    yield Finding("napkin", f"{napkin.__version__}, in {Path(napkin.__file__).parent}")
    yield Finding("python", f"{platform.python_version()} ({sys.executable}), {platform.platform(terse=True)}")
    libraries, failure = _run_libraries()
    for name in ("torch", "numba", "numpy"):
        if libraries.get(name):
            yield Finding(name, str(libraries[name]))
        else:
            error = libraries.get(f"{name} error") or failure or "it cannot be imported"
            yield Finding(name, str(error), "broken", f"reinstall it: pip install --force-reinstall {name}")
    if libraries.get("torch") and libraries["product"] != 512:
        yield Finding("matrix product", f"ones give {libraries['product']}", "broken", "reinstall torch")
    yield from _gpus(libraries)
    for device in ("cpu", "cuda"):
        known = libraries.get(f"calibration {device}")
        if known:
            age = f"of {format_seconds(max(0.0, time.time() - known[1]))} ago, in {known[0]}"
            disturbed = f"; on a busy machine, where {known[2]}" if known[2] else ""
            remedy = f"measured again when a plan starts quiet, or by: napkin calibrate --device {device}"
            remedy = remedy if known[2] else ""
            yield Finding(f"calibration ({device})", age + disturbed, "lacking" if known[2] else "fine", remedy)
        elif device == "cpu" and libraries.get("torch"):
            remedy = "the first plan measures this machine; or now: napkin calibrate"
            yield Finding("calibration (cpu)", "none yet", "lacking", remedy)
    for operator, forms in libraries.get("forms", {}).items():
        chosen = ", ".join(f"{form} for {n} shape{'s'[: n > 1]}" for form, n in forms.items())
        yield Finding(f"fastest {operator}", f"{chosen}; see `napkin bench forms`")


def _run_libraries() -> tuple[dict, str]:
    """The report on the libraries from a separate process, or why it ended: a library that crashes ends that process
    alone."""
    paths = json.dumps([os.path.abspath(path) for path in sys.path if path])
    done = _run([sys.executable, "-P", "-c", LIBRARIES, paths])
    if isinstance(done, str):
        return {}, done
    try:
        return json.loads(done.stdout.splitlines()[-1]), ""
    except (json.JSONDecodeError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {}, last


def _gpus(found: dict) -> Iterator[Finding]:
    driver = _driver()
    for name, size in found.get("gpus", []):
        yield Finding("GPU", f"{name}, {format_gibibytes(size)}{f', driver {driver}' if driver else ''}")
    if found.get("gpus") or not found.get("torch"):
        return
    if driver and not found.get("cuda build"):
        remedy = "install the build of torch for GPUs: docs/install.md"
        yield Finding("GPU", f"driver {driver}, but this torch is built for CPUs alone", "lacking", remedy)
    elif driver:
        remedy = "see whether `nvidia-smi` works, and whether CUDA_VISIBLE_DEVICES hides the GPU"
        yield Finding("GPU", f"driver {driver}, but torch finds none", "broken", remedy)
    else:
        yield Finding("GPU", "none", "lacking", "a CPU trains small models; `napkin plan --on H100` plans for a GPU")


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    done = _run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if isinstance(done, str) or done.returncode or not done.stdout.strip():
        return None
    return done.stdout.split()[0]


def _compiler() -> Iterator[Finding]:
    """Compile, link and run a program: that finds missing headers and failing linkers too."""
    name = os.environ.get("CXX") or next((each for each in ("g++", "clang++", "c++") if shutil.which(each)), "g++")
    remedy = "install one, with Python's headers (apt-get install g++ python3-dev); until then nothing is compiled"
    if shutil.which(name) is None:
        yield Finding("C++ compiler", f"{name} is not there, torch.compile needs one on a CPU", "lacking", remedy)
        return
    import sysconfig

    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "try.cpp"), Path(folder, "try")
        source.write_text(PROGRAM)
        done = _run([name, f"-I{sysconfig.get_paths()['include']}", str(source), "-o", str(program)])
        if not isinstance(done, str) and done.returncode == 0:
            done = _run([str(program)])
            yield (
                Finding("C++ compiler", f"{shutil.which(name)}, a program compiles and runs")
                if not isinstance(done, str) and done.returncode == 0
                else Finding("C++ compiler", f"what {name} compiles does not run", "lacking", remedy)
            )
            return
    lines = [done] if isinstance(done, str) else done.stderr.splitlines()
    why = next((line.rpartition("error: ")[2] for line in lines if "error" in line), next(iter(lines), "it fails"))
    yield Finding("C++ compiler", f"{name} does not compile a program: {why.strip()}", "lacking", remedy)


def _optional() -> Iterator[Finding]:
    for name, use in OPTIONAL.items():
        try:
            yield Finding(name, f"{version(name)}, for {use}")
        except PackageNotFoundError:
            yield Finding(name, f"not installed; it is for {use}", "lacking", f"pip install {name}")


def _caches() -> Iterator[Finding]:
    folder = cache_folder()
    # The nearest one that exists says whether it can be made.
    existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    remedy = "choose another folder with the environment variable NAPKIN_CACHE_DIR"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("cache", f"'{folder}' cannot be written", "broken", remedy)
        return
    obstacle = _obstacle(existing) if existing == folder else None
    if obstacle:
        yield Finding("cache", f"'{folder}': {obstacle}", "broken", remedy)
    elif existing == folder:
        yield Finding("cache", f"{folder}, {format_bytes(_size(folder))}")
    else:
        yield Finding("cache", f"{folder}, nothing in it yet")
    free = free_disk_bytes(existing)
    state: State = "fine" if free >= LITTLE_DISK else "lacking"
    yield Finding("disk", f"{format_bytes(free)} free there", state, "" if state == "fine" else "make room")
    for place in ("machine-code", "torch"):
        if (folder / place).exists():
            why = _obstacle(folder / place)
            known = Finding(f"cache of {place}", f"{format_bytes(_size(folder / place))}, of this user alone")
            yield known if why is None else Finding(known.what, why, "broken", f"remove '{folder / place}'")


def _obstacle(path: Path) -> str | None:
    """The reason why a folder cannot keep machine code, if there is one."""
    if not hasattr(os, "geteuid"):
        return None
    status = path.lstat()
    if status.st_uid not in (os.geteuid(), 0):
        return "it belongs to another user"
    return "other users may write into it" if status.st_mode & 0o022 else None


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def _run(command: list[str]) -> _Done | str:
    """Run a program in the root folder; or why it did not end."""
    try:
        done = run_program(command, most_seconds=LIMIT_SECONDS)
    except TimeoutError as error:
        return f"error: {error}"
    except OSError as error:
        return f"error: it does not start ({error.strerror})"
    return _Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
