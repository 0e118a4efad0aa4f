"""A program that a model calls as a tool: it runs in the sandbox, and the model reads what it printed.

The text is the same whenever the program is run again, as after a resume: hashes and draws are fixed, a program that
runs out of time has printed nothing, and of long output the first bytes are kept. Clocks and addresses are not fixed.
"""

import time
from dataclasses import dataclass

from napkin.errors import NotJudged
from napkin.grading.sandbox.program_process import HelperLost, Printed, ProgramProcess, helper_for, require_confinement
from napkin.grading.sandbox.program_tests import ATTEMPTS, MOST_PROGRAM, PAUSE


@dataclass(frozen=True)
class ToolLimits:
    """The limits of a tool."""

    seconds: float = 5.0
    """Processor time, and time by the clock, of a call."""
    output_bytes: int = 1000
    """Bytes of its output that the model reads."""
    memory: int = 2**30
    """Bytes of address space."""


class ToolProgram:
    """Runs programs of a model, each in a process of its own.

    Raises NapkinError where the system cannot confine a program: Linux on x86-64 and ARM can.
    """

    def __init__(self, limits: ToolLimits = ToolLimits()) -> None:
        require_confinement("rl.tools")
        self._limits = limits

    def __call__(self, program: str) -> str:
        """What a program prints, its last value, or the line of its error; all in at most `output_bytes` bytes and a
        line more that says what was cut.

        Raises NotJudged where the sandbox's processes are ended from outside.
        """
        if len(program) > MOST_PROGRAM:
            return f"error: the program has {len(program):,} characters, at most {MOST_PROGRAM:,} are run"
        # Lone surrogates, which a damaged text may have, do not travel.
        program = program.encode("utf-8", "replace").decode()
        for _ in range(ATTEMPTS):
            deadline = time.monotonic() + self._limits.seconds
            try:
                helper = helper_for(program)
                with ProgramProcess(helper, memory=self._limits.memory, deadline=deadline) as process:
                    process.send({"role": "tool", "text": program})
                    return self._text(process.printed(self._limits.output_bytes))
            except HelperLost:
                time.sleep(PAUSE)
        raise NotJudged("the sandbox's processes are ended from outside, or cannot be started")

    def _text(self, printed: Printed) -> str:
        if printed.is_late:
            return f"error: it took longer than {self._limits.seconds:g} s"
        # A character that was cut in two is left out.
        text = printed.text.decode("utf-8", "ignore" if printed.is_cut else "replace").rstrip()
        if printed.is_cut:
            return f"{text}\n[cut after {self._limits.output_bytes:,} bytes]"
        if printed.status is not None and printed.status < 0:
            return f"{text}\nerror: the program was ended".strip()
        return text
