"""What a run of a sweep takes beside its steps and evaluations, and what `napkin train` takes for the same run.

Six runs of two shapes train in one process, as `napkin sweep` trains them; then one of each shape in a process of its
own. Seconds are those of the clock and of the process's CPU; on a machine that others use, the latter are what counts.

    OMP_NUM_THREADS=1 python benchmarks/sweep.py        # about three minutes

The table is also written to benchmarks/results/.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from library_text import library_text
from napkin.model.config import ModelConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.runs.metrics import read_metrics
from napkin.scaling.sweep import Sweep
from napkin.scaling.sweep_workers import Ended
from napkin.scaling.trials import Trial, grid, read_axis
from result_files import heading, write_result
from turns import BRACKETS, spread

STEPS = 40


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    base = Recipe(
        data=library_text(1024),
        model=ModelConfig(context_length=64, d_model=64, n_layers=2, n_heads=2),
        training=TrainingConfig(steps=STEPS, batch_size=8, threads=1, evaluation_tokens=4096),
    )
    trials = grid(
        base, [read_axis("--model.d-model", "48,64"), read_axis("--optimizer.learning-rate", "1e-3,3e-3,1e-2")]
    )
    head = heading("What a sweep adds to its runs", f"{STEPS} steps of each run, one thread. {BRACKETS}")
    lines = [
        "| run | seconds beside steps and evaluations | CPU seconds in all |",
        "| --- | ---: | ---: |",
    ]
    samples: dict[str, list[tuple[float, float]]] = {}
    for _ in range(options.rounds):
        for what, *seconds in one_round(trials):
            samples.setdefault(what, []).append((seconds[0], seconds[1]))
    for what, found in samples.items():
        lines.append(f"| {what} | {' | '.join(spread(each) for each in zip(*found, strict=True))} |")
    print("\n".join(lines))
    write_result("sweep", [*head, *lines])


def one_round(trials: tuple[Trial, ...]) -> list[tuple[str, float, float]]:
    """Each run's name, the seconds beside its steps and evaluations, and CPU seconds."""
    with tempfile.TemporaryDirectory() as folder:
        begin, cpu = time.perf_counter(), time.process_time()
        sweep = Sweep.plan(trials, Path(folder) / "sweep", at_once=1)
        wall, used = time.perf_counter() - begin, time.process_time() - cpu
        found = [(f"plan of all, {sweep.planned.n_counted} shapes", wall, used)]
        before = time.process_time()

        def ended(trial: Trial, how: Ended) -> None:
            nonlocal before
            found.append((trial.name, how.seconds - how.step_seconds, time.process_time() - before))
            before = time.process_time()

        sweep.run(on_end=ended)
        return [*found, *(_alone(trial, Path(folder)) for trial in (trials[2], trials[5]))]


def _alone(trial: Trial, folder: Path) -> tuple[str, float, float]:
    recipe, run = folder / f"{trial.name}.toml", folder / "alone" / trial.name
    recipe.write_text(format_recipe(trial.recipe))
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "napkin", "train", str(recipe), "--run", str(run)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ)
    wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    steps = sum(line.step_seconds for line in read_metrics(run / "metrics.jsonl"))
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"`napkin train`: {trial.name}", wall - steps, used


if __name__ == "__main__":
    main()
