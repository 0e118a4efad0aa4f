"""The conditions of a measurement: clocks, load of other programs, waiting for a core."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from napkin.child_process import run_program
from napkin.hardware.host import cpu_name, seconds_waited

_CPUINFO, _LOADAVG = Path("/proc/cpuinfo"), Path("/proc/loadavg")
_NVIDIA_SMI = "clocks.sm,clocks.mem,clocks.max.sm,temperature.gpu,power.draw,utilization.gpu"


@dataclass(frozen=True)
class Moment:
    """The state of the machine at one moment; None where the system does not tell."""

    megahertz: float | None
    """Mean clock of the processor's cores."""
    load: float | None
    """Mean number of runnable threads in the last minute."""
    gpu: Mapping[str, str] | None
    """Fields of nvidia-smi, by its names."""


class Waited:
    """Watches, while a block runs, for how long this process's threads were ready to run and had no core."""

    def __init__(self) -> None:
        self.share: float | None = None
        """Fraction of the time, of one thread; None before the end, and where the system does not tell."""

    def __enter__(self) -> "Waited":
        self._begin, self._before = time.perf_counter(), seconds_waited()
        return self

    def __exit__(self, *_: object) -> None:
        seconds, after = time.perf_counter() - self._begin, seconds_waited()
        if self._before is not None and after is not None and seconds:
            self.share = max(0.0, after - self._before) / seconds / torch.get_num_threads()


class Conditions:
    """Watches the machine from when it is made until `values` is called."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.measured_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.before = moment(device_type)

    def values(self) -> dict[str, Any]:
        """All of it, for programs."""
        return {
            "measured_at": self.measured_at,
            "device": torch.cuda.get_device_name() if self.device_type == "cuda" else cpu_name(),
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "before": vars(self.before),
            "after": vars(moment(self.device_type)),
        }


def moment(device_type: str) -> Moment:
    """The state of the machine now."""
    return Moment(_megahertz(_CPUINFO), _load(_LOADAVG), _gpu() if device_type == "cuda" else None)


def _megahertz(path: Path) -> float | None:
    lines = _lines(path)
    clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return sum(clocks) / len(clocks) if clocks else None


def _load(path: Path) -> float | None:
    lines = _lines(path)
    return float(lines[0].split()[0]) if lines else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _gpu() -> dict[str, str] | None:
    index = os.environ.get("LOCAL_RANK", "0")
    command = ["nvidia-smi", f"--query-gpu={_NVIDIA_SMI}", "--format=csv,noheader", f"--id={index}"]
    try:
        told = run_program(command, most_seconds=10)
    except OSError:
        return None
    values = [value.strip() for value in told.stdout.decode(errors="replace").split(",")]
    return dict(zip(_NVIDIA_SMI.split(","), values, strict=False)) if told.returncode == 0 else None
