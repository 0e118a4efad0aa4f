"""Programs of a model against tests.

The reference is a Python program of tests with `assert`, which calls the functions that the answer defines; or JSON, a
list of {"input": TEXT, "output": TEXT}, what the answer prints for what it reads. The answer is the last fenced block
of Python in the text, or all of it.
"""

import ast
import json
import re
import time
from dataclasses import dataclass
from typing import Any

from napkin.alignment.rewards.reward import RewardFailure
from napkin.alignment.rewards.sandbox.confinement import can_confine
from napkin.alignment.rewards.sandbox.program_process import HelperLost, ProgramProcess, helper_for
from napkin.errors import NapkinError, first_line

_BLOCK = re.compile(r"```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*?)```", re.DOTALL | re.IGNORECASE)
MOST_ANSWER = 1_000_000
"""Characters that are searched for a program: what stands before is not."""
MOST_PROGRAM = 100_000
"""Characters of a program."""
_ATTEMPTS, _PAUSE = 3, 0.2
"""Of a judgement whose processes are lost, and seconds between."""


@dataclass(frozen=True)
class ProgramLimits:
    """What a program may take."""

    seconds: float = 10.0
    """Of processor time, and of the clock for all tests."""
    memory: int = 2**30
    """Bytes of address space."""
    output: int = 2**20
    """Bytes that it prints."""
    calls: int = 10_000
    """Of its functions, by its tests."""


class ProgramTests:
    """Grades a program by its tests: 1 if all pass, 0 otherwise.

    Raises NapkinError where the system cannot confine a program: Linux on x86-64 and ARM can.
    """

    def __init__(self, limits: ProgramLimits = ProgramLimits()) -> None:
        if not can_confine():
            raise NapkinError(
                "the reward 'code' runs programs that a model writes, and this system cannot keep them from files and "
                "the network: use Linux on x86-64 or ARM, with seccomp"
            )
        self._limits = limits

    def __call__(self, answer: str, reference: str) -> float:
        """1 if the program in `answer` passes the tests of `reference`.

        Raises RewardFailure where the tests themselves fail to run; what a program does wrong is a reward of 0.
        """
        program = program_of(answer)
        if program is None:
            return 0.0
        cases = _cases(reference)
        for _ in range(_ATTEMPTS):
            try:
                if cases is None:
                    return float(self._passes(program, reference))
                return float(self._prints(program, cases))
            except HelperLost:
                # Somebody has killed it, or memory was short: no fault of this program's.
                time.sleep(_PAUSE)
        raise RewardFailure("the sandbox's processes are ended from outside, or cannot be started")

    def _prints(self, program: str, cases: list[dict[str, str]]) -> bool:
        helper, deadline = helper_for(program), time.monotonic() + self._limits.seconds
        for case in cases:
            with ProgramProcess(helper, memory=self._limits.memory, deadline=deadline) as process:
                process.send({"role": "script", "text": program, "input": case["input"]})
                written = process.output(self._limits.output)
            if written is None or _lines(written.decode("utf-8", "replace")) != _lines(case["output"]):
                return False
        return True

    def _passes(self, program: str, tests: str) -> bool:
        helpers = [helper_for(text) for text in (program, tests)]
        limits: Any = {"memory": self._limits.memory, "deadline": time.monotonic() + self._limits.seconds}
        with ProgramProcess(helpers[0], **limits) as answering, ProgramProcess(helpers[1], **limits) as testing:
            answering.send({"role": "calls", "text": program})
            offered = answering.receive()
            names = None if offered is None else offered.get("functions")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                return False
            testing.send({"role": "tests", "text": tests, "functions": names})
            return self._relay(answering, testing)

    def _relay(self, answering: ProgramProcess, testing: ProgramProcess) -> bool:
        """Pass calls from the tests to the program and its answers back, until the tests say how it went."""
        for n_calls in range(self._limits.calls):
            asked = testing.receive()
            if asked is None:
                if testing.late:
                    return False
                raise RewardFailure("the tests ended without a verdict")
            if "call" not in asked:
                why = str(asked.get("why") or "")
                # A function that the program does not have is a fault of the program.
                if why and n_calls == 0 and not why.startswith("NameError"):
                    raise RewardFailure(f"the tests do not run: {first_line(ValueError(why))}")
                return asked.get("passed") is True and n_calls > 0
            answering.send(asked)
            answer = answering.receive()
            if answer is None:
                return False
            testing.send(answer)
        return False


def program_of(answer: str) -> str | None:
    """The program in a text; None if there is none that Python can read."""
    answer = answer[-MOST_ANSWER:]
    blocks = _BLOCK.findall(answer)
    program = blocks[-1] if blocks else answer
    if len(program) > MOST_PROGRAM or not program.strip():
        return None
    return program if _parsed(program) is not None else None


def check_program_reference(reference: str) -> None:
    """Raises NapkinError for tests that Python cannot read, or that test nothing."""
    if _cases(reference) is not None:
        return
    tree = _parsed(reference)
    if tree is None:
        raise NapkinError("the reference is not a program of tests that Python can read: correct it")
    if not any(isinstance(node, ast.Assert) for node in ast.walk(tree)):
        raise NapkinError("the reference has no `assert`: tests without one pass whatever a program does")


def _parsed(program: str) -> ast.Module | None:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _cases(reference: str) -> list[dict[str, str]] | None:
    """Inputs and outputs, if the reference is a list of them."""
    try:
        cases = json.loads(reference)
    except (ValueError, RecursionError):
        return None
    cases = [cases] if isinstance(cases, dict) else cases
    if not isinstance(cases, list) or not cases:
        return None
    known = [
        isinstance(each, dict) and isinstance(each.get("input"), str) and isinstance(each.get("output"), str)
        for each in cases
    ]
    return cases if all(known) else None


def _lines(text: str) -> list[str]:
    """Without white space at the end of lines and of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
