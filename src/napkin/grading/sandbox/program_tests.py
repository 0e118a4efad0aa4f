"""Programs of a model against tests.

The reference is a Python program of tests with `assert`, which calls the functions that the answer defines, or defines
`check(candidate)` as HumanEval's do; or JSON, a list of {"input": TEXT, "output": TEXT}, what the answer prints for
what it reads. The answer is the last fenced block of the text that is such a program, or all of it.
"""

import ast
import re
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass

from napkin.errors import NapkinError, NotJudged, first_line
from napkin.grading.sandbox.program_process import HelperLost, ProgramProcess, helper_for, require_confinement
from napkin.grading.sandbox.reference_tests import ReferenceTests, parsed, read_reference

_FENCE = re.compile(r"[ \t]{0,12}(?P<marks>`{3,}|~{3,})[ \t]*(?P<tag>[^\s`]*)(?P<rest>[^`\n]*)")
_PYTHON = re.compile(r"\{?\.?(?:python|py)(?:[0-9.]*)(?![a-z])", re.IGNORECASE)
MOST_ANSWER = 1_000_000
"""The last characters of an answer, which are searched for a program."""
MOST_PROGRAM = 100_000
"""The longest program, in characters."""
MOST_BLOCKS = 64
"""The most fenced blocks of an answer to look at, from its end."""
MOST_CANDIDATES = 8
"""Functions of a program that a check is called with."""
ATTEMPTS, PAUSE = 3, 0.2
"""The most attempts at a judgement if its processes are lost, and the seconds between them."""


@dataclass(frozen=True)
class ProgramLimits:
    """The limits of a program under its tests."""

    seconds: float = 10.0
    """Processor time, and time by the clock, for all tests."""
    memory: int = 2**30
    """Bytes of address space."""
    output: int = 2**20
    """Bytes that it prints."""
    calls: int = 10_000
    """Calls of its functions by its tests."""


class ProgramTests:
    """Grades a program by its tests: 1 if all pass, 0 otherwise.

    Raises NapkinError where the system cannot confine a program: Linux on x86-64 and ARM can.
    """

    def __init__(self, limits: ProgramLimits = ProgramLimits()) -> None:
        require_confinement("the reward 'code'")
        self._limits = limits

    def __call__(self, answer: str, reference: str) -> float:
        """1 if the program in `answer` passes the tests of `reference`, 0 for what a program does wrong.

        Raises NotJudged where the tests themselves fail to run, are such as `check_program_reference` refuses, or
        cannot be given what the program returns.
        """
        try:
            asked = read_reference(reference)
        except NapkinError as error:
            raise NotJudged(first_line(error)) from None
        program = program_of(answer, asked)
        if program is None:
            return 0.0
        for _ in range(ATTEMPTS):
            deadline = time.monotonic() + self._limits.seconds
            try:
                if asked.cases:
                    return float(self._prints(program, asked.cases, deadline))
                if asked.check is None:
                    return float(self._passes(program, asked.tests, deadline))
                return float(self._passes_check(program, asked.tests, asked.check, deadline))
            except HelperLost:
                # Somebody has killed it, or memory was short: no fault of this program's.
                time.sleep(PAUSE)
        raise NotJudged("the sandbox's processes are ended from outside, or cannot be started")

    def _prints(self, program: str, cases: Sequence[tuple[str, str]], deadline: float) -> bool:
        helper = helper_for(program)
        for read, wanted in cases:
            with ProgramProcess(helper, memory=self._limits.memory, deadline=deadline) as process:
                process.send({"role": "script", "text": program, "input": read})
                written = process.output(self._limits.output)
            if written is None or _lines(written.decode("utf-8", "replace")) != _lines(wanted):
                return False
        return True

    def _passes_check(self, program: str, tests: str, check: str, deadline: float) -> bool:
        """True if a function of the program passes a check that does not say which one it is for."""
        tree = parsed(program)
        names = [] if tree is None else [name for name in _defined(tree, imports=False) if not name.startswith("_")]
        why = None
        for name in list(dict.fromkeys(reversed(names)))[:MOST_CANDIDATES]:
            try:
                if self._passes(program, f"{tests}\n{check}({name})\n", deadline):
                    return True
            except NotJudged as error:
                why = why or error
        if why is not None:
            raise why
        return False

    def _passes(self, program: str, tests: str, deadline: float) -> bool:
        helpers = [helper_for(text) for text in (program, tests)]
        memory = self._limits.memory
        with (
            ProgramProcess(helpers[0], memory=memory, deadline=deadline) as answering,
            ProgramProcess(helpers[1], memory=memory, deadline=deadline) as testing,
        ):
            answering.send({"role": "calls", "text": program})
            offered = answering.receive()
            names = None if offered is None else offered.get("functions")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                return False
            testing.send({"role": "tests", "text": tests, "functions": names})
            return self._relay(answering, testing)

    def _relay(self, answering: ProgramProcess, testing: ProgramProcess) -> bool:
        """Pass calls from the tests to the program and its answers back, until the tests say how it went."""
        begin, answered = time.monotonic(), 0.0
        for n_calls in range(self._limits.calls + 1):
            asked = testing.receive()
            if asked is None:
                if testing.late and answered > (time.monotonic() - begin) / 2:
                    return False
                raise NotJudged(f"the tests {'take too long' if testing.late else 'ended without a verdict'}")
            if "call" not in asked:
                return _verdict(asked, n_calls)
            sent = time.monotonic()
            answering.send(asked)
            answer = answering.receive()
            answered += time.monotonic() - sent
            if answer is None:
                return False
            if "untold" in answer:
                raise NotJudged(
                    f"tests cannot be given a value of type {str(answer['untold'])[:40]}: return plain data"
                )
            testing.send(answer)
        raise NotJudged(f"the tests call the program more than {self._limits.calls:,} times")


