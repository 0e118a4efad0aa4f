"""Runs `napkin` in processes of its own, ends them as nature would, and says whether two runs are the same."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

FORK_SERVER = Path(__file__).with_name("fork_server.py")
# What a step is; clocks and resident bytes differ between any two runs.
FIGURES = ("step", "tokens", "loss", "learning_rate", "gradient_norm", "validation_loss")


@dataclass
class Command:
    """A napkin command that runs, or has run."""

    pid: int
    out: Path
    err: Path
    wait_for: Callable[[int], int]
    status: int | None = None

    def wait(self) -> int:
        """The exit status; -9 for a process that was killed."""
        if self.status is None:
            self.status = self.wait_for(self.pid)
        return self.status

    def send(self, number: signal.Signals) -> None:
        """Signal the process, which is there until it was waited for."""
        os.kill(self.pid, number)

    @property
    def errors(self) -> list[str]:
        """Lines of standard error, without those on progress: where a machine is slow there are some."""
        return [line for line in self.err.read_text().splitlines() if not line.startswith("training ")]


class Napkin:
    """Starts commands in one folder, as forks of a server that has imported torch."""

    def __init__(self, folder: Path, server: subprocess.Popen[str], streams: Path | None = None) -> None:
        """`streams` is the folder for what commands print, by default the same."""
        self.folder = folder
        self.streams = streams or folder
        self._server = server
        self._started = 0

    def start(
        self,
        *arguments: str,
        largest_file: int | None = None,
        signal_at: int | None = None,
        near: str = "",
        after: str = "",
        signal: signal.Signals = signal.SIGKILL,
        after_step: int | None = None,
        signals: Sequence[signal.Signals] = (),
        ignored: Sequence[signal.Signals] = (),
        environment: dict[str, str] | None = None,
        refuse_pickles: bool = False,
        program: str | None = None,
    ) -> Command:
        """Start a command.

        No file may grow beyond `largest_file` bytes; `signal` comes right before the command's `signal_at`-th
        operation on a file whose path contains `near`, counted from the first one on whose path contains `after`.
        `signals` come one after the other when the command has computed step `after_step`, before its evaluation: from
        within, so that none comes too late where the machine is busy. Signals in `ignored` are ignored when it starts.
        With `refuse_pickles` it ends, with status 3, where it would read one that names anything to be called.
        `program` is Python code that runs instead of a command.
        """
        self._started += 1
        out, err = (self.streams / f"{stream}-{self._started}.txt" for stream in ("out", "err"))
        pid = self._ask(
            arguments=arguments,
            folder=str(self.folder),
            out=str(out),
            err=str(err),
            largest_file=largest_file,
            signal_at=signal_at,
            near=near,
            after=after,
            after_step=after_step,
            signals=[int(number) for number in signals],
            ignored=[int(number) for number in ignored],
            signal=signal,
            environment=environment or {},
            refuse_pickles=refuse_pickles,
            program=program,
        )
        return Command(pid, out, err, lambda pid: self._ask(wait=pid))

    def run(self, *arguments: str, **limits: Any) -> Command:
        """Start a command and wait for its end."""
        command = self.start(*arguments, **limits)
        command.wait()
        return command

    def _ask(self, **request: Any) -> int:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


@contextmanager
def fork_server() -> Iterator[subprocess.Popen[str]]:
    """The server, for as long as the block runs."""
    server = subprocess.Popen(
        [sys.executable, FORK_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # NumPy's own threads, which training has no use for, would be there at the fork.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    with server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


def start_process(folder: Path, *arguments: str) -> Command:
    """`python -m napkin`, with nothing done to make it start sooner."""
    return start_python(folder, "-m", "napkin", *arguments)


def start_python(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Command:
    """An interpreter of its own, with these variables besides."""
    out, err = folder / f"out-{time.monotonic_ns()}.txt", folder / f"err-{time.monotonic_ns()}.txt"
    with open(out, "w") as out_file, open(err, "w") as err_file:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            stdout=out_file,
            stderr=err_file,
            env={**os.environ, **(environment or {})},
            # A shell that starts the tests in the background has it ignored, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    return Command(process.pid, out, err, lambda pid: process.wait())


def figures(run: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says of every step, clocks left out."""
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [{name: line.get(name) for name in FIGURES} for line in lines]


def checkpoints(run: Path) -> list[int]:
    """Steps of the checkpoints that are there."""
    return sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))


def weights(run: Path) -> dict[str, str]:
    """Checksums of weights and optimizer state of the newest checkpoint."""
    newest = run / "checkpoints" / f"step-{checkpoints(run)[-1]:08d}"
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in sorted(newest.glob("*.safetensors"))}


def lines_of_metrics(run: Path) -> int:
    """Whole lines of metrics.jsonl so far."""
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def wait_until(true: Callable[[], bool], command: Command, *, seconds: float = 300.0) -> None:
    """Return when something is the case or the command has ended; fail where neither comes."""
    end = time.monotonic() + seconds
    while not true() and not has_ended(command):
        assert time.monotonic() < end, f"nothing came in {seconds} s: {command.errors}"
        time.sleep(0.002)


def has_ended(command: Command) -> bool:
    """Whether the process only waits to be waited for."""
    if command.status is not None:
        return True
    stat = Path(f"/proc/{command.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "Z"


def files_of(run: Path) -> set[str]:
    """The files and folders of a run, by their path in it."""
    return {str(path.relative_to(run)) for path in run.rglob("*")}


def assert_same_run(run: Path, reference: Path) -> None:
    """Every step's figures and the last weights, bit for bit."""
    assert figures(run) == figures(reference)
    assert weights(run) == weights(reference)
