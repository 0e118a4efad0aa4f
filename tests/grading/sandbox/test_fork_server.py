"""The helper that forks a process for each program: no program reaches it, another judgement, or what comes after."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from napkin.grading import Reward
from napkin.grading.sandbox.confinement import can_confine
from napkin.grading.sandbox.program_process import Helper, HelperLost, ProgramProcess, helper_for
from napkin.grading.sandbox.program_tests import ProgramLimits, ProgramTests

pytestmark = pytest.mark.skipif(not can_confine(), reason="the system has no filter of system calls for a process")

ADD = "def add(a, b): return a + b"
TESTS = "assert add(2, 3) == 5\nassert add(-1, 1) == 0"
BIG = "x = 'x' * 10**6\nassert add(x, x) == 5\nassert add(x, x) == 5"
ENDLESS = {
    "computing": ("while True: pass", TESTS),
    "computing in a call": ("def add(a, b):\n    while True: pass", TESTS),
    "sleeping": ("import time\ntime.sleep(100)", TESTS),
    "deaf to signals": (
        "import sys, time\ns = sys.modules['signal']\nfor n in range(1, 32):\n"
        "    if n not in (9, 19): s.signal(n, s.SIG_IGN)\ntime.sleep(100)",
        TESTS,
    ),
    "living on in a thread": (
        f"import threading, time\n{ADD}\nthreading.Thread(target=time.sleep, args=(100,)).start()\n1 / 0",
        TESTS,
    ),
    "with its pipes closed": ("import os, time\nos.close(0)\nos.close(1)\ntime.sleep(100)", TESTS),
    "answering and not reading": (
        "import os, time\ndef add(a, b):\n"
        "    os.write(1, b'{\"value\": 5, \"arguments\": [1, 2]}\\n')\n    time.sleep(100)",
        BIG,
    ),
    "in its tests": (ADD, "assert add(2, 3) == 5\nwhile True: add(1, 1)"),
    "reading": ("import os\nos.read(0, 1)\nos.read(0, 1)", '[{"input": "", "output": "9"}]'),
    "after its output": ("print(9, flush=True)\nwhile True: pass", '[{"input": "", "output": "9"}]'),
    "its output closed": ("import os\nos.write(1, b'9')\nos.close(0)\nos.close(1)\nwhile True: pass",
        '[{"input": "", "output": "9"}]'),
}  # fmt: skip


@pytest.fixture(scope="module")
def code() -> Reward:
    return Reward("code", ProgramTests(ProgramLimits(seconds=60)), n_parallel=4)


def children(of: int) -> list[int]:
    """Processes whose parent is that one, by what the system tells of each."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            if int(state.rpartition(")")[2].split()[1]) == of:
                found.append(int(entry))
    return found


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it does, within a time that only a failure takes."""
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_whatever_never_ends_is_ended_and_nothing_of_it_is_left() -> None:
    reward = Reward("code", ProgramTests(ProgramLimits(seconds=0.4)), n_parallel=len(ENDLESS))
    helper = helper_for("")
    judged = reward.judge_all(list(ENDLESS.values()))
    assert dict(zip(ENDLESS, [each.reward for each in judged], strict=True)) == dict.fromkeys(ENDLESS, 0.0)
    assert helper_for("") is helper
    assert comes_true(lambda: not children(helper.pid))


def test_programs_with_other_aims_change_nothing_for_those_beside_and_after_them(code: Reward) -> None:
    others = [
        "import os\nfor n in range(64):\n    try: os.write(n, b'ready' * 9)\n    except OSError: pass",
        "import os\nfor n in range(64):\n    try: os.close(n)\n    except OSError: pass",
        "import os\nos.kill(os.getpid(), 9)",
        "import os\nfor s in range(1, 65):\n    try: os.kill(os.getppid(), s)\n    except OSError: pass",
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "x = []\nwhile True: x.append('x' * 2**20)",
        "import os\nwhile True: os.write(2, b'x' * 2**16) and os.write(1, b'x' * 2**16)",
        "import math, sys, builtins, json\nmath.pi = 3\nbuiltins.len = max\nsys.modules['json'].loads = None\n"
        "sys.modules['os']._exit(0)",
    ]
    honest = (
        "import math\ndef add(a, b): return a + b + len('') + int(math.pi == 3)",
        "import json, math\nassert add(2, 3) == 5 == json.loads('5')\nassert math.pi > 3",
    )
    helper = helper_for("")
    judged = code.judge_all([pair for other in others for pair in ((other, TESTS), honest)])
    assert [each.reward for each in judged] == [0, 1] * len(others)
    assert code.failures.total() == 0
    assert helper_for("") is helper
    assert comes_true(lambda: not children(helper.pid))


def test_a_program_finds_in_its_memory_neither_its_tests_nor_another_judgement(code: Reward) -> None:
    # It knows the words backwards alone, for what it looks for would be found in itself.
    searching = (
        "import gc, sys\ndef found():\n    gc.unfreeze()\n    seen = set()\n"
        "    def search(each, depth):\n"
        "        if id(each) in seen or depth > 6: return False\n        seen.add(id(each))\n"
        "        if isinstance(each, (str, bytes)): return 'terces tpek' in str(each)[::-1]\n"
        "        return any(search(part, depth + 1) for part in gc.get_referents(each))\n"
        "    frame = sys._getframe()\n    while frame.f_back: frame = frame.f_back\n"
        "    return any(search(each, 0) for each in [frame, *gc.get_objects()])"
    )
    beside = "x = 'kept secret'\n" + ADD
    assert [each.reward for each in code.judge_all([(beside, TESTS + "\n# kept secret")] * 2)] == [1, 1]
    assert code(searching, "hidden = 'kept secret'\nassert found() is False") == 1
    assert code(searching + "\nhere = ['kept secret']", "assert found() is True") == 1


def test_a_program_has_no_descriptor_but_its_own(code: Reward) -> None:
    program = (
        "import os\ndef opened():\n    found = []\n    for n in range(70000):\n        try: os.fstat(n)\n"
        "        except OSError: continue\n        found.append(n)\n    return found"
    )
    with_others_at_a_time = code.judge_all([(program, "assert opened() == [0, 1, 2]")] * 4)
    assert [each.reward for each in with_others_at_a_time] == [1] * 4


@pytest.mark.thorough
def test_a_judgement_whose_helper_is_killed_is_made_again(code: Reward) -> None:
    helper = helper_for("")
    with ProgramProcess(helper, memory=2**30, deadline=time.monotonic() + 60) as process:
        process.send({"role": "calls", "text": ADD})
        assert process.receive() == {"functions": ["add"]}
        assert comes_true(lambda: len(children(helper.pid)) == 1)
        (forked,) = children(helper.pid)
        os.kill(helper.pid, signal.SIGKILL)
        with pytest.raises(HelperLost):
            process.receive()
    assert comes_true(lambda: not _is_running(forked))
    # Nobody has told the trainer: the next judgement finds it gone.
    assert code(ADD, TESTS) == 1
    assert code.failures.total() == 0
    assert helper_for("") is not helper


def test_processes_end_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    trainer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from napkin.grading.sandbox.program_process import helper_for\n"
            "from napkin.grading.sandbox.program_tests import ProgramTests\n"
            "print(helper_for('').pid, flush=True)\n"
            "ProgramTests()('import time\\ntime.sleep(9)', 'assert add()')",
        ],
        stdout=subprocess.PIPE,
        # Nobody is left to remove the folders.
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert trainer.stdout is not None
    helper = int(trainer.stdout.readline())
    assert comes_true(lambda: len(children(helper)) == 2)
    pids = [helper, *children(helper)]
    trainer.kill()
    trainer.communicate()
    assert comes_true(lambda: not any(_is_running(pid) for pid in pids))


def _is_running(pid: int) -> bool:
    # Nobody may be there to collect it.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_script_ends_as_one_of_its_own_would(code: Reward) -> None:
    cases = '[{"input": "", "output": "9"}]'
    ends = {
        "print(9)": 1,
        "print(9)\nraise SystemExit": 1,
        "import sys\nprint(9)\nsys.exit(0)": 1,
        "import os\nprint(9, flush=True)\nos._exit(0)": 1,
        "import atexit\natexit.register(print, 9)": 1,
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.02), print(9))).start()": 1,
        "try:\n    import no_such_module\nexcept ImportError:\n    print(9)": 1,
        "import sys\nprint(9, file=sys.stderr)\nprint(9)": 1,
        "print(9)\nraise SystemExit(3)": 0,
        "print(9)\nraise SystemExit('why')": 0,
        "print(9)\n1 / 0": 0,
        "import os\nprint(9, flush=True)\nos.kill(os.getpid(), 9)": 0,
        "import os\nprint(9, flush=True)\nos.abort()": 0,
    }
    judged = code.judge_all([(program, cases) for program in ends])
    assert dict(zip(ends, [each.reward for each in judged], strict=True)) == ends


def test_a_program_draws_the_same_whenever_it_is_judged(code: Reward) -> None:
    program = "import random\nprint(random.random())"
    drawn = random.Random(program.encode()).random()
    assert [code(program, f'[{{"input": "", "output": "{drawn}"}}]') for _ in range(2)] == [1, 1]
    program = "import numpy\nprint(numpy.random.randint(1000))\nprint(hash('a') % 1000)"
    judged = [code(program, f'[{{"input": "", "output": "{n}"}}]') for n in (0, 0)]
    assert judged[0] == judged[1]


def test_the_helper_imports_nothing_of_the_current_folder_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "random", "lazy_loader", "sitecustomize", "usercustomize"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w'); raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))
    helper = Helper(with_numpy=False)
    with ProgramProcess(helper, memory=2**30, deadline=time.monotonic() + 60) as process:
        process.send({"role": "script", "text": "import json, os\nprint(json.dumps([*os.environ]))", "input": ""})
        written = process.output(1000)
    helper.close()
    assert written is not None
    assert b"PATH" not in written
    assert not (tmp_path / "ran").exists()


@pytest.mark.torture
def test_hundreds_of_threads_keep_no_other_judgement_from_its_verdict(code: Reward) -> None:
    bomb = (
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
    )
    reward = Reward("code", ProgramTests(ProgramLimits(seconds=8)), n_parallel=4)
    judged = reward.judge_all([pair for _ in range(20) for pair in ((bomb, TESTS), (ADD, TESTS))])
    assert [each.reward for each in judged] == [0, 1] * 20
    assert comes_true(lambda: not children(helper_for("").pid))
