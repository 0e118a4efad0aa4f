"""The host: its processor, the cores and memory that this process may use, and its accelerators.

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
from functools import cache
from pathlib import Path
from typing import Literal

import psutil

from napkin.child_process import run_program

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


_CPUINFO = Path("/proc/cpuinfo")


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


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name, if the system reports it."""
    fields = _first_processor(cpuinfo)
    for key in ("model name", "Model", "Hardware"):
        if name := fields.get(key):
            return name
    return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine() or "unknown CPU"


INSTRUCTIONS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX512-BF16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX-BF16",
    "amx_fp16": "AMX-FP16",
    "asimd": "NEON",
    "bf16": "ARM-BF16",
    "sve": "SVE",
    "sve2": "SVE2",
}
"""Names of the instruction sets on which the choice of kernels depends, by the system's names for them."""


def instruction_sets(cpuinfo: Path = _CPUINFO) -> list[str] | None:
    """The processor's instruction sets on which the choice of kernels depends, such as AVX2 and AMX-BF16; None where
    the system does not report them."""
    fields = _first_processor(cpuinfo)
    if not fields:
        # Every Apple processor of 64 bits has it.
        return ["NEON"] if sys.platform == "darwin" and platform.machine() == "arm64" else None
    flags = f"{fields.get('flags', '')} {fields.get('Features', '')}".split()
    return [name for flag, name in INSTRUCTIONS.items() if flag in flags]


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


def has_native_bf16(cpuinfo: Path = _CPUINFO) -> bool:
    """True if the processor has bf16 matrix or dot-product instructions: AVX512-BF16, AMX, or ARM's."""
    fields = _first_processor(cpuinfo)
    flags = set(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())
    if flags:
        return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    return _sysctl("hw.optional.arm.FEAT_BF16") == "1" or _torch_says_bf16()


def has_native_int8(cpuinfo: Path = _CPUINFO) -> bool:
    """True if the processor sums products of 8-bit integers in 32 bits, in one instruction: VNNI or AMX."""
    return bool(set(_first_processor(cpuinfo).get("flags", "").split()) & {"avx512_vnni", "avx_vnni", "amx_int8"})


@cache
def has_exact_int8() -> bool:
    """True if it has, and torch's products of 8-bit integers are exact: where oneDNN is told to use older instructions,
    by ONEDNN_MAX_CPU_ISA, it sums pairs of products in 16 bits, which do not hold them."""
    import torch

    if not has_native_int8():
        return False
    largest = torch.full((32, 64), 127, dtype=torch.int8)
    sums = torch._int_mm(largest, largest.T)  # pyright: ignore[reportPrivateImportUsage]
    return bool((sums == 64 * 127**2).all())


@cache
def has_amx(number_format: Literal["bf16", "fp16"]) -> bool:
    """True if the processor has AMX, Intel's matrix tiles, for that format; fewer have it for fp16."""
    import torch

    # These helpers are private to torch: if one is missing, its feature counts as absent.
    helper = getattr(torch.cpu, "_is_amx_tile_supported" if number_format == "bf16" else "_is_amx_fp16_supported", None)
    return bool(helper and helper())


def _first_processor(path: Path) -> dict[str, str]:
    """The fields of the first processor in Linux's /proc/cpuinfo; empty on other systems."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    fields: dict[str, str] = {}
    for line in lines:
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _sysctl(name: str) -> str:
    if sys.platform != "darwin":
        return ""
    try:
        return run_program(["/usr/sbin/sysctl", "-n", name]).stdout.decode(errors="replace").strip()
    except OSError:
        return ""


def _torch_says_bf16() -> bool:
    import torch

    # These helpers are private to torch: a missing one counts as False.
    helpers = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return any(bool(helper()) for helper in helpers if helper)


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