def _verdict(report: dict[str, object], n_calls: int) -> bool:
    """The verdict of the tests after so many calls of the program."""
    why, kind = str(report.get("why") or ""), report.get("kind")
    # A function that the program does not have is a fault of the program.
    if kind == "untold" or (why and n_calls == 0 and kind != "missing"):
        raise NotJudged(f"the tests do not run: {first_line(ValueError(why))}")
    if report.get("passed") is True and n_calls == 0:
        raise NotJudged("the tests passed without a call of the program")
    return report.get("passed") is True


def program_of(answer: str, asked: ReferenceTests) -> str | None:
    """The program in a text; None if there is none that Python can read.

    Of the fenced blocks, untagged or tagged as Python, it is the last that defines a function which the tests ask for;
    with inputs and outputs, or where no block does, the last one tagged as Python, then the last that is not a mere
    example of values.
    """
    answer = answer[-MOST_ANSWER:]
    blocks = fenced_blocks(answer)[-MOST_BLOCKS:]
    if not blocks:
        return answer if _is_program(answer) else None
    programs = [(tagged, text, tree) for tagged, text in blocks if _is_program(text) and (tree := parsed(text))]
    if not programs:
        return None

    def fitness(place: int) -> tuple[int, bool, bool, int]:
        tagged, _, tree = programs[place]
        defined = set(_defined(tree))
        wanted = len(defined & asked.functions) if asked.check is None else bool(defined)
        return (wanted, tagged, any(not isinstance(each, ast.Expr) for each in tree.body) or _prints(tree), place)

    return programs[max(range(len(programs)), key=fitness)][1]


def fenced_blocks(text: str) -> list[tuple[bool, str]]:
    """The blocks between fences of Markdown that are untagged or tagged as Python, and whether they are tagged.

    A fence that is not closed ends with the text, where stop strings leave it.
    """
    blocks: list[tuple[bool, str]] = []
    opened: re.Match[str] | None = None
    lines: list[str] = []
    for line in [*text.splitlines(), None]:
        fence = None if line is None else _FENCE.fullmatch(line)
        if opened is None:
            opened, lines = fence, []
            continue
        is_end = fence is not None and not fence["tag"] and not fence["rest"].strip()
        if line is not None and not (is_end and fence is not None and fence["marks"].startswith(opened["marks"])):
            lines.append(line)
            continue
        tagged = _PYTHON.match(opened["tag"]) is not None
        if tagged or not opened["tag"]:
            blocks.append((tagged, textwrap.dedent("\n".join(lines)) + "\n"))
        opened = None
    return blocks


def check_program_reference(reference: str) -> None:
    """Raise NapkinError for tests that Python cannot read, that read names which nobody defines, or that test nothing
    of the program."""
    read_reference(reference)


def _is_program(text: str) -> bool:
    return len(text) <= MOST_PROGRAM and bool(text.strip()) and parsed(text) is not None


def _prints(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Call) for node in ast.walk(tree))


def _defined(tree: ast.Module, *, imports: bool = True) -> list[str]:
    """Functions that a program may define at its top level, in their order."""
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif imports and isinstance(node, ast.Import | ast.ImportFrom):
            names += [alias.asname or alias.name for alias in node.names]
    return names


def _lines(text: str) -> list[str]:
    """Lines without white space at their ends and at the end of the text."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
