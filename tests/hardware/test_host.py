import os
import subprocess
import sys

import psutil
import pytest
import torch

from napkin.hardware.host import detect_host, usable_cores


def test_cores_and_memory_are_no_more_than_the_systems():
    host = detect_host()
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    assert 1 <= usable_cores() == host.cores <= allowed
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
