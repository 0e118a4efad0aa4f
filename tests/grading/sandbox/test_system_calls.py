"""A confined process may make the same system calls on each processor, by the numbers in Linux's own headers."""

import re
from pathlib import Path

import pytest

from napkin.grading.sandbox import confinement

HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}


def numbers(machine: str) -> dict[str, int]:
    """The number of each system call; empty without the header."""
    for text in (Path(path).read_text() for path in HEADERS[machine] if Path(path).exists()):
        # The generic header gives calls that have another form on 32 bits their number first, and then their name.
        defined = re.findall(r"#define __NR(?:3264)?_(\w+)[ \t]+(\d+)", text)
        found = {str(name): int(number) for name, number in defined}
        renamed = re.findall(r"#define __NR_(\w+)[ \t]+__NR3264_(\w+)", text)
        found |= {str(name): found[first] for name, first in renamed if name not in found and first in found}
        if machine == "aarch64" or "arch_prctl" in found:
            return found
    return {}


def test_calls_by_number_are_the_same_on_each_machine() -> None:
    of_x86, of_arm = numbers("x86_64"), numbers("aarch64")
    if not (of_x86 and of_arm):
        pytest.skip("Linux's headers are not installed")
    allowed = {machine: set(map(int, confinement._ALLOWED[machine].split(","))) for machine in ("x86_64", "aarch64")}
    names = {name for name, number in of_x86.items() if number in allowed["x86_64"]}
    assert len(names) == len(allowed["x86_64"])
    assert {of_arm[name] for name in names if name in of_arm} == allowed["aarch64"]
    for machine, known in (("x86_64", of_x86), ("aarch64", of_arm)):
        named = confinement._NUMBERS[machine]
        assert named == {name: known[name] for name in named}
