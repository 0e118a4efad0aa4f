"""Speeds on a GPU beside what a user would take instead: three training steps, decoding, prefill; one report of ratios.

    make gpu-speed
    python benchmarks/gpu_speed.py
    python benchmarks/gpu_speed.py --dry-run            tiny sizes on the CPU, to see that it runs to its end

GPT-2 small as in a speedrun (524,288 tokens per update), nanochat's d12, a block of an 8B model at 8192 tokens; 16
sequences that are decoded, and 8 prompts of 2048 tokens. Beside napkin's forms run nanochat, torchtitan and vLLM where
they are installed, which the report says, and always a plain model of PyTorch, compiled. Each contender is a process
of its own with a limit of minutes: what fails or is too long is a row with its reason. What has been measured on this
commit, device and day is kept in first-hour/ and not measured again. The ratio is that of napkin's fastest form to the
contender's speed. The calls into the peers' interfaces were written without them installed, and have never run.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec

import msgspec
import torch

from gpu_first_hour import ROOT, Found, Step, keep, kept, machine_of, run
from gpu_speed_cases import CASES, Result, measure
from result_files import heading, write_result

PEERS = ("torchtitan", "nanochat", "vllm")
MINUTES = 8.0
"""For one contender: most of it is compiling."""


def steps(*, tiny: bool) -> list[Step]:
    """Return a step per case and contender, napkin's first."""
    sizes = ("--dry-run",) if tiny else ()
    return [
        Step(case, who, ("benchmarks/gpu_speed.py", "--case", case, "--who", who, *sizes), MINUTES)
        for case, contenders in CASES.items()
        for who, contender in contenders.items()
        if (contender.package is None or find_spec(contender.package)) and not (tiny and contender.on_gpu_only)
    ]


def table(found: Mapping[tuple[str, str], Found]) -> list[str]:
    """Return a row per case and contender, with napkin's fastest form over it."""
    lines = ["| case | who | speed | seconds | napkin / it |", "|---|---|---|---|---|"]
    results = {place: result_of(each) for place, each in found.items()}
    for (case, who), each in found.items():
        result = results[case, who]
        if result is None:
            why = next((line for line in reversed(each.output) if line.strip()), each.outcome)
            lines.append(f"| {case} | {who} | {each.outcome}: {why.strip()[:120]} | – | – |")
            continue
        ours = [r.speed for (other, name), r in results.items() if r and other == case and name.startswith("napkin")]
        ratio = f"{max(ours) / result.speed:.2f}" if ours else "–"
        lines.append(f"| {case} | {who} | {result.speed:,.0f} {result.unit} | {result.seconds:.4g} | {ratio} |")
    missing = [peer for peer in PEERS if find_spec(peer) is None]
    return [*lines, "", f"Not installed: {', '.join(missing) or 'none'}."]


def result_of(found: Found) -> Result | None:
    """Return what a contender's process has printed last; None where it failed."""
    if found.outcome != "passed" or not found.output:
        return None
    return msgspec.json.decode(found.output[-1], type=Result)


def main() -> int:
    """Measure what is not kept, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--minutes", type=float, default=60, help="for all contenders together (default: 60)")
    parser.add_argument("--again", action="store_true", help="measure also what is kept")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--who", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = "cpu" if options.dry_run else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use: --dry-run shows that the cases run")
    if options.case:
        print(json.dumps(msgspec.to_builtins(measure(options.case, options.who, tiny=options.dry_run, device=device))))
        return 0
    machine = machine_of(device)
    head = heading(f"Speeds on {machine.name}", machine.versions)
    file = ROOT / "first-hour" / f"speed-{device}.json"
    passed = {} if options.again else kept(file, machine)
    end = time.monotonic() + 60 * options.minutes
    found: dict[tuple[str, str], Found] = {}
    for step in (each for each in steps(tiny=options.dry_run) if options.only in each.layer):
        name, left = f"{step.layer}: {step.name}", min(60 * step.minutes, end - time.monotonic())
        if name in passed:
            each = passed[name]
        elif left <= 0:
            each = Found("not run", 0.0, [])
        else:
            print(f"{name} …", flush=True)
            each = run(step, device, left)
            print(f"    {each.outcome} after {each.seconds:.0f} s", flush=True)
        found[step.layer, step.name] = passed[name] = each
        keep(file, machine, passed)
    lines = table(found)
    print("\n".join(lines))
    if not options.dry_run:
        write_result("gpu-speed", [*head, *lines])
    return int(any(each.outcome in ("failed", "too long") for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
