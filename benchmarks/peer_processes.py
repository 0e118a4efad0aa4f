"""Contenders of a benchmark of training steps: each in a process of its own, taking their steps in turns.

A worker says its first loss, then the peak bytes of the tensors of a step, then the seconds of each step that it is
told to take, and last the most RSS that it has had.
"""

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from napkin.accounting.recording import record, recording
from turns import Samples, in_turns

Step = Callable[[], float]
"""Takes a training step; its loss."""


class Worker:
    """A contender's process, made by the script that runs: it takes a step whenever it is told to."""

    def __init__(self, name: str, *arguments: str, threads: int, python: str = sys.executable) -> None:
        command = [python, sys.argv[0], "--threads", str(threads), "--worker", name, *arguments]
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.loss, self.peak_bytes, self.most_rss = 0.0, 0, 0

    def begin(self) -> None:
        """Wait until it has begun."""
        self.loss = self._answer()
        self.peak_bytes = int(self._answer())

    def turn(self) -> float:
        """Seconds of one step."""
        self._say("go")
        return self._answer()

    def finish(self) -> None:
        """Ask for the most RSS, and let the process end."""
        self._say("done")
        self.most_rss = int(self._answer())
        self.process.wait()

    def _say(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def _answer(self) -> float:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                return float(line.split()[1])
        raise SystemExit(f"{self.name} has ended before it was done: its own message is above")


def seconds_in_turns(workers: dict[str, Worker], rounds: int) -> Samples:
    """Begin and end the workers; the seconds of each one's steps, after two that warm up."""
    for name, worker in workers.items():
        print(f"{name} begins", file=sys.stderr, flush=True)
        worker.begin()
    turns = {name: worker.turn for name, worker in workers.items()}
    in_turns(turns, 2)
    seconds = in_turns(turns, rounds)
    for worker in workers.values():
        worker.finish()
    return seconds


def serve(module: torch.nn.Module, step: Step, peak_bytes: int | None = None) -> None:
    """The other side of a `Worker`, for a step that is called; its peak bytes are recorded where they are not given."""
    say(step())
    say(record(module, step, warm_up=1).peak_bytes if peak_bytes is None else peak_bytes)
    while sys.stdin.readline().strip() != "done":
        begin = time.perf_counter()
        step()
        say(time.perf_counter() - begin)
    say(most_rss())


def serve_trainer(trainer: Any, module: torch.nn.Module) -> None:
    """The other side of a `Worker`, for a trainer of transformers, which calls its steps itself."""
    import transformers  # pyright: ignore[reportMissingImports]

    losses: list[float] = []
    computed = trainer.training_step

    def training_step(*arguments: Any, **settings: Any) -> torch.Tensor:
        loss = computed(*arguments, **settings)
        losses.append(float(loss))
        return loss

    class Turns(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            # As `record` does: the third step is watched, when the optimizer has its state.
            self.watch = contextlib.ExitStack()
            if len(losses) == 2:
                self.watch.enter_context(recording(module, lambda ledger, _: say(ledger.peak_bytes)))
            elif len(losses) > 2 and sys.stdin.readline().strip() == "done":
                say(most_rss())
                os._exit(0)
            self.begin = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds = time.perf_counter() - self.begin
            self.watch.close()
            if len(losses) == 1:
                say(losses[0])
            elif len(losses) > 3:
                say(seconds)

    trainer.training_step = training_step
    trainer.add_callback(Turns())
    trainer.train()


def say(figure: float) -> None:
    """Tell the other side."""
    print(f"answer {figure}", flush=True)


def most_rss() -> int:
    """The most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
