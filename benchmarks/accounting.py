"""The accountant beside the calculators that people use: FLOPs, peak bytes, speed, and what metering costs.

One command on a CPU; the tables it prints are also written to benchmarks/results/:

    .venv-peers/bin/pip install calflops fvcore torchinfo thop ptflops deepspeed fire
    .venv-peers/bin/pip install --no-deps llm-analysis
    .venv-peers/bin/python benchmarks/accounting.py
    python benchmarks/accounting.py --quick --only speed    # a minute on two quiet cores

What is not installed is left out. `--only flops` makes one table; `--quick` takes the small models alone.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from napkin.cli import WAITING

# Before torch is there: threads that spin while they wait stop a busy machine.
os.environ.update(WAITING)
sys.path.append(str(Path(__file__).parent.parent / "tests"))


from calculators import flops, metering, peak_bytes, speed
from calculators.models import CASES
from calculators.processes import available
from napkin.units import format_bytes, format_flops, format_seconds
from result_files import heading, write_result
from turns import BRACKETS, ratio_spread, spread

PEERS = "accelerate calflops deepspeed fvcore llm-analysis ptflops thop torchinfo transformers".split()
GOAL = 0.005


def main() -> None:
    """Print the tables, and write them where results are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(SECTIONS), action="append", help="one table; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small models alone; nothing is written")
    options = parser.parse_args()
    lines = heading("The accountant beside other calculators", packages=PEERS)
    for line in _lines(options.only or tuple(SECTIONS), quick=options.quick):
        lines.append(line)
        print(line, flush=True)
    if not options.quick:
        write_result("accounting-cpu", lines)


def _lines(sections: tuple[str, ...], *, quick: bool) -> Iterator[str]:
    missing = [name for name in PEERS if not available(name)]
    if missing:
        yield f"Left out, not installed: {', '.join(missing)}."
        yield ""
    for section in sections:
        yield from SECTIONS[section](quick)
        yield ""


def _flops(quick: bool) -> Iterator[str]:
    names = ["deep linear"] if quick else list(CASES)
    results = flops.table(names)
    yield "## FLOPs of a forward and a backward pass, against the products of the step"
    yield ""
    yield "Error of each calculator, and of the model on which it is furthest off. The truth: every product that the"
    yield "step does, its multiplications and additions summed by an oracle that knows no formula of an operator and"
    yield "does them scalar by scalar on a small copy of each model first. Calculators of a forward pass alone are"
    yield "taken times 3, those that count multiply-adds times 2; on real tensors of the CPU unless it says meta."
    yield ""
    yield from _errors(results, format_flops)


def _bytes(quick: bool) -> Iterator[str]:
    names = [name for name, each in peak_bytes.SETTINGS.items() if not quick or each.decoder == peak_bytes.SMALL]
    results = peak_bytes.table(names)
    yield "## Peak bytes of a training step with AdamW, against the allocator's events"
    yield ""
    yield "A steady step, fp32 weights, fused AdamW, one thread. torchinfo states no gradients and no optimizer: a"
    yield "second column adds them. Rules and estimates that take no batch, length or checkpointing stand as they are;"
    yield "llm-analysis knows no fp32 weights: its own mixed precision stands in every row."
    yield ""
    yield from _errors(results, format_bytes)


def _errors(results: dict[str, Any], show: Callable[[float], str]) -> Iterator[str]:
    truth = results["truth"]
    if isinstance(truth, str):
        yield f"No truth: {truth}"
        return
    yield f"| model | truth | {' | '.join(name for name in results if name != 'truth')} |"
    yield "|---" * (len(results) + 1) + "|"
    notes: dict[str, str] = {}
    for model, true in truth.items():
        if isinstance(true, str):
            yield f"| {model} | {true} |"
            continue
        cells = [_error(found if isinstance(found, str) else found[model], true) for found in _peers(results)]
        yield f"| {model} | {show(true)} | {' | '.join(cells)} |"
    worst = []
    for calculator, found in results.items():
        if calculator == "truth":
            continue
        figures = {} if isinstance(found, str) else found
        errors = [found[m] / truth[m] - 1 for m, n in figures.items() if not isinstance(n, str)]
        worst.append(f"**{_percent(max(errors, key=abs))}**" if errors else "–")
        reasons = [found] if isinstance(found, str) else [n for n in figures.values() if isinstance(n, str)]
        notes |= {reason: calculator for reason in reasons if reason != flops.NOT_FOR_THIS}
    yield f"| **worst** | | {' | '.join(worst)} |"
    for reason, calculator in notes.items():
        yield f"\nNo figure from {calculator}: {reason}"


