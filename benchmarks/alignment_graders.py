"""Graders of mathematical answers: false rewards, equal forms accepted, seconds per answer; beside math-verify.

The tables are those of the tests: answers that must not be rewarded and pairs that say the same. GSM8K's solutions, if
their folder is given, are graded against themselves and against the next problem's answer.

    pip install math-verify
    python benchmarks/alignment_graders.py --gsm8k FOLDER       # train.jsonl and test.jsonl anywhere in it

The table is also written to benchmarks/results/.
"""

import argparse
import contextlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from napkin.grading.mathematics.math_answer import math_score, number_score
from result_files import heading, write_result
from turns import BRACKETS, spread

TABLES = Path(__file__).parent.parent / "tests" / "grading" / "mathematics"
Grade = Callable[[str, str], float]
Pairs = list[tuple[str, str]]


def wrong_answers() -> Pairs:
    rows = [json.loads(line) for line in (TABLES / "wrong_answers.jsonl").read_text().splitlines()]
    return [(row["answer"], row["reference"]) for row in rows]


def long_answers() -> Pairs:
    """Answers made to take long."""
    return [
        ("7" * 1_000_000, "7"),
        ("\\boxed{" + "9^" * 900 + "9}", "9"),
        ("\\boxed{" + "(" * 900 + "7" + ")" * 900 + "}", "8"),
        ("\\boxed{0." + "3" * 1_900 + "}", "1/3"),
        ("\\boxed{" * 14_000 + "7", "7"),
        ("\\boxed{7}" + "\\boxed{}" * 12_000, "7"),
        ("\\boxed{(x+1)^{400}}", "(x+1)^{399}"),
        ("\\boxed{" + "+".join(f"\\sin({n}x)" for n in range(60)) + "}", "x"),
        ("\\boxed{" + "*".join(["987654321/123456789"] * 90) + "}", "7"),
    ]


def equal_answers() -> Pairs:
    lines = (TABLES / "equal_answers.txt").read_text().splitlines()
    pairs = [line.split("\t") for line in lines if not line.startswith("#")]
    return [(f"Hence $\\boxed{{{one}}}$.", other) for pair in pairs for one, other in (pair, pair[::-1])]


def gsm8k(folder: Path) -> tuple[Pairs, Pairs]:
    """Each solution with its own answer, and with the next one that differs."""
    rows = [json.loads(line) for path in sorted(folder.rglob("*.jsonl")) for line in path.read_text().splitlines()]
    solutions = [row["answer"] for row in rows]
    answers = [solution.rpartition("####")[2].strip() for solution in solutions]
    own = list(zip(solutions, answers, strict=True))
    other = [
        (solution, next_one)
        for (solution, answer), next_one in zip(own, [*answers[1:], answers[0]], strict=True)
        if answer.replace(",", "") != next_one.replace(",", "")
    ]
    return own, other


def math_verify() -> Grade | None:
    """The peer's grader; None if it is not installed."""
    try:
        from math_verify import parse, verify  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    logging.disable(logging.CRITICAL)

    def grade(answer: str, reference: str) -> float:
        # Its parser finds LaTeX in marks of mathematics.
        return float(verify(parse(f"${reference}$"), parse(answer)))

    return grade


def row(name: str, what: str, grade: Grade, pairs: Pairs) -> str:
    rewarded, seconds = 0, []
    for answer, reference in pairs:
        begin = time.process_time()
        with contextlib.suppress(Exception):
            rewarded += grade(answer, reference) > 0
        seconds.append(time.process_time() - begin)
    middle, most = spread([1e3 * each for each in seconds], "{:.3f}".format), 1e3 * max(seconds)
    rate = len(pairs) / sum(seconds)
    return f"| {what} | {name} | {len(pairs):,} | {rewarded:,} | {middle} | {most:.1f} | {rate:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, help="folder of GSM8K's files")
    parser.add_argument("--quick", action="store_true", help="every fiftieth answer")
    options = parser.parse_args()
    note = "One process, processor time; math-verify on the first 1,000 of each."
    head = heading("Graders of mathematical answers", f"{note} {BRACKETS}", packages=["math-verify"])
    every = slice(None, None, 50 if options.quick else 1)
    peer = math_verify()
    sets: dict[str, Pairs] = {
        "wrong answers, 0 are right": wrong_answers(),
        "long answers, 0 are right": long_answers(),
        "equal forms, all are right": equal_answers(),
    }
    numbers: dict[str, Pairs] = {"numbers, all are right": [(f"#### {n:,}", str(n)) for n in range(0, 10**7, 997)]}
    if options.gsm8k is not None:
        own, other = gsm8k(options.gsm8k)
        numbers |= {"GSM8K's solutions, all are right": own, "... with the next answer, 0 are right": other}
    lines = [
        "| answers | grader | number | rewarded | median ms | most ms | per second |",
        "|---|---|---|---|---|---|---|",
    ]
    for what, pairs in {what: pairs[every] for what, pairs in {**sets, **numbers}.items()}.items():
        name, grade = ("napkin, number", number_score) if what in numbers else ("napkin, math", math_score)
        lines.append(row(name, what, grade, pairs))
        print(lines[-1], flush=True)
        if peer is not None and "long" not in what:
            lines.append(row("math-verify", what, peer, pairs[:1000]))
            print(lines[-1], flush=True)
    if peer is None:
        lines.append("\nmath-verify is not installed: pip install math-verify")
    write_result("alignment-graders", [*head, *lines])


if __name__ == "__main__":
    main()
