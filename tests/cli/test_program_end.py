"""A command ends its process without the interpreter's last collection, and leaves nothing undone."""

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading, time, weakref
from napkin import cli

class Kept:
    pass

kept = Kept()
# The last one is called first, and what it prints is still in a buffer.
atexit.register(print, "at exit", end="")
weakref.finalize(kept, print, "finalized")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
cli.ALL.run = lambda name, rest: (print("command", end=" ", file=sys.stderr), 3)[1]
sys.argv = ["napkin", "anything"]
sys.exit(cli.main())
"""


def test_threads_exit_functions_and_buffers_are_waited_for() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert ended.returncode == 3
    assert ended.stderr == "command "
    assert ended.stdout.splitlines() == ["thread", "finalized", "at exit"]


def test_a_profiler_sees_the_command_end() -> None:
    program = [sys.executable, "-m", "cProfile", "-m", "napkin", "--version"]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert "function calls" in ended.stdout
