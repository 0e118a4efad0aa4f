"""Programs of a model are graded by their tests, and can neither win by other means nor do anything outside."""

import json
import math
import socket
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from napkin.errors import NapkinError
from napkin.grading import Reward
from napkin.grading.sandbox.confinement import can_confine
from napkin.grading.sandbox.program_roles import NotPlain, from_plain, to_plain
from napkin.grading.sandbox.program_tests import ProgramLimits, ProgramTests, check_program_reference

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


REFUSED = {
    "": "assert",
    "add(1, 2)": "assert",
    "assert (": "Python can read",
    "x" * 10 + "(": "Python can read",
    "assert True": "never calls",
    "def test_a():\n    assert sorted([2, 1]) == [1, 2]": "never calls",
    "def helper():\n    assert 1 + 1 == 2": "never calls",
    "assert isclose(area(2), 12.566, rel_tol=1e-3)": "'isclose'",
    "assert not isclose(area(2), 12.5)": "'isclose'",
    "for r in (1, 2):\n    assert isclose(area(r), 3.14159 * r * r)": "'isclose'",
    "def check(candidate):\n    assert isclose(candidate(2), area(2))\ncheck(area)": "'isclose'",
    "assert close_enough(area(2), 12.566)": "'close_enough'",
    "assert isclose(sqrt(4), 2)": "'isclose'",
    "assert math.isclose(area(2), 12.566)": "'math'",
    "import numpy\nassert np.allclose(area(2), 12.566)": "'np'",
    "assert abs(area(2) - 4 * pi) < 1e-9": "'pi'",
    "assert counted('aab') == Counter('aab')": "'Counter'",
    "a = [1]\nb = deepcopy(a)\nchanged(a)\nassert a != b": "'deepcopy'",
    "assert smallest([Fraction(1, 2)]) == Fraction(1, 2)": "'Fraction'",
    "def run(x: List[int]) -> int:\n    return f(x)\nassert run([1]) == 1": "'List'",
    "try:\n    f(1)\nexcept OwnError:\n    pass\nassert f(2) == 2": "'OwnError'",
    "import pytest\nwith pytest.raises(ValueError):\n    f(1)\nassert f(2) == 2": "'pytest'",
    '["assert isclose(area(2), 12.566)"]': "'isclose'",
    # What is compared stands in a variable, an argument or a list, or is that of HumanEval's candidate.
    "def check(candidate):\n    assert isclose(candidate(2), 4)": "'isclose'",
    "def check(candidate):\n    assert gcd(candidate(2), 4) == 4": "'gcd'",
    "def check(f):\n    assert isclose(f(2), 4)\ncheck(area)": "'isclose'",
    "r = area(2)\nassert isclose(r, 12.566)": "'isclose'",
    "r: float = area(2)\nr += 0\nassert close_enough(r, 12.566)": "'close_enough'",
    "def test_a():\n    x = area(1)\n    y = x\n    assert close_enough(y, 2)": "'close_enough'",
    "def one(got, want):\n    assert close_enough(got, want)\none(area(2), 12.566)": "'close_enough'",
    "def run(r):\n    return area(r)\nassert close_enough(run(2), 12.566)": "'close_enough'",
    "for r in [area(2)]:\n    assert close_enough(r, 12.566)": "'close_enough'",
    "found = []\nfound.append(area(2))\nassert close_enough(found[0], 12.566)": "'close_enough'",
    "assert (r := area(2)) and close_enough(r, 12.566)": "'close_enough'",
    "assert all(close_enough(area(r), 3) for r in (1, 2))": "'close_enough'",
    "assert close_enough(area(2), 12.566) is True": "'close_enough'",
    "if not close_enough(area(2), 12.566):\n    raise AssertionError\nassert area(0) == 0": "'close_enough'",
}
ACCEPTED = [
    "assert gcd(4, 6) == 2",
    "assert isclose(1.0, 1.0)",
    "assert mean([1, 2, 3]) == 2\nassert spread([1, 1]) == 0",
    "assert gcd(4, 6) == 2\nassert lcm(4, 6) == 12",
    "from math import isclose\nassert isclose(area(2), 12.566)",
    "import math as m\nassert m.isclose(area(2), 12.566)",
    "from math import *\nassert isclose(area(2), 4 * pi)",
    "assert decode(encode('x')) == 'x'",
    "from program import area, isclose\nassert isclose(area(2), 12.566)",
    "import program\nassert program.area(2) > 12",
    "def run(n):\n    return [f(x) for x in range(n)]\nassert run(3) == [0, 1, 2]",
    "def test_a():\n    global seen\n    seen = f(1)\n    assert seen == 1",
    "def check(candidate):\n    assert candidate(1) == 2",
    # HumanEval/32: `poly` stands in the prompt.
    "def check(candidate):\n    assert abs(poly([1, 2], candidate([1, 2]))) < 1e-4",
    "s = encode('x')\nassert decode(s) == 'x'",
    "n = 7\nassert is_prime(n)\nassert primes(n) == [2, 3, 5, 7]",
    "METADATA = {}\ndef check(candidate):\n    assert candidate(1) == 2\ncheck(f)",
    '["assert add(1, 2) == 3", "assert add(0, 0) == 0"]',
    "try:\n    import gmpy2\nexcept ImportError:\n    gmpy2 = None\nassert f(1) == 1",
]


