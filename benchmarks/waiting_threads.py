"""The demo's step with threads that spin and threads that sleep while they wait, alone and beside a neighbour.

OpenMP's threads wait for each other at the end of every operator. GNU's library lets them spin for long by default,
which is fastest on a machine of one's own and very slow where another program wants the core: napkin's commands have
them sleep sooner (`napkin.cli.WAITING`). Each figure is the median of 12 steps in a process of its own.

    python benchmarks/waiting_threads.py
"""

import os
import statistics
import subprocess
import sys
import time

from napkin.cli import WAITING
from result_files import machine, no_options

STEP = """
import statistics, time, torch
from napkin.cli.demo import demo_recipe
from napkin.planning.step.machine import ThisMachine
from napkin.planning.planner import resolve, with_vocab_size
from napkin.train_step.step import build_train_state
resolved = resolve(with_vocab_size(demo_recipe("demo"), 4096), ThisMachine())
recipe = resolved.recipe
torch.set_num_threads(recipe.training.threads)
train_state = build_train_state(resolved)
tokens = torch.randint(4096, (recipe.training.batch_size, recipe.model.context_length))
seconds = []
for number in range(14):
    begin = time.perf_counter()
    train_state.step(number, tokens, tokens)
    seconds.append(time.perf_counter() - begin)
print(statistics.median(seconds[2:]))
"""


def step_seconds(settings: dict[str, str]) -> float:
    """Median seconds of a step in a new process under those settings."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING} | settings
    done = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def measure(rounds: int = 3) -> tuple[float, float]:
    """Spinning and sleeping, in turns, the median of the rounds."""
    pairs = [(step_seconds({}), step_seconds(WAITING)) for _ in range(rounds)]
    spinning, sleeping = zip(*pairs, strict=True)
    return statistics.median(spinning), statistics.median(sleeping)


def main() -> None:
    """Print both cases and the ratio."""
    no_options(__doc__)
    print(machine(), flush=True)
    alone = measure()
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(1)
    try:
        beside = measure()
    finally:
        neighbour.kill()
    print(f"{'':24}{'spinning':>12}{'sleeping':>12}{'ratio':>8}")
    for case, (spinning, sleeping) in (("alone", alone), ("beside a busy program", beside)):
        print(f"{case:24}{spinning:>10.3f} s{sleeping:>10.3f} s{spinning / sleeping:>8.2f}")


if __name__ == "__main__":
    main()
