"""The resource limits of a container: Linux control groups, versions 1 and 2.

Limits apply to a group and everything below it, so the tightest between this process's group and the root counts.
Inside a container, the path in /proc/self/cgroup may be that of the host; then the root of the mounted tree is the
group itself.
"""

import math
from dataclasses import dataclass
from pathlib import Path

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
