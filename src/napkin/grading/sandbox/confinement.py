"""A process gives up files, other processes, the network, memory and time before it runs a program from elsewhere.

On Linux a filter of system calls (seccomp) lets through those of a list, which have no effect outside of the process:
computing, memory, clocks, and pipes that are open already. No file can be opened, made, removed or changed, no process
or socket made, no signal sent to another. It needs no privileges and cannot be taken back. This file is imported by the
process itself and uses the standard library alone.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterable
from typing import Literal

try:
    import resource
except ImportError:
    # Windows.
    resource = None

# Numbers from Linux's tables asm/unistd_64.h and asm-generic/unistd.h: the same calls, where a machine has them.
_ALLOWED = {
    "x86_64": (
        "0,1,3,4,5,6,7,8,9,10,11,12,13,14,15,17,18,19,20,21,22,23,24,25,27,28,32,33,35,36,37,38,39,60,61,63,78,79,89,"
        "96,97,98,99,100,102,104,107,108,110,111,115,118,120,121,124,127,128,130,131,143,145,146,147,158,186,201,202,"
        "204,213,217,218,219,221,228,229,230,231,232,233,262,267,269,270,271,273,274,281,290,291,292,293,295,309,318,"
        "324,332,334,436,439"
    ),
    "aarch64": (
        "17,19,20,21,22,23,24,48,57,59,61,62,63,64,65,66,67,68,69,72,73,78,79,80,93,94,96,98,99,100,101,102,103,"
        "113,114,115,120,121,123,124,125,126,128,132,133,134,135,136,137,139,148,150,153,155,156,158,160,163,165,"
        "168,169,172,173,174,175,176,177,178,179,214,215,216,222,223,226,232,233,260,278,283,291,293,436,439"
    ),
}  # fmt: skip
_NUMBERS = {
    "x86_64": {
        "open": 2, "openat": 257, "ioctl": 16, "clone": 56, "clone3": 435, "prlimit64": 302, "fcntl": 72,
        "tgkill": 234, "kill": 62, "seccomp": 317, "sendto": 44, "sendmsg": 46, "recvmsg": 47, "fchdir": 81,
        "prctl": 157, "setrlimit": 160,
    },
    "aarch64": {
        "openat": 56, "ioctl": 29, "clone": 220, "clone3": 435, "prlimit64": 261, "fcntl": 25, "tgkill": 131,
        "kill": 129, "seccomp": 277, "sendto": 206, "sendmsg": 211, "recvmsg": 212, "fchdir": 50,
        "prctl": 167, "setrlimit": 164,
    },
}  # fmt: skip
_STARTING = ("clone", "kill", "fchdir", "prctl", "seccomp", "setrlimit", "prlimit64", "sendto", "sendmsg", "recvmsg")
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000

# Instructions of the filter's machine: load a word, jump if equal, at least, or if bits are set, return.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NOT_PERMITTED, _NOT_IMPLEMENTED = 1, 38

# Access for writing, and the flags O_CREAT, O_TRUNC, O_APPEND and __O_TMPFILE.
_WRITING = 0o3 | 0o100 | 0o1000 | 0o2000 | 0o20000000
_THREAD = 0x10000
_SAFE_IOCTLS = (0x5401, 0x5451, 0x5450, 0x541B, 0x5421)
_SET_OWNER_AND_SIGNAL = (8, 10, 15)

_OWN_PID = 0x7FFFFFFF
"""Stands for the number of the process; there is none as high, nor such a number elsewhere in a filter."""

_INSTRUCTION = struct.Struct("HBBI")
Instruction = tuple[int, int, int, int]
Role = Literal["program", "reading", "starting"]
"""What the process may still do: compute alone; open files to read them; or fork, kill and confine children, which
inherit the filter and add one of their own."""


def can_confine() -> bool:
    if not sys.platform.startswith("linux") or platform.machine() not in _ALLOWED or sys.maxsize < 2**32:
        return False
    # PR_GET_SECCOMP fails where the kernel has no filters.
    return ctypes.CDLL(None, use_errno=True).prctl(21, 0, 0, 0, 0) >= 0


def limit_resources(memory: int, seconds: int) -> None:
    """Limit address space in bytes and processor time; nothing may be written to files, and few may be open."""
    _limit(AS=memory, CPU=seconds, FSIZE=0, CORE=0, NOFILE=64, MEMLOCK=0)


def limit_descriptors(most: int) -> None:
    _limit(NOFILE=most)


def _limit(**limits: int) -> None:
    if resource is None:
        return
    for name, limit in limits.items():
        what = getattr(resource, f"RLIMIT_{name}", None)
        if what is None:
            continue
        most = resource.getrlimit(what)[1]
        least = limit if most == resource.RLIM_INFINITY else min(limit, most)
        try:
            resource.setrlimit(what, (least, least))
        except (ValueError, OSError):
            # macOS refuses some of them.
            if sys.platform == "linux":
                raise


def confine(role: Role) -> None:
    """Give up, for good, all but computing and what the role needs.

    Raises OSError where the system has no such filter.
    """
    Confinement(role).enter()


class Confinement:
    """The prepared arguments of `confine`, for a process that forks many which enter it."""

    class _Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    def __init__(self, role: Role) -> None:
        self._role: Role = role
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._seccomp = _NUMBERS[platform.machine()]["seccomp"]
        instructions = _filter(platform.machine(), role)
        self._filter = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*each) for each in instructions))
        self._program = self._Program(len(instructions), ctypes.addressof(self._filter))
        self._own_pid = [
            _INSTRUCTION.size * number + 4 for number, each in enumerate(instructions) if each[3] == _OWN_PID
        ]

    def enter(self) -> None:
        """Give up what the role does not need. Raises OSError where the system has no such filter."""
        for offset in self._own_pid:
            struct.pack_into("I", self._filter, offset, os.getpid())
        if self._role == "program":
            # PR_SET_PDEATHSIG: a program ends with who has started it.
            self._libc.prctl(1, 9, 0, 0, 0)
        # PR_SET_DUMPABLE: no other process of the user reads this one's memory. PR_SET_NO_NEW_PRIVS.
        self._libc.prctl(4, 0, 0, 0, 0)
        if self._libc.prctl(38, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "privileges cannot be given up")
        # SECCOMP_SET_MODE_FILTER for all threads.
        if self._libc.syscall(self._seccomp, 1, 1, ctypes.byref(self._program)) != 0:
            raise OSError(ctypes.get_errno(), "system calls cannot be filtered")


def _filter(machine: str, role: Role) -> list[Instruction]:
    """Offsets in what the filter sees: 0 the number of the call, 4 the architecture, 16 + 8n its arguments."""
    numbers, refused = _NUMBERS[machine], (_RETURN, 0, 0, _REFUSE | _NOT_PERMITTED)
    allowed = (_RETURN, 0, 0, _ALLOW)
    program: list[Instruction] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        program += [(_AT_LEAST, 0, 1, _X32), refused]
    for number in map(int, _ALLOWED[machine].split(",")):
        program += [(_EQUAL, 0, 1, number), allowed]

    def when(name: str, body: list[Instruction]) -> None:
        if name in numbers:
            program.extend([(_EQUAL, 0, len(body), numbers[name]), *body])

    if role == "starting":
        for name in _STARTING:
            when(name, [allowed])
    if role == "reading":
        for name, argument in (("open", 1), ("openat", 2)):
            when(name, [(_LOAD, 0, 0, 16 + 8 * argument), (_ANY_BIT, 0, 1, _WRITING), refused, allowed])
    # Threads, but no processes; where clone3 is missing, clone is called, whose flags can be seen.
    when("clone", [(_LOAD, 0, 0, 16), (_ANY_BIT, 0, 1, _THREAD), allowed, refused])
    when("clone3", [(_RETURN, 0, 0, _REFUSE | _NOT_IMPLEMENTED)])
    when("ioctl", [(_LOAD, 0, 0, 24), *_one_of(_SAFE_IOCTLS, allowed), refused])
    when("fcntl", [(_LOAD, 0, 0, 24), *_one_of(_SET_OWNER_AND_SIGNAL, refused), allowed])
    # For this process alone, and only reported, not set: root could raise them.
    zeros = [each for place in (16, 32, 36) for each in ((_LOAD, 0, 0, place), (_EQUAL, 1, 0, 0), refused)]
    when("prlimit64", [*zeros, allowed])
    for name in ("kill", "tgkill"):
        when(name, [(_LOAD, 0, 0, 16), *_one_of((_OWN_PID,), allowed), refused])
    return [*program, refused]


def _one_of(values: Iterable[int], then: Instruction) -> list[Instruction]:
    return [each for value in values for each in ((_EQUAL, 0, 1, value), then)]
