"""The processor: its name, the instructions that it has, and what machine code that is kept for it depends on."""

import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Literal

from napkin.child_process import run_program

_CPUINFO = Path("/proc/cpuinfo")
_NUMBERS_OF_ARM = ("CPU implementer", "CPU variant", "CPU part")


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name, if the system reports it."""
    fields = _first_processor(cpuinfo)
    for key in ("model name", "Model", "Hardware"):
        if name := fields.get(key):
            return name
    name = _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine() or "unknown CPU"
    # Linux on ARM reports numbers alone.
    numbers = [f"{key.removeprefix('CPU ')} {fields[key]}" for key in _NUMBERS_OF_ARM if key in fields]
    return f"{name} ({', '.join(numbers)})" if numbers else name


def processor_name_and_features(cpuinfo: Path = _CPUINFO) -> str:
    """What machine code that is kept depends on, a line each: the architecture, the processor's name and features as
    the system reports them, and what numba is told to use instead."""
    fields = _first_processor(cpuinfo)
    reported = [fields[key] for key in ("flags", "Features", *_NUMBERS_OF_ARM, "cpu", "isa", "uarch") if key in fields]
    overrides = [os.environ.get(name, "") for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")]
    return "\n".join([platform.machine(), cpu_name(cpuinfo), *reported, *overrides])


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
    flags = _flags_of(fields)
    return [name for flag, name in INSTRUCTIONS.items() if flag in flags]


def has_native_bf16(cpuinfo: Path = _CPUINFO) -> bool:
    """True if the processor has bf16 matrix or dot-product instructions: AVX512-BF16, AMX, or ARM's."""
    if flags := _flags_of(_first_processor(cpuinfo)):
        return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})
    return _sysctl("hw.optional.arm.FEAT_BF16") == "1" or _torch_says_bf16()


def has_native_int8(cpuinfo: Path = _CPUINFO) -> bool:
    """True if the processor sums products of 8-bit integers in 32 bits, in one instruction: VNNI or AMX."""
    return bool(_flags_of(_first_processor(cpuinfo)) & {"avx512_vnni", "avx_vnni", "amx_int8"})


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
    fields: dict[str, str] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                key, colon, value = line.partition(":")
                if colon:
                    fields.setdefault(key.strip(), value.strip())
                elif "model name" in fields:
                    # On ARM the board's name comes after all processors.
                    break
    except OSError:
        return {}
    return fields


def _flags_of(fields: dict[str, str]) -> set[str]:
    """The system's names of what a processor has, which are `flags` on x86 and `Features` on ARM."""
    return set(f"{fields.get('flags', '')} {fields.get('Features', '')}".split())


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
