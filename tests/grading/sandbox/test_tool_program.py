"""Programs that a model calls: what it reads of them beside Python's own output, and the bounds of hostile ones."""

import subprocess
import sys

import pytest

from napkin.grading.sandbox.confinement import can_confine
from napkin.grading.sandbox.tool_program import ToolLimits, ToolProgram

pytestmark = pytest.mark.skipif(not can_confine(), reason="the system has no filter of system calls")

PROGRAMS = [
    "print(2 + 3)",
    "import math\nfor n in range(5):\n    print(math.factorial(n), end=' ')",
    "print('<|im_end|>', 'é', sep='\\n')",
    "print(sorted({'b', 'a'}), file=__import__('sys').stderr)",
    "raise SystemExit('over')",
]


@pytest.fixture(scope="module")
def tool() -> ToolProgram:
    return ToolProgram(ToolLimits(seconds=20, output_bytes=300))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_prints_what_pythons_own_process_prints(tool: ToolProgram, program: str) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    ).stdout.decode()
    assert tool(program) == printed.rstrip()


def test_the_value_of_a_last_expression_and_the_line_of_an_error_are_read(tool: ToolProgram) -> None:
    assert tool("x = 6\nx * 7") == "42"
    assert tool("None") == tool("") == ""
    assert tool("print(1)\n1 / 0") == "1\nZeroDivisionError: division by zero"
    assert tool("def f(:").splitlines()[-1] == "SyntaxError: invalid syntax"
    # The same text when it is run again by another helper: hashes and draws are fixed.
    drawn = "import random\nprint({'a', 'b', 'c', 'd'}, random.random())"
    assert tool(drawn) == tool(drawn)


def test_hostile_programs_stay_bounded(tool: ToolProgram) -> None:
    brief = ToolProgram(ToolLimits(seconds=0.5, output_bytes=100))
    assert brief("while True: pass") == brief("print('x')\nwhile True: pass") == "error: it took longer than 0.5 s"
    assert brief("9 ** 9 ** 9 ** 9") == "error: it took longer than 0.5 s"
    endless = tool("while True: print('é' * 10)")
    assert len(endless.encode()) < 340
    assert endless.endswith("\n[cut after 300 bytes]")
    assert "PermissionError" in tool("import os\nwhile True: os.fork()")
    assert "PermissionError" in tool("open('/etc/passwd')")
    assert "Error" in tool("import socket\nsocket.socket()")
    assert tool("x = [0] * 10 ** 10") == "MemoryError"
    assert tool("import os\nos.kill(os.getpid(), 9)") == "error: the program was ended"
    assert tool("import os\n[name for name in os.environ if name in ('PATH', 'HOME', 'USER')]") == "[]"
    assert tool("#" * 200_000).startswith("error: the program has 200,000 characters")
    assert tool("print(b'\\xff'.decode('utf-8', 'surrogateescape'))") == "�"
    # Whatever happened, the next call is answered, and nothing is left behind.
    assert tool("1 + 1") == "2"