@pytest.mark.parametrize("reference", REFUSED)
def test_a_reference_that_any_program_could_fulfil_or_none_is_refused_when_it_is_read(reference: str) -> None:
    with pytest.raises(NapkinError, match="the reference ") as error:
        check_program_reference(reference)
    assert REFUSED[reference] in str(error.value)
    assert "\n" not in str(error.value)


def test_other_references_are_read() -> None:
    for reference in ACCEPTED:
        check_program_reference(reference)


AREA = "def area(r): return 3.14159265358979 * r * r\n"
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate([3]) == [3, 3]\n"
DOUBLE = "def double(x):\n    return x + x\n"
EXAMPLE = "print(add(2, 3))  # 5\n"
ADD = "def add(a, b):\n    return a + b\n"


def fenced(*blocks: tuple[str, str], fence: str = "```") -> str:
    return "So:\n\n" + "\n".join(f"{fence}{tag}\n{text}{fence}\nand then\n" for tag, text in blocks)


JUDGED = {
    "a comparison of the program's own": (
        "def isclose(a, b): return True\n" + AREA,
        "assert isclose(area(2), 9)",
        None,
    ),
    "a check that is not called": (DOUBLE, CHECK, 1.0),
    "a check that is not met": ("def double(x):\n    return 4\n", CHECK, 0.0),
    "a check beside helpers": ("def helper(x):\n    return x\n" + DOUBLE + "def shown(x):\n    print(x)\n", CHECK, 1.0),
    "a check of a lambda": ("double = lambda x: 2 * x\n", CHECK, 1.0),
    "a check of no function": ("x = 4\n", CHECK, 0.0),
    "a check that is called": (DOUBLE, CHECK + "check(double)", 1.0),
    "an import from the program": (AREA, "from program import area\nassert area(0) == 0", 1.0),
    "... that it does not have": (AREA, "from program import areas\nassert areas(0) == 0", 0.0),
    "an untagged example": (fenced(("python", ADD), ("", EXAMPLE)), TESTS, 1.0),
    "a tagged example": (fenced(("", ADD), ("python", EXAMPLE)), TESTS, 1.0),
    "output": (fenced(("python", ADD), ("", "5\n")), TESTS, 1.0),
    "a command before": (fenced(("bash", "pip install nothing\n"), ("python", ADD), ("text", "5\n")), TESTS, 1.0),
    "another language": (fenced(("python", ADD), ("javascript", "var x = 1;\n")), TESTS, 1.0),
    "tags": (fenced(("Python title=add.py", ADD)), TESTS, 1.0),
    "tildes": (fenced(("python3", ADD), fence="~~~~"), TESTS, 1.0),
    "a list": ("1. So:\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n", TESTS, 1.0),
    "a stop at the fence": ("```python\n" + ADD, TESTS, 1.0),
    "the last of two": (fenced(("python", ADD), ("python", ADD.replace("+", "-"))), TESTS, 0.0),
    "a script with its output": (
        fenced(("python", "print(2 * int(input()))\n"), ("", "8\n")),
        '[{"input": "4", "output": "8"}]',
        1.0,
    ),
    "an untagged script with its output": (
        fenced(("", "print(2 * int(input()))\n"), ("", "8\n")),
        '[{"input": "4", "output": "8"}]',
        1.0,
    ),
    "a fraction": (
        "from fractions import Fraction\ndef f(n): return [Fraction(1, n)]",
        "from fractions import Fraction\nassert f(3) == [Fraction(1, 3)]\nassert f(3)[0].denominator == 3",
        1.0,
    ),
    "another fraction": (
        "from fractions import Fraction\ndef f(n): return [Fraction(2, n)]",
        "from fractions import Fraction\nassert f(3) == [Fraction(1, 3)]",
        0.0,
    ),
    "a range": ("def f(n): return range(n)", "assert f(3) == range(3)\nassert list(f(2)) == [0, 1]", 1.0),
    "a generator": ("def f(n):\n    for i in range(n): yield i * i", "assert list(f(4)) == [0, 1, 4, 9]", 1.0),
    "a wrong generator": ("def f(n):\n    for i in range(n): yield i", "assert list(f(4)) == [0, 1, 4, 9]", 0.0),
    "an endless generator": (
        "def f():\n    n = 0\n    while True:\n        yield n\n        n += 1",
        "from itertools import islice\nassert list(islice(f(), 3)) == [0, 1, 2]\nassert next(f()) == 0",
        1.0,
    ),
    "more of it than travels": (
        "def f():\n    while True: yield 0",
        "assert [n for n, x in zip(range(10**6), f())]",
        None,
    ),
    "a generator that raises": (
        "def f():\n    yield 1\n    raise ValueError",
        "try:\n    list(f())\n    raised = False\nexcept ValueError:\n    raised = True\nassert raised",
        1.0,
    ),
    "a map": ("def f(x): return map(str, x)", "assert list(f([1, 2])) == ['1', '2']", 1.0),
    "views": (
        "d = {1: 'a', 2: 'b'}\ndef k(): return d.keys()\ndef v(): return d.values()\ndef i(): return d.items()",
        "assert k() == {1, 2}\nassert sorted(v()) == ['a', 'b']\nassert (1, 'a') in i()",
        1.0,
    ),
    "numbers and dates": (
        "import decimal, datetime, collections\ndef f(): return decimal.Decimal('0.10')\n"
        "def g(): return datetime.date(2026, 1, 31) + datetime.timedelta(1)\n"
        "def h(x): return collections.Counter(x)\ndef q(x): return collections.deque(x, 2)",
        "import datetime\nfrom decimal import Decimal\nassert f() == Decimal('0.1') and str(f()) == '0.10'\n"
        "assert g() == datetime.date(2026, 2, 1)\nassert h('aab').most_common(1) == [('a', 2)]\n"
        "assert list(q([1, 2, 3])) == [2, 3] and q([]).maxlen == 2",
        1.0,
    ),
    "a bytearray": ("def f(): return bytearray(b'ab')", "assert f() == b'ab'\nassert isinstance(f(), bytearray)", 1.0),
    "an object of the program's own": (
        "class Point:\n    x = 1\ndef f(): return Point()",
        "assert f().x == 1",
        None,
    ),
    "a function": ("def f(n): return lambda x: x + n", "assert f(1)(2) == 3", None),
    "an argument that is a function": (
        "def f(g, x): return g(x)\ndef h(): return 1",
        "assert h() == 1\nassert f(lambda x: x, 1) == 1",
        None,
    ),
    "tests without a call": ("def f(): return 1", "if False:\n    f()\nassert True", None),
    "tests that fail themselves": ("def f(): return 1", "x = [][1]\nassert f() == 1", None),
    "too many calls": ("def f(): return 1", "assert sum(f() for _ in range(10**5)) == 10**5", None),
}


