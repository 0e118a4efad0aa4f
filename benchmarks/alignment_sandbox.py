"""Rewards that run programs: judgements per second, beside a new interpreter for each program.

The plain way is `subprocess.run([sys.executable, "-c", program + tests], timeout=10)`, which confines nothing: a
program of a model could read and remove files there, or end with the status of success before its tests.

    python benchmarks/alignment_sandbox.py --before OTHER/src      # another checkout of napkin beside this one

The table is also written to benchmarks/results/.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from napkin.grading.reward import Reward, reward_named
from napkin.hardware.host import usable_cores
from result_files import heading, write_result
from turns import BRACKETS, Samples, spread

Pairs = list[tuple[str, str]]
Judge = Callable[[Pairs], Sequence[float]]

FUNCTION = (
    "def primes(n):\n    sieve = [True] * (n + 1)\n    for i in range(2, int(n ** 0.5) + 1):\n"
    "        if sieve[i]:\n            sieve[i * i :: i] = [False] * len(sieve[i * i :: i])\n"
    "    return [i for i in range(2, n + 1) if sieve[i]]"
)
TESTS = "assert primes(10) == [2, 3, 5, 7]\nassert primes(2) == [2]\nassert len(primes(10000)) == 1229"
SCRIPT = "n = int(input())\nprint(sum(i * i for i in range(n)))"
CASES = json.dumps([{"input": str(n), "output": str(sum(i * i for i in range(n)))} for n in (3, 10, 1000)])
SETS: dict[str, Pairs] = {
    "a function and three assertions": [(FUNCTION, TESTS)],
    "... that imports numpy": [("import numpy as np\n" + FUNCTION, TESTS)],
    "reads and prints, three cases": [(SCRIPT, CASES)],
}
OWN = "def length(answer, reference):\n    return len(answer) / float(reference)\n"


def measured(judge: Judge, pairs: Pairs, seconds: float) -> float:
    """Judgements per second; all are right."""
    judge(pairs)
    n, begin = len(pairs), time.perf_counter()
    judge(pairs)
    n = max(2 * n, int(seconds * n / (time.perf_counter() - begin)))
    begin = time.perf_counter()
    rewards = judge((pairs * n)[:n])
    taken = time.perf_counter() - begin
    if list(rewards) != [1.0] * n:
        raise SystemExit("a judgement is wrong")
    return n / taken


def one_by_one(reward: Reward) -> Judge:
    return lambda pairs: [reward(*pair) for pair in pairs]


def together(reward: Reward) -> Judge:
    return lambda pairs: [judged.reward for judged in reward.judge_all(pairs)]


def plainly(answer: str, reference: str) -> float:
    """The plain way."""
    if reference.startswith("["):
        return float(all(_ran(answer, case["input"]) == case["output"] + "\n" for case in json.loads(reference)))
    return float(_ran(answer + "\n" + reference, "") == "")


def _ran(program: str, text: str) -> str | None:
    ran = subprocess.run(
        [sys.executable, "-c", program], input=text, capture_output=True, text=True, timeout=10, check=False
    )
    return ran.stdout if ran.returncode == 0 else None


def plainly_together(pairs: Pairs) -> list[float]:
    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(lambda pair: plainly(*pair), pairs))


def napkin_rates(seconds: float) -> dict[str, float]:
    """Of this checkout."""
    code, rates = reward_named("code"), {}
    for what, pairs in SETS.items():
        rates[f"{what}, one by one"] = measured(one_by_one(code), pairs, seconds)
        rates[f"{what}, together"] = measured(together(code), pairs, seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.py"
        path.write_text(OWN)
        rates["own function, one by one"] = measured(one_by_one(reward_named(f"{path}:length")), [("abcd", "4")], 1.0)
    return rates


def plain_rates(seconds: float) -> dict[str, float]:
    """Of an interpreter for each."""
    ways: dict[str, Judge] = {
        "one by one": lambda pairs: [plainly(*pair) for pair in pairs],
        "together": plainly_together,
    }
    return {
        f"{what}, {how}": measured(judge, pairs, seconds) for what, pairs in SETS.items() for how, judge in ways.items()
    }


def rounds_of(rates: Callable[[], dict[str, float]], rounds: int) -> Samples:
    """All rates, measured again and again."""
    found = [rates() for _ in range(rounds)]
    return {what: [each[what] for each in found] for what in found[0]}


def shown(rates: Sequence[float] | None) -> str:
    return "" if rates is None else spread(rates, "{:,.0f}".format)


def rates_of(source: str, seconds: float) -> dict[str, float]:
    """Of another checkout, by this script."""
    command = [sys.executable, __file__, "--json", "--seconds", str(seconds)]
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    told = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    return json.loads(told.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="src of a checkout to compare with")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true", help="print the rates of this checkout alone")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(napkin_rates(options.seconds)))
        return
    head = heading("Rewards that run programs", BRACKETS)
    columns = {"napkin": rounds_of(lambda: napkin_rates(options.seconds), options.rounds)}
    if options.before:
        columns["napkin before"] = rounds_of(lambda: rates_of(options.before, options.seconds), options.rounds)
    columns["an interpreter for each"] = rounds_of(lambda: plain_rates(options.seconds), options.rounds)
    lines = [f"| judgements per second | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    lines += [
        f"| {what} | {' | '.join(shown(rates.get(what)) for rates in columns.values())} |" for what in columns["napkin"]
    ]
    print("\n".join(lines))
    write_result("alignment-sandbox", [*head, *lines])


if __name__ == "__main__":
    main()
