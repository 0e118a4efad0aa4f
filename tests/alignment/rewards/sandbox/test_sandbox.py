"""Programs of a model are graded by their tests, and can neither win by other means nor do anything outside."""

import socket
from pathlib import Path

import pytest

from napkin.alignment.rewards import Reward, reward_named
from napkin.alignment.rewards.sandbox.confinement import can_confine
from napkin.alignment.rewards.sandbox.program_tests import ProgramLimits, ProgramTests, check_program_reference
from napkin.errors import NapkinError

pytestmark = pytest.mark.skipif(not can_confine(), reason="the system has no filter of system calls for a process")

TESTS = (
    "assert add(2, 3) == 5\nassert add(-1, 1) == 0\nassert [add(n, n) for n in range(9)] == [2 * n for n in range(9)]"
)
RIGHT = {
    "plain": "def add(a, b):\n    return a + b",
    "fenced": "Here it is:\n```python\ndef add(a, b):\n    return a + b\n```\nDone.",
    "the last block": "```python\ndef add(a, b): return 0\n```\n```py\nadd = lambda a, b: a + b\n```",
    "with modules": "import operator, math\nfrom functools import reduce\ndef add(*n): return reduce(operator.add, n)",
    "printing": "import sys\nprint('x' * 1000)\nprint('y', file=sys.stderr)\ndef add(a, b):\n    print(a)\n"
    "    return a + b",
    "in threads": "import threading\ndef add(a, b):\n    r = []\n"
    "    t = threading.Thread(target=lambda: r.append(a + b))\n    t.start()\n    t.join()\n    return r[0]",
}
WRONG = {
    "a wrong answer": "def add(a, b): return 5",
    "no program": "I would add the numbers.",
    "nothing": "",
    "another name": "def plus(a, b): return a + b",
    "leaving early": "import sys\nsys.exit(0)",
    "leaving at once": "import os\nos._exit(0)",
    "leaving in a call": "import os\ndef add(a, b): os._exit(0)",
    "raising in a call": "def add(a, b): raise SystemExit(0)",
    "equal to everything": "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
    "def add(a, b): return E(77)",
    "an object": "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()",
    "a verdict": 'import os\nos.write(1, b\'{"passed": true, "why": null}\\n\' * 9)\ndef add(a, b): return 0',
    "a verdict as functions": 'import os\nos.write(1, b\'{"functions": ["add"], "passed": true}\\n\' * 9)',
    "values beforehand": 'import os\nos.write(1, b\'{"value": 5, "arguments": []}\\n\' * 9)\ndef add(a, b): return 0',
    "lines without end": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "Python's own functions": "def range(n): return []\ndef isinstance(a, b): return True\ndef add(a, b): return 0",
    "the end of a loop": "def add(a, b): raise StopIteration",
    "a failed assertion": "def add(a, b): raise AssertionError",
    "the tests' own frames": "import sys\ndef add(a, b):\n    f = sys._getframe()\n"
    "    while f: f.f_globals['add'] = max; f = f.f_back\n    return 0",
    "nested without end": "def add(a, b):\n    x = []\n    for _ in range(100000): x = [x]\n    return x",
    "too much": "def add(a, b): return 'x' * 10**8",
    "all memory": "x = 'x' * 2**33\ndef add(a, b): return a + b",
    "damaged": "def add(a, b) return a + b",
    "a null byte": "def add(a, b):\x00 return a + b",
    "spaces without end": "```" + " " * 500_000,
    "deep brackets": "(" * 10_000 + ")" * 10_000,
}


@pytest.fixture(scope="module")
def code() -> Reward:
    return Reward("code", ProgramTests(ProgramLimits(seconds=60)), check_program_reference, n_parallel=2)


def test_programs_that_pass_their_tests_are_rewarded_and_no_others(code: Reward) -> None:
    judged = code.judge_all([(program, TESTS) for program in [*RIGHT.values(), *WRONG.values()]])
    rewards = dict(zip([*RIGHT, *WRONG], [each.reward for each in judged], strict=True))
    assert rewards == {**dict.fromkeys(RIGHT, 1.0), **dict.fromkeys(WRONG, 0.0)}


def attack(body: str) -> str:
    """A program whose function says which error it met."""
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    return f"import os, sys, threading\ndef attack():\n    try:\n{lines}        return 'escaped'\n" + (
        "    except BaseException as error:\n        return type(error).__name__\n"
    )


def by_call(call: str) -> str:
    """The same by C's library, which no check in Python is in the way of."""
    return (
        "ctypes = sys.modules['ctypes']\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"if libc.{call} < 0: raise OSError(ctypes.get_errno(), 'refused')"
    )


