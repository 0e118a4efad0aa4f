import math
from pathlib import Path

from napkin.hardware.host import Limits, read_limits


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def limits(root: Path, membership: str) -> Limits:
    write(root, {"membership": membership})
    return read_limits(root / "membership", root / "sys")


def test_the_tightest_limit_on_the_way_to_the_root_counts(tmp_path: Path):
    write(
        tmp_path / "sys",
        {
            "slice/cpu.max": "150000 100000\n",
            "slice/memory.max": "4000\n",
            "slice/memory.current": "3000\n",
            "slice/memory.stat": "active_file 5\ninactive_file 400\n",
            "slice/box/cpu.max": "max 100000\n",
            "slice/box/memory.max": "8000\n",
            "slice/box/memory.current": "1000\n",
        },
    )
    assert limits(tmp_path, "0::/slice/box\n") == Limits(1.5, 4000, 4000 - (3000 - 400))


def test_inside_a_container_the_root_of_the_tree_is_the_group(tmp_path: Path):
    write(tmp_path / "sys", {"cpu.max": "400000 100000\n", "memory.max": "1000\n", "memory.current": "2000\n"})
    assert limits(tmp_path, "0::/docker/not-visible-here\n") == Limits(4.0, 1000, 0)


def test_limits_of_version_1_are_read(tmp_path: Path):
    write(
        tmp_path / "sys",
        {
            "cpu,cpuacct/box/cpu.cfs_quota_us": "200000\n",
            "cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "memory/box/memory.limit_in_bytes": "5000\n",
            "memory/box/memory.usage_in_bytes": "1000\n",
            "memory/box/memory.stat": "cache 900\ntotal_inactive_file 600\n",
        },
    )
    membership = "5:cpu,cpuacct:/box\n4:memory:/box\n3:pids:/box\n0::/\n"
    assert limits(tmp_path, membership) == Limits(2.0, 5000, 4600)


def test_no_limit_is_infinite(tmp_path: Path):
    write(
        tmp_path / "sys",
        {
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "unified/cpu.max": "max 100000\n",
            "unified/memory.max": "max\n",
        },
    )
    nothing = Limits(math.inf, math.inf, math.inf)
    assert limits(tmp_path, "4:memory:/\n1:cpu:/\n0::/\n") == nothing
    assert read_limits(tmp_path / "absent", tmp_path / "sys") == nothing
