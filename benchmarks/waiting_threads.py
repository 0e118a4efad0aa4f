"""The demo's step with threads that spin and threads that sleep while they wait, alone and beside a neighbour.

OpenMP's threads wait for each other at the end of every operator. GNU's library lets them spin for long by default,
which is fastest on a machine of one's own and very slow where another program wants the core: napkin's commands have
them sleep sooner (`napkin.cli.WAITING`). Each sample is the median of 12 steps in a process of its own.

    python benchmarks/waiting_threads.py
"""

import argparse
import os
import subprocess
import sys
import time

from napkin.cli import WAITING
from result_files import heading
from turns import BRACKETS, Samples, in_turns, ratio_spread, spread

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


def measure(rounds: int) -> Samples:
    """Spinning and sleeping, in turns."""
    return in_turns({"spinning": lambda: step_seconds({}), "sleeping": lambda: step_seconds(WAITING)}, rounds)


def main() -> None:
    """Print both cases and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    heading("A step with threads that spin and threads that sleep while they wait", BRACKETS)
    alone = measure(options.rounds)
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    time.sleep(1)
    try:
        beside = measure(options.rounds)
    finally:
        neighbour.kill()
    print("| case | spinning, s | sleeping, s | ratio |\n|---|---|---|---|")
    for case, samples in (("alone", alone), ("beside a busy program", beside)):
        cells = [spread(each, "{:.3f}".format) for each in samples.values()]
        print(f"| {case} | {' | '.join(cells)} | {ratio_spread(samples['spinning'], samples['sleeping'])} |")


if __name__ == "__main__":
    main()