def test_a_program_reaches_nothing_outside_of_its_process(code: Reward, tmp_path: Path) -> None:
    secret, made = tmp_path / "secret.txt", tmp_path / "made.txt"
    secret.write_text("kept")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attacks = {
            f"open({str(made)!r}, 'w')": "PermissionError",
            f"open({str(secret)!r})": "PermissionError",
            f"os.remove({str(secret)!r})": "PermissionError",
            f"os.rename({str(secret)!r}, {str(made)!r})": "PermissionError",
            f"os.truncate({str(secret)!r}, 0)": "PermissionError",
            f"os.chmod({str(secret)!r}, 0)": "PermissionError",
            f"os.mkdir({str(made)!r})": "PermissionError",
            f"os.symlink('/', {str(made)!r})": "PermissionError",
            "os.listdir('/')": "PermissionError",
            "open(f'/proc/{os.getppid()}/mem', 'rb')": "PermissionError",
            "os.kill(os.getppid(), 9)": "PermissionError",
            "os.kill(-1, 9)": "PermissionError",
            "os.fork()": "PermissionError",
            "os.execv('/bin/true', ['true'])": "PermissionError",
            "os.setsid()": "PermissionError",
            "bytearray(2**33)": "MemoryError",
            by_call(f"open({str(secret)!r}.encode(), 0)"): "PermissionError",
            by_call("fork()"): "PermissionError",
            by_call("syscall(56 if os.uname().machine == 'x86_64' else 220, 17, 0, 0, 0, 0)"): "PermissionError",
            by_call("kill(os.getppid(), 9)"): "PermissionError",
            by_call("socket(2, 1, 0)"): "PermissionError",
            by_call("ptrace(16, os.getppid(), 0, 0)"): "PermissionError",
            by_call("prctl(22, 0, 0)"): "PermissionError",
            by_call("prctl(1, 0)"): "PermissionError",
            by_call("sendmsg(0, 0, 0)"): "PermissionError",
            by_call("timer_create(0, 0, 0)"): "PermissionError",
            "os.killpg(os.getpgrp(), 9)": "PermissionError",
            "sys.modules['socket'].socketpair()": "PermissionError",
            "r = sys.modules['resource']\nr.setrlimit(r.RLIMIT_AS, (2**40, 2**40))": "ValueError",
            "os.fstat(3)": "OSError",
            by_call("syscall(425, 8, 0)"): "PermissionError",
            by_call("syscall(272 if sys.maxsize else 0, 0x10000000)"): "PermissionError",
            by_call("memfd_create(b'x', 0)"): "PermissionError",
            "assert not os.environ.get('HOME') and not os.environ.get('PATH')": "escaped",
        }
        judged = code.judge_all([(attack(body), f"assert attack() == {met!r}") for body, met in attacks.items()])
        assert [body for body, each in zip(attacks, judged, strict=True) if each.reward != 1] == []
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
        assert port
    assert secret.read_text() == "kept"
    assert not made.exists()


def test_arguments_that_are_changed_in_place_and_values_of_all_kinds_travel(code: Reward) -> None:
    program = (
        "def order(a): a.sort()\ndef same(x): return x\ndef fail(x): raise ValueError('x')\n"
        "def many(): return {1: (2.5, None), 'a': {3}, (1, 2): [b'x', 2**80, float('inf'), 1j, True]}"
    )
    tests = (
        "a = [3, 1, 2]\norder(a)\nassert a == [1, 2, 3]\n"
        "assert many() == {1: (2.5, None), 'a': {3}, (1, 2): [b'x', 2**80, float('inf'), 1j, True]}\n"
        "assert same(many()) == many()\n"
        "try:\n    fail(1)\n    raised = False\nexcept ValueError:\n    raised = True\nassert raised\n"
        "def test_more():\n    assert same(x=7) == 7\n"
    )
    assert code.judge(program, tests).reward == 1
    assert code.judge(program, tests.replace("== 7", "== 8")).reward == 0
    assert code.judge(program, "def check(candidate):\n    assert candidate(3) == 3\ncheck(same)").reward == 1


def test_what_a_program_prints_is_compared_line_by_line(code: Reward) -> None:
    cases = '[{"input": "4\\n5\\n", "output": "9"}, {"input": "1 \\n2", "output": "3\\n"}]'
    assert code.judge("print(int(input()) + int(input()))", cases).reward == 1
    for wrong in (
        "print(9)",
        "print(int(input()) + int(input()), end=' x')",
        "import os\nos._exit(0)",
        "while True: print(9)",
    ):
        assert code.judge(wrong, cases).reward == 0


def test_tests_that_test_nothing_are_refused_or_fail() -> None:
    reward = reward_named("code")
    for reference in ("", "add(1, 2)", "assert (", "x" * 10 + "("):
        with pytest.raises(NapkinError, match="reference"):
            reward.check_reference(reference)
    assert reward("def add(a, b): return a + b", "assert True") == 0
    assert reward("def add(a, b): return a + b", "import nothing_of_this_name\nassert add(1, 1) == 2") == 0
    assert list(reward.failures) == [
        "the tests do not run: ModuleNotFoundError: No module named 'nothing_of_this_name'"
    ]
