"""Seconds from a command to the first thing that its user waits for, each in a process of its own.

    python benchmarks/starts.py                    # all, in turns, with `import torch` beside them
    python benchmarks/starts.py generate plan      # some of them
    python benchmarks/starts.py --cold             # first once with an empty cache: kernels are compiled, once

Training is started and ended after the first line of its metrics; everything else runs to its end. Processor seconds
include those of child processes that have ended. What is compiled and measured once per machine is in the cache
before the first sample.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from napkin.cli.common.files import STANDARD_LIBRARY
from napkin.cli.demo import demo_recipe
from napkin.files import atomic_write_text
from napkin.hardware.sampling import median_interval
from napkin.recipe.toml_file import format_recipe
from napkin.runs.metrics import METRICS_FILE
from result_files import heading, write_result
from turns import told

NAPKIN = (sys.executable, "-m", "napkin")
FIRST_STEP = "train to the first step"


@dataclass(frozen=True)
class Start:
    """A command, and the file with whose first line it has begun; None where the command's end is waited for."""

    name: str
    words: tuple[str, ...]
    until: str | None = None


STARTS = (
    Start("import torch", (sys.executable, "-c", "import torch")),
    Start("import napkin", (sys.executable, "-c", "import napkin")),
    Start("napkin --help", (*NAPKIN, "--help")),
    Start("generate one token", (*NAPKIN, "generate", "run", "def ", "--tokens", "1")),
    Start(FIRST_STEP, (*NAPKIN, "train", "recipe.toml", "--run", "new"), f"new/{METRICS_FILE}"),
    Start("plan GPT-2 --on", (*NAPKIN, "plan", "--preset", "gpt2", "--on", "H100")),
    Start("plan GPT-2 --on 8", (*NAPKIN, "plan", "--preset", "gpt2", "--on", "8xH100", "--training.batch-size", "64")),
    Start(
        "--layout auto of a 70B on 64",
        (*NAPKIN, *"plan --preset llama-3-70b --on 64xH100 --training.batch-size 64 --layout auto".split()),
    ),
    Start("fit on 8 H100", (*NAPKIN, "fit", "--on", "8xH100")),
)


def main() -> None:
    """Measure in turns, print the table and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="words of the rows to measure; all by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cold", action="store_true", help="measure each once with an empty cache first")
    parser.add_argument("--folder", type=Path, help="where tokenizer, tokens and run are made, or stand already")
    options = parser.parse_args()
    wanted = [
        each for each in STARTS if not options.names or each == STARTS[0] or any(n in each.name for n in options.names)
    ]
    head = heading("Seconds from a command to the first thing that its user waits for")
    with tempfile.TemporaryDirectory(prefix="napkin-starts-") as place:
        folder = options.folder or Path(place)
        if not (folder / "run").is_dir():
            folder.mkdir(exist_ok=True)
            prepare(folder)
        cold: dict[str, tuple[float, float]] = {}
        if options.cold:
            # Of the first process on a machine: each command has a cache of its own, without a calibration.
            for number, each in enumerate(wanted):
                cold[each.name] = seconds_of(each, folder, {"NAPKIN_CACHE_DIR": str(folder / f"cache-{number}")})
        samples: dict[str, list[tuple[float, float]]] = {each.name: [] for each in wanted}
        for each in wanted:
            seconds_of(each, folder)
        for _ in range(options.rounds):
            for each in wanted:
                samples[each.name].append(seconds_of(each, folder))
    lines = table(samples, cold)
    print("\n".join(lines))
    write_result("starts", [*head, *lines])


def prepare(folder: Path) -> None:
    """The demo's tokenizer, tokens and recipe, and a run of two steps to generate with."""
    for words in (
        ("tokenizer", "train", STANDARD_LIBRARY, "--out", "tokenizer.json"),
        ("tokenizer", "encode", STANDARD_LIBRARY, "--tokenizer", "tokenizer.json", "--out", "."),
    ):
        run(words, folder)
    atomic_write_text(folder / "recipe.toml", format_recipe(demo_recipe(".")))
    run(("train", "recipe.toml", "--run", "run", "--training.steps", "2", "--optimizer.warmup-steps", "1"), folder)


def run(words: Sequence[str], folder: Path) -> None:
    """Run a command of napkin to its end."""
    subprocess.run([*NAPKIN, *words], cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def seconds_of(start: Start, folder: Path, environment: dict[str, str] | None = None) -> tuple[float, float]:
    """Wall and processor seconds of a command, up to what is waited for."""
    begun = None if start.until is None else folder / start.until
    begin = time.perf_counter()
    with open(folder / "said.txt", "w") as said:
        process = subprocess.Popen(
            start.words, cwd=folder, env={**os.environ, **(environment or {})}, stdout=said, stderr=said
        )
        if begun is not None:
            while process.poll() is None and not (begun.exists() and begun.stat().st_size):
                time.sleep(0.005)
            wall = time.perf_counter() - begin
            process.kill()
            _, status, used = os.wait4(process.pid, 0)
        else:
            _, status, used = os.wait4(process.pid, 0)
            wall = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if begun is not None and begun.exists():
        shutil.rmtree(begun.parent)
    elif process.returncode not in (0, 2):
        raise SystemExit(f"{start.name} has failed: {(folder / 'said.txt').read_text()[-500:]}")
    return wall, used.ru_utime + used.ru_stime


def table(samples: dict[str, list[tuple[float, float]]], cold: dict[str, tuple[float, float]]) -> list[str]:
    """A row for each command: medians with their intervals, and the once with an empty cache."""
    lines = [
        "| start | seconds (interval) | processor seconds (interval) | with an empty cache: seconds, processor |",
        "|---|---|---|---|",
    ]
    for name, found in samples.items():
        wall, used = (median_interval(each) for each in zip(*found, strict=True))
        once = "{:.1f}, {:.1f}".format(*cold[name]) if name in cold else ""
        lines.append(f"| {name} | {told(wall)} | {told(used)} | {once} |")
    covered = median_interval([wall for wall, _ in next(iter(samples.values()))])
    lines.append(f"\n{covered.samples} samples of each in turns; intervals cover {covered.coverage:.0%}.")
    return lines


if __name__ == "__main__":
    main()
