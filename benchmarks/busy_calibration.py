"""Plans made on a quiet machine, then beside a program that keeps every core busy: how far apart are they?

    python benchmarks/busy_calibration.py

First the machine is calibrated and ten recipes are planned, quiet, and the step of each is trained for a few seconds.
Then a spinning process per core is started, the machine is calibrated into another cache, and the same recipes are
planned again, each in a process of its own as `napkin plan` is. Last, `napkin demo` runs beside them, `--demos` times:
its table must have the seconds of the quiet plan in its count, and name the others where its meter is above.

Run it on a machine without other work: the first line says what other processes used while it was quiet.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from napkin.cli import WAITING
from napkin.hardware.host import usable_cores
from result_files import heading, write_result

PLAN = """
import json, sys
from napkin.planning.planner import plan
from step_seconds import measure, recipes
number, trains = int(sys.argv[1]), sys.argv[2] == "train"
planned = plan(recipes("cpu", 10)[number])
model, training = planned.recipe.model, planned.recipe.training
conditions = planned.price.conditions
print(json.dumps({
    "name": f"d {model.d_model} L {model.n_layers} B {training.batch_size} {planned.resolved.precision.products}",
    "seconds": planned.seconds_per_step,
    "factor": planned.price.factor,
    "peak": planned.site.matmul_peak,
    "busy": planned.disturbed,
    "others": conditions.others,
    "measured": measure(planned.resolved) if trains else None,
}))
"""
SPIN = "while True: pass"


def planned(number: int, cache: Path, *, trains: bool = False) -> dict:
    """The plan of one recipe, made by a new process."""
    environment = {**os.environ, **WAITING, "NAPKIN_CACHE_DIR": str(cache), "PYTHONPATH": str(Path(__file__).parent)}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    command = [sys.executable, "-c", PLAN, str(number), "train" if trains else "plan"]
    print(f"recipe {number}, {cache.name}", file=sys.stderr, flush=True)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def spinning_processes() -> Iterator[None]:
    """One for each core that this process may use."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(usable_cores())]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def demo(folder: Path, cache: Path) -> tuple[float, float, float | None]:
    """The demo's seconds per step: planned, metered by the clock, and metered without other processes."""
    environment = {**os.environ, "NAPKIN_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "napkin", "demo", "--folder", str(folder)]
    subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rows = {row["quantity"]: row for row in json.loads((folder / "run/measurement.json").read_text())["table"]}
    clock, alone = rows["seconds per step"], rows.get("seconds per step, alone")
    return clock["count"], clock["meter"], alone and alone["meter"]


def off(ratio: float) -> float:
    """How far a ratio is from 1, whichever way."""
    return max(ratio, 1 / ratio) - 1


def main() -> None:
    """Print the table and what it comes to, and write it where results are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=int, default=10)
    parser.add_argument("--demos", type=int, default=0, help="runs of the demo beside the spinning processes")
    options = parser.parse_args()
    head = heading(
        "Plans on a busy machine",
        f"A spinning process on each of {usable_cores()} cores. Ratios are of two plans, which are made once each.",
    )
    numbers = range(options.recipes)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        quiet = [planned(number, place / "quiet", trains=True) for number in numbers]
        with spinning_processes():
            busy = [planned(number, place / "busy") for number in numbers]
            demos = [demo(place / f"demo-{number}", place / "busy") for number in range(options.demos)]
        beside = statistics.mean(each["others"] for each in quiet)
        lines = [
            f"While it was quiet, other processes used {beside:.2f} cores.",
            "",
            "| recipe | measured quiet ms | planned quiet | planned busy | busy over quiet | others, cores | said so |",
            "|---|---|---|---|---|---|---|",
        ]
        ratios = [other["seconds"] / one["seconds"] for one, other in zip(quiet, busy, strict=True)]
        for one, other, ratio in zip(quiet, busy, ratios, strict=True):
            lines.append(
                f"| {one['name']} | {1e3 * one['measured']:.1f} | {1e3 * one['seconds']:.1f} | "
                f"{1e3 * other['seconds']:.1f} | {ratio:.3f} | {other['others']:.2f} | "
                f"{'yes' if other['busy'] else 'no'} |"
            )
        within = sum(off(ratio) <= 0.1 for ratio in ratios)
        lines += ["", f"- busy over quiet: {within} of {len(ratios)} within 10%, worst {max(map(off, ratios)):.1%} off"]
        peaks = [other["peak"] / one["peak"] for one, other in zip(quiet, busy, strict=True)]
        lines.append(f"- matmul peak, busy over quiet: {statistics.median(peaks):.3f}")
        for number, (count, clock, alone) in enumerate(demos, start=1):
            without = "–" if alone is None else f"{1e3 * alone:.1f} ms"
            lines.append(f"- demo {number}: planned {1e3 * count:.1f} ms, metered {1e3 * clock:.1f}, alone {without}")
    print("\n".join(lines))
    write_result("busy-calibration", [*head, *lines])


if __name__ == "__main__":
    main()
