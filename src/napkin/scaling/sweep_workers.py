"""Runs side by side: processes that train one run after the other, each asked by a line and answering with one.

A worker imports the libraries once, and counts each kind of step once. A run is started, resumed, or found finished, in
this process or in a worker's.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec

from napkin.child_process import AnsweringProcess, start_answering
from napkin.errors import NapkinError
from napkin.planning.planner import Planner, SharedPlans
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from napkin.report.page import write_report
from napkin.runs.metrics import StepMetrics
from napkin.runs.run_folder import is_run
from napkin.scaling.trials import Trial
from napkin.toml_files import parse_toml
from napkin.training.callbacks import finished_checkpoint
from napkin.training.run import create_run, open_run, train_run
from napkin.training.signals import Interruption, catch_interruption

_STEP_PARTS = ("data", "forward", "backward", "optimizer", "evaluation")


@dataclass(frozen=True)
class Ended:
    """The end of a sweep's run."""

    state: Literal["finished", "skipped", "failed", "stopped"]
    """Skipped is one that was finished before, stopped one that a signal has interrupted."""
    message: str = ""
    """The error of a run that failed."""
    signal: int = 0
    """Signal that stopped the run."""
    seconds: float = 0.0
    step_seconds: float = 0.0
    """Seconds of its steps and evaluations."""
    notes: tuple[str, ...] = ()
    """Notes that the run made while it trained."""


def train_one(
    recipe: Recipe, folder: Path, planner: Planner, *, on_step: Callable[[StepMetrics], None] = lambda metrics: None
) -> Ended:
    """Train a run to its end, from its newest checkpoint if it has one, and write its report."""
    begin, notes = time.perf_counter(), list[str]()
    try:
        if is_run(folder) and finished_checkpoint(folder):
            return Ended("skipped")
        if is_run(folder):
            preparation, run = open_run(folder, data=recipe.data, planner=planner)
        else:
            preparation, run = create_run(recipe, folder, planner=planner)
        outcome = train_run(preparation, run, on_step=on_step, on_message=notes.append)
        write_report(run.path, training=False)
    except NapkinError as error:
        return Ended("failed", str(error), seconds=time.perf_counter() - begin, notes=tuple(notes))
    parts = {} if outcome.measurement is None else outcome.measurement.seconds_by_part
    return Ended(
        "finished" if outcome.interrupted_by is None else "stopped",
        signal=int(outcome.interrupted_by or 0),
        seconds=time.perf_counter() - begin,
        step_seconds=sum(parts.get(part, 0.0) for part in _STEP_PARTS),
        notes=tuple(notes),
    )


_CODE = "from napkin.scaling.sweep_workers import serve\nserve()"
_SECONDS_BETWEEN_LOOKS = 0.1


def serve() -> None:
    """Answer requests from standard input until it ends: a worker's whole life."""
    planner = SharedPlans()
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        os.chdir(request["in"])
        ended = train_one(msgspec.convert(parse_toml(request["recipe"]), Recipe), Path(request["folder"]), planner)
        answers.write(json.dumps(asdict(ended)) + "\n")
        answers.flush()
        if ended.state == "stopped":
            return


def train_side_by_side(
    trials: Sequence[Trial], folder: Callable[[Trial], Path], at_once: int, on_end: Callable[[Trial, Ended], None]
) -> int:
    """Train runs, `at_once` of them at any time, and call `on_end` from this thread as each ends.

    Returns the signal that stopped them, or 0. Raises NapkinError where workers cannot be started.
    """
    waiting, ended = list(trials), list[tuple[Trial, Ended]]()
    workers = [_Worker() for _ in range(at_once)]
    lock = threading.Lock()

    def work(worker: "_Worker") -> None:
        while True:
            with lock:
                if not waiting or interruption.signal is not None:
                    return
                trial = waiting.pop(0)
            answer = worker.ask(trial, folder(trial), interruption)
            with lock:
                ended.append((trial, answer))

    def report() -> None:
        with lock:
            new, ended[:] = list(ended), []
        for trial, answer in new:
            on_end(trial, answer)

    with catch_interruption() as interruption, ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(work, worker) for worker in workers]
        announced = False
        while (rest := wait(futures, timeout=_SECONDS_BETWEEN_LOOKS)).not_done:
            report()
            if interruption.signal is not None and not announced:
                announced = True
                for worker in workers:
                    worker.stop(interruption)
        for future in rest.done:
            future.result()
        for worker in workers:
            worker.close()
    report()
    return int(interruption.signal or 0)


class _Worker:
    """A process that trains runs."""

    def __init__(self) -> None:
        self._process: AnsweringProcess = self._start()

    def _start(self) -> AnsweringProcess:
        try:
            return start_answering(_CODE, own_session=True)
        except OSError as error:
            raise NapkinError(f"a worker cannot be started ({error.strerror}): use --at-once 1") from None

    def ask(self, trial: Trial, folder: Path, interruption: Interruption) -> Ended:
        """Train a run in it, and wait for its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"in": os.getcwd(), "folder": str(folder), "recipe": format_recipe(trial.recipe)}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = b""
        if answer:
            return msgspec.json.decode(answer, type=Ended)
        status = self._process.wait()
        if interruption.signal is not None:
            # The worker had not begun to train.
            return Ended("stopped", signal=int(interruption.signal))
        how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        # Another worker takes its place, and the sweep continues.
        self._process = self._start()
        return Ended("failed", f"the process that trained it {how}: `napkin resume {folder}` continues it")

    def stop(self, interruption: Interruption) -> None:
        """Pass on the signal that this process has received; the run that trains is saved."""
        if interruption.signal is not None and self._process.poll() is None:
            self._process.send_signal(interruption.signal)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