def test_what_is_wrong_is_told_from_what_cannot_be_judged(code: Reward) -> None:
    judged = code.judge_all([(answer, reference) for answer, reference, _ in JUDGED.values()])
    found = {name: None if each.failure is not None else each.reward for name, each in zip(JUDGED, judged, strict=True)}
    assert found == {name: wanted for name, (_, _, wanted) in JUDGED.items()}
    assert all(each.reward == 0 for each in judged if each.failure is not None)


def test_values_travel_as_what_they_are() -> None:
    values: list[Any] = [
        *[None, True, 2**80, -0.5, math.inf, 1j, "é", b"x", bytearray(b"y"), Fraction(-2, 3), Decimal("1E+2")],
        *[range(5, 0, -2), deque([1, [2]], 3), Counter("aab"), OrderedDict([(2, 1), (1, 2)]), {(1, 2): {3}}],
        *[date(2026, 1, 31), datetime(2026, 1, 31, 12, 30), timedelta(-1, 5), frozenset({1}), ((), [], {})],
    ]
    for value in values:
        found = from_plain(json.loads(json.dumps(to_plain(value))))
        assert (type(found), found) == (type(value), value)
    for value in (object(), len, [lambda: 0], {"a": object()}):
        with pytest.raises(NotPlain):
            to_plain(value)
