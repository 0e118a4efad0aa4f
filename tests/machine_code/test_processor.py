"""The processor is told from others whose machine code it could not run."""

import platform
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch

from napkin.machine_code.processor import (
    cpu_name,
    has_native_bf16,
    has_native_int8,
    instruction_sets,
    processor_name_and_features,
)

ON_LINUX_X86 = sys.platform == "linux" and platform.machine() == "x86_64"
ARM = "processor\t: 0\nBogoMIPS\t: {}\nFeatures\t: {}\nCPU implementer\t: 0x41\nCPU part\t: {}\n\nprocessor\t: 1\n"
X86 = "processor\t: 0\nmodel name\t: {}\ncpu MHz\t\t: {}\nflags\t\t: {}\n\nprocessor\t: 1\n"


@pytest.mark.skipif(not ON_LINUX_X86, reason="torch's helpers know x86 alone")
def test_native_bf16_is_what_torch_finds_in_the_processor():
    helpers = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    if not all(helpers):
        pytest.skip("this torch has no such helpers")
    assert has_native_bf16() == any(helper() for helper in helpers if helper)


@pytest.mark.parametrize(
    ("text", "name", "native", "int8"),
    [
        ("model name\t: Old Xeon\nflags\t\t: fpu sse2 avx2 avx512f\n", "Old Xeon", False, False),
        ("model name\t: New Xeon\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_int8\n", "New Xeon", True, True),
        ("model name\t: Zen 4\nflags\t\t: fpu avx512_bf16 avx512_vnni\n\nmodel name\t: other\n", "Zen 4", True, True),
        ("model name\t: Small Core\nflags\t\t: fpu avx2 avx_vnni\n", "Small Core", False, True),
        ("Features\t: fp asimd bf16 i8mm\nCPU part\t: 0xd40\nModel\t: Some Board\n", "Some Board", True, False),
        ("Features\t: fp asimd\nHardware\t: Older Board\n", "Older Board", False, False),
    ],
)
def test_name_and_formats_are_read_from_cpuinfo(tmp_path: Path, text: str, name: str, native: bool, int8: bool):
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_name(tmp_path / "cpuinfo") == name
    assert has_native_bf16(tmp_path / "cpuinfo") is native
    assert has_native_int8(tmp_path / "cpuinfo") is int8


def test_a_name_is_found_without_cpuinfo(tmp_path: Path):
    assert cpu_name(tmp_path / "absent")


def test_processors_of_other_features_or_makes_are_told_apart(tmp_path: Path):
    described = [
        X86.format("A Xeon", "2000", "fpu avx2 avx512f"),
        X86.format("A Xeon", "2000", "fpu avx2"),
        X86.format("An EPYC", "2000", "fpu avx2"),
        # Linux on ARM reports no names of processors.
        ARM.format("50", "fp asimd", "0xd0c"),
        ARM.format("50", "fp asimd sve", "0xd0c"),
        ARM.format("50", "fp asimd", "0xd40"),
    ]
    files = [tmp_path / str(number) for number in range(len(described))]
    for file, text in zip(files, described, strict=True):
        file.write_text(text)
    for first, second in combinations(files, 2):
        assert processor_name_and_features(first) != processor_name_and_features(second)
    assert cpu_name(files[3]).endswith("(implementer 0x41, part 0xd0c)")
    assert cpu_name(files[3]) != cpu_name(files[5])


def test_a_processor_stays_the_same_when_its_clock_changes(tmp_path: Path):
    for number, text in enumerate((X86.format("A Xeon", "2000", "fpu avx2"), X86.format("A Xeon", "3100", "fpu avx2"))):
        (tmp_path / str(number)).write_text(text)
    assert processor_name_and_features(tmp_path / "0") == processor_name_and_features(tmp_path / "1")


def test_code_for_other_instructions_than_the_processors_is_told_apart(monkeypatch: pytest.MonkeyPatch):
    before = processor_name_and_features()
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx2")
    assert processor_name_and_features() != before


def test_instruction_sets_are_those_that_the_system_reports(tmp_path: Path):
    (tmp_path / "arm").write_text(ARM.format("50", "fp asimd sve", "0xd0c"))
    (tmp_path / "x86").write_text(X86.format("A Xeon", "2000", "fpu avx2 avx512f"))
    assert instruction_sets(tmp_path / "arm") == ["NEON", "SVE"]
    assert instruction_sets(tmp_path / "x86") == ["AVX2", "AVX-512"]
