import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from napkin.hardware.host import cpu_name, detect_host, has_native_bf16, has_native_int8, usable_cores

ON_LINUX_X86 = sys.platform == "linux" and platform.machine() == "x86_64"


def test_cores_and_memory_are_no_more_than_the_systems():
    host = detect_host()
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    assert 1 <= host.cores <= allowed
    assert 0 < host.available_bytes <= host.memory_bytes <= psutil.virtual_memory().total
    assert len(host.accelerators) == torch.cuda.device_count()
    assert host.cpu_name.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")
def test_a_process_bound_to_one_core_counts_one():
    program = (
        "import os; from napkin.hardware.host import usable_cores; "
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(usable_cores())"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "1\n"


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
    assert usable_cores() >= 1