def _peers(results: dict[str, Any]) -> list[Any]:
    return [found for name, found in results.items() if name != "truth"]


def _error(found: float | str, truth: float) -> str:
    return "–" if isinstance(found, str) else _percent(found / truth - 1)


def _percent(error: float) -> str:
    if error == 0:
        return "0"
    return f"{error:+.4%}" if abs(error) < 1e-4 else f"{error:+.2%}" if abs(error) < 0.0995 else f"{error:+.0%}"


def _speed(quick: bool) -> Iterator[str]:
    if quick:
        speed.MODELS = speed.MODELS[:1]
    results = speed.table()
    yield "## Processor time to count, and the process's resident memory"
    yield ""
    yield "One sequence of 1,024 tokens, two runs, each in a process of its own, model made on the meta device (no"
    yield "peer needs weights there, though some count differently than with them). napkin: forward and backward pass,"
    yield "update, FLOPs and bytes of every operator and the peak; FlopCounterMode: FLOPs of forward and backward pass;"
    yield "the others: FLOPs of a forward pass. Behind the seconds: their ratio to napkin's, and resident memory."
    yield BRACKETS
    yield ""
    yield f"| | {' | '.join(speed.MODELS)} |"
    yield "|---" * (len(speed.MODELS) + 1) + "|"
    for calculator, found in results.items():
        cells = [_time_and_rss(found.get(model, ""), results[speed.NAPKIN][model]) for model in speed.MODELS]
        yield f"| {calculator} | {' | '.join(cells)} |"


def _time_and_rss(found: Any, ours: Any) -> str:
    if isinstance(found, str):
        return found
    seconds, rss = zip(*found, strict=True)
    if not all(seconds):
        return format_bytes(min(rss))
    ratio = f"{ratio_spread(seconds, [each for each, _ in ours])} ×, " if isinstance(ours, list) else ""
    return f"{spread(seconds, format_seconds)}, {ratio}{format_bytes(min(rss))}"


def _metering(quick: bool) -> Iterator[str]:
    if quick:
        metering.TURNS = 5
    found = metering.measure()
    plain = statistics.median(found["plain"])
    every = statistics.median(found["watch alone"]) / plain
    once = (statistics.median(found["metered step"]) / plain - 1) / metering.STEPS_OF_A_RUN
    verdict = "below" if every + once < GOAL else "ABOVE"
    yield "## What metering adds to a run"
    yield ""
    yield f"The demo's model and batch; {metering.TURNS} steps each, in turns, in one process. {BRACKETS}"
    yield ""
    yield "| | seconds | / a step, not metered |"
    yield "|---|---|---|"
    rows = {
        "a step, not metered": "plain",
        "a step, parts timed, memory read": "watched",
        "the watch alone, around nothing": "watch alone",
        "the one step whose operators and allocations are recorded": "metered step",
    }
    for name, key in rows.items():
        ratio = "" if key == "plain" else ratio_spread(found[key], found["plain"], "{:.4f}".format)
        yield f"| {name} | {spread(found[key], format_seconds)} | {ratio} |"
    enough = once * metering.STEPS_OF_A_RUN / (GOAL - every)
    yield ""
    yield f"{every:.3%} of each step; the recorded step {once:.3%} of a run of {metering.STEPS_OF_A_RUN} steps: "
    yield f"{every + once:.2%} in all, {verdict} the goal of {GOAL:.1%}, which runs of {enough:.0f} steps or more meet."


SECTIONS: dict[str, Callable[[bool], Iterator[str]]] = {
    "flops": _flops,
    "bytes": _bytes,
    "speed": _speed,
    "metering": _metering,
}

if __name__ == "__main__":
    main()
