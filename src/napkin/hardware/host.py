"""The host: its processor, the cores and memory that this process may use, and its accelerators."""

import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import psutil

from napkin.child_process import run_program
from napkin.hardware.cgroup import read_limits

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


def usable_cores() -> int:
    """Cores that this process can use: its affinity, or the whole cores that its control group grants; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, int(min(allowed, read_limits().cores)))


def seconds_waited() -> float | None:
    """Seconds that this process's threads were runnable but had no core, summed over threads (Linux only)."""
    try:
        texts = [path.read_text() for path in Path("/proc/self/task").glob("*/schedstat")]
    except OSError:
        return None
    return sum(int(text.split()[1]) for text in texts) / 1e9 if texts else None


def has_native_bf16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the processor has bf16 matrix or dot-product instructions: AVX512-BF16, AMX, or ARM's."""
    fields = _first_processor(cpuinfo)
    flags = set(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())
    if flags:
        return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    return _sysctl("hw.optional.arm.FEAT_BF16") == "1" or _torch_says_bf16()


def has_native_int8(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the processor sums products of 8-bit integers in 32 bits, in one instruction: VNNI or AMX."""
    return bool(set(_first_processor(cpuinfo).get("flags", "").split()) & {"avx512_vnni", "avx_vnni", "amx_int8"})


@cache
def has_amx(number_format: Literal["bf16", "fp16"]) -> bool:
    """Whether the processor has AMX, Intel's matrix tiles, for that format; fewer have it for fp16."""
    import torch

    # Private to torch: where a helper is gone, nothing is claimed.
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
