"""The host: the cores and memory that this process may use, and its accelerators.

A container's limits count, and glibc's malloc is told whether to keep freed memory for the next tensor of the same
size.
"""

import contextlib
import ctypes
import functools
import math
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from napkin.machine_code.processor import cpu_name, has_native_bf16

# Limits apply to a group and everything below it, so the tightest between this process's group and the root counts.
# Inside a container, the path in /proc/self/cgroup may be that of the host; then the root of the mounted tree is the
# group itself.

_NO_LIMIT = 2**60  # version 1 writes "no limit" as a number near 2^63


@dataclass(frozen=True)
class Limits:
    """CPU cores (may be fractional), total bytes and available bytes; infinite if unlimited."""

    cores: float = math.inf
    memory_bytes: float | int = math.inf
    available_bytes: float | int = math.inf


def read_limits(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Limits:
    """The limits of this process's control groups; unlimited if there are none."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return Limits()
    limits = Limits()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers == "":
            for tree in (mount, mount / "unified"):
                limits = _tightest(limits, *(_version_2(folder) for folder in _to_the_root(tree, path)))
        elif "cpu" in names or "memory" in names:
            for tree in {mount / controllers, *(mount / name for name in names)}:
                limits = _tightest(limits, *(_version_1(folder) for folder in _to_the_root(tree, path)))
    return limits


def _to_the_root(tree: Path, path: str) -> list[Path]:
    group = tree / path.strip("/")
    return [folder for folder in (group, *group.parents) if folder == tree or tree in folder.parents]


def _version_2(folder: Path) -> Limits:
    quota, _, period = _first_line(folder / "cpu.max").partition(" ")
    cores = int(quota) / int(period) if quota.isdigit() and period.isdigit() else math.inf
    return _limits(cores, folder / "memory.max", folder / "memory.current", folder, "inactive_file")


def _version_1(folder: Path) -> Limits:
    quota = _first_line(folder / "cpu.cfs_quota_us")
    period = _first_line(folder / "cpu.cfs_period_us")
    cores = int(quota) / int(period) if quota.isdigit() and period.isdigit() else math.inf
    limit, usage = folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes"
    return _limits(cores, limit, usage, folder, "total_inactive_file")


def _limits(cores: float, limit: Path, usage: Path, folder: Path, reclaimable: str) -> Limits:
    text = _first_line(limit)
    if not text.isdigit() or int(text) >= _NO_LIMIT:
        return Limits(cores)
    used = _first_line(usage)
    # The page cache counts as used, but its inactive part is freed as soon as memory is needed.
    used_bytes = max(0, int(used) - _statistic(folder, reclaimable)) if used.isdigit() else 0
    return Limits(cores, int(text), max(0, int(text) - used_bytes))


def _statistic(folder: Path, name: str) -> int:
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _tightest(*limits: Limits) -> Limits:
    return Limits(
        min(limit.cores for limit in limits),
        min(limit.memory_bytes for limit in limits),
        min(limit.available_bytes for limit in limits),
    )


@dataclass(frozen=True)
class Accelerator:
    """One CUDA (or ROCm) device: the driver's name for it, its memory, and whether bf16 runs in its matrix units."""

    name: str
    memory_bytes: int
    native_bf16: bool


@dataclass(frozen=True)
class Host:
    """This machine, within the affinity and container limits of this process.

    `native_bf16` is whether the processor multiplies bf16 matrices in hardware (AVX512-BF16, AMX or ARM BF16); without
    that, bf16 on the CPU is slower than fp32.
    """

    cpu_name: str
    cores: int
    memory_bytes: int
    available_bytes: int
    native_bf16: bool
    accelerators: tuple[Accelerator, ...]


def detect_host() -> Host:
    """Detect this machine. Imports torch to find accelerators, which takes a second or two."""
    limits, memory = read_limits(), psutil.virtual_memory()
    return Host(
        cpu_name=cpu_name(),
        cores=usable_cores(),
        memory_bytes=int(min(memory.total, limits.memory_bytes)),
        available_bytes=int(min(memory.available, limits.available_bytes)),
        native_bf16=has_native_bf16(),
        accelerators=_accelerators(),
    )


def usable_cores() -> int:
    """Cores that this process can use: its affinity, or the whole cores that its control group grants; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, int(min(allowed, read_limits().cores)))


def use_all_cores() -> None:
    """Let torch compute on all cores of this process, unless OMP_NUM_THREADS says how many: who has set that knows what
    else the machine does."""
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(usable_cores())


def seconds_waited() -> float | None:
    """Seconds that this process's threads were runnable but had no core, summed over threads (Linux only)."""
    try:
        texts = [path.read_text() for path in Path("/proc/self/task").glob("*/schedstat")]
    except OSError:
        return None
    return sum(int(text.split()[1]) for text in texts) / 1e9 if texts else None


def _accelerators() -> tuple[Accelerator, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    return tuple(_accelerator(index) for index in range(torch.cuda.device_count()))


def _accelerator(index: int) -> Accelerator:
    import torch

    properties = torch.cuda.get_device_properties(index)
    # torch.cuda.is_bf16_supported is about the current device only, and may include emulation.
    with torch.cuda.device(index):
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    return Accelerator(properties.name, properties.total_memory, native)


# By default glibc returns large blocks to the system and maps them again each time; then every page is zeroed and
# faulted in again, which for the tensors of a training step takes longer than many of the operators that fill them. The
# bytes of tensors, which plan and meter report, do not change.

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Make glibc, once per process, serve all blocks from its heap and never shrink it; True if it succeeded.

    With another C library, nothing is changed.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        return bool(library.mallopt(_M_MMAP_MAX, 0)) and bool(library.mallopt(_M_TRIM_THRESHOLD, _NEVER))
    return False


def return_freed_memory() -> None:
    """Return unused memory that glibc holds to the system: free pages between blocks, in the heap of each thread. It
    takes milliseconds. With another C library, this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
