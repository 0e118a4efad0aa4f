"""Compiled training scripts of other people, rehearsed unedited, beside the memory that their logs state.

    python benchmarks/compiled_programs.py --programs FOLDER [--only NAME] [--answers FOLDER] [--write]

`FOLDER` holds scripts of openai/parameter-golf (https://github.com/openai/parameter-golf, records/*/*/train_gpt.py) and
KellerJordan/modded-nanogpt (the scripts at the head of the logs in records/track_1_short), which are not part of this
project, under the names of `published_program_memory.csv`. That file has what each log states, the variables that the
script was started with, and the release of torch; `seen` is "yes" for programs whose figures were looked at while
counting of compiled programs was built. Each script runs as rank 0 of 8 × H100 through `napkin rehearse`, one after
the other, and the highest bytes so found stand beside the log's, which are of the whole run. With `--answers`, the
answer of each rehearsal is kept in that folder, and one that is there already is not made again.
"""

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from result_files import existing, heading, write_result

PUBLISHED = Path(__file__).parent / "published_program_memory.csv"
SECONDS = 3000
"""As long as a rehearsal may take on a machine that other programs use."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=existing, required=True)
    parser.add_argument("--only", default="", help="scripts whose name has this in it")
    parser.add_argument("--answers", type=Path, help="a folder for the answers of rehearsals")
    parser.add_argument("--write", action="store_true", help="keep the table in results/")
    options = parser.parse_args()
    head = heading(
        "Compiled scripts, rehearsed unedited, beside their logs",
        "Rank 0 of 8 × H100; MiB. 'Seen' are programs whose figures were looked at while counting of compiled programs "
        "was built; no constant was fitted to any.",
    )
    logs: dict[str, list[dict[str, str]]] = {}
    for row in csv.DictReader(PUBLISHED.open(encoding="utf-8")):
        if options.only in row["script"]:
            logs.setdefault(row["script"], []).append(row)
    with tempfile.TemporaryDirectory() as folder:
        answers = options.answers or Path(folder)
        answers.mkdir(exist_ok=True)
        rows = {name: (found, answer_of(options.programs / name, found[0], answers)) for name, found in logs.items()}
    lines = table(rows)
    print("\n".join(lines))
    if options.write:
        write_result("compiled-programs", [*head, *lines])


def answer_of(script: Path, row: dict[str, str], answers: Path) -> dict[str, Any]:
    """What `napkin rehearse` says of a script, with the CPU seconds that it took; or the line of its error."""
    kept = answers / f"{script.stem}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    command = [sys.executable, "-W", "ignore", "-m", "napkin", "rehearse", str(script), "--on", "8xH100"]
    command += ["--torch", row["torch"], "--seconds", str(SECONDS), "--json"]
    variables = variables_of(row)
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **variables}, cwd=folder, check=False
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    answer = json.loads(ran.stdout) if ran.stdout.startswith("{") else {"error": ran.stderr.strip().splitlines()[-1]}
    answer |= {"processor_seconds": spent, "wall_seconds": time.monotonic() - begin}
    kept.write_text(json.dumps(answer))
    return answer


def variables_of(row: dict[str, str]) -> dict[str, str]:
    """Return the environment variables that a log's script was started with."""
    return dict(each.split("=") for each in row["environment"].split())


def table(rows: dict[str, tuple[list[dict[str, str]], dict[str, Any]]]) -> list[str]:
    """A line for each log, and what the errors come to."""
    lines = [
        "| script | log | seen | allocated | rehearsed | error | reserved | rehearsed | error | CPU s | GB here |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors: dict[str, list[float]] = {"allocated": [], "reserved": [], "allocated, not seen": []}
    for name, (logs, answer) in rows.items():
        for row in logs:
            cells = [name.removesuffix(".py"), row["log"] or "no log", row["seen"]]
            if "error" in answer:
                lines.append(f"| {' | '.join(cells)} | cannot be rehearsed: {answer['error']} |")
                continue
            found = {"allocated": answer["highest_bytes"] / 2**20, "reserved": answer["highest_reserved_bytes"] / 2**20}
            for kind, mib in found.items():
                stated = row[f"{kind}_mib"]
                error = mib / float(stated) - 1 if stated else None
                cells += [f"{float(stated):,.0f}" if stated else "not stated", f"{mib:,.0f}"]
                cells.append("" if error is None else f"{error:+.1%}")
                if error is not None:
                    errors[kind].append(error)
                    if kind == "allocated" and row["seen"] == "no":
                        errors["allocated, not seen"].append(error)
            if row["parameters"] and answer["parameters"] != int(row["parameters"]):
                cells[0] += f" (parameters {answer['parameters']:,}, its log {int(row['parameters']):,})"
            cells += [f"{answer['processor_seconds']:.0f}", f"{answer['rehearsing_bytes'] / 1e9:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for kind, found in errors.items():
        if found:
            sizes = sorted(map(abs, found))
            ninth = sizes[-(-9 * len(sizes) // 10) - 1]
            lines.append(
                f"- {kind}, {len(sizes)} logs: median error {median(sizes):.1%}, nine in ten within {ninth:.1%}"
            )
    done = sum("error" not in answer for _, answer in rows.values())
    lines.append(f"- {done} of {len(rows)} scripts rehearsed unedited")
    return lines


if __name__ == "__main__":
    main()
