"""Problems whose answers are programs: what a model writes runs against tests in the sandbox, and pass@k says how
likely one of k samples passes.

Of n samples of a problem, c of which pass, the unbiased estimator (Chen et al. 2021, section 2.1) is the share of the
subsets of k samples that hold one that passes:

    pass@k = 1 - C(n - c, k) / C(n, k) = 1 - product over i from n - c + 1 to n of (1 - k / i)

The product needs no large numbers. The standard error is that of the mean over problems.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from napkin.errors import NapkinError, first_line
from napkin.evaluation.tasks.published import Row, text_of
from napkin.evaluation.tasks.results import FORMAT, VERSION, ItemLog, ItemResult, TaskResult
from napkin.evaluation.tasks.task_file import json_rows, read_text
from napkin.evaluation.uncertainty import mean_estimate
from napkin.files import StrPath
from napkin.grading.reward import Reward
from napkin.grading.sandbox.program_tests import check_program_reference, fenced_blocks
from napkin.grading.sandbox.reference_tests import parsed

STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```")
"""Texts before which a generated continuation of a function ends."""
_FENCE = "~" * 12
"""A fence longer than any in the program: the grader takes the text between."""


@dataclass(frozen=True)
class Problem:
    """A prompt that a program continues, and its tests."""

    name: str
    prompt: str
    tests: str
    """A program of assertions, which calls the function by its name."""
    entry_point: str = ""
    """The function to write; empty where only the tests name it."""

    def program(self, completion: str) -> str:
        """The program of a completion: the prompt with it, or its fenced block that defines the function itself."""
        for _, block in reversed(fenced_blocks(completion)):
            if self.entry_point and f"def {self.entry_point}" in block and parsed(block) is not None:
                # Imports and helpers of the prompt are the program's too.
                return self.prompt.partition(f"def {self.entry_point}")[0] + block
        return self.prompt + completion


def pass_at_k(n_samples: int, n_passed: int, k: int) -> float:
    """The unbiased estimate of the probability that one of k samples passes, from `n_passed` of `n_samples`.

    >>> pass_at_k(10, 1, 1), pass_at_k(10, 1, 10), pass_at_k(4, 2, 2)
    (0.1, 1.0, 0.8333333333333334)
    """
    if not (0 <= n_passed <= n_samples and 1 <= k <= n_samples):
        raise NapkinError(f"pass@{k} of {n_samples} samples, {n_passed} of which pass: use 1 to {n_samples} as k")
    if n_samples - n_passed < k:
        return 1.0
    if k == 1:
        return n_passed / n_samples
    return -math.expm1(sum(math.log1p(-k / i) for i in range(n_samples - n_passed + 1, n_samples + 1)))


def read_problems(path: StrPath) -> list[Problem]:
    """Read problems in HumanEval's form: JSONL of task_id, prompt, test, with `check(candidate)`, and entry_point.

    `id` and `tests` are names of the same. Raises NapkinError, with file and line, for tests that cannot judge a
    program.
    """
    found: dict[str, Problem] = {}
    for line, row in json_rows(path, read_text(path)):
        try:
            problem = _problem(row, str(line))
            check_program_reference(problem.tests)
            if problem.name in found:
                raise NapkinError(f"{problem.name!r} stands twice: give each problem a task_id of its own")
        except KeyError as error:
            raise NapkinError(f"'{path}' line {line}: it has no {error}: correct it") from None
        except NapkinError as error:
            raise NapkinError(f"'{path}' line {line}: {first_line(error)}") from None
        found[problem.name] = problem
    if not found:
        raise NapkinError(f"'{path}' has no problem: give at least one")
    return [*found.values()]


def _problem(row: Row, line: str) -> Problem:
    name = str(row.get("task_id") or row.get("id") or line)
    tests, entry_point = text_of(row, "test" if "test" in row else "tests"), str(row.get("entry_point") or "")
    if entry_point and not entry_point.isidentifier():
        raise NapkinError(f"the entry_point is {entry_point[:40]!r}: use the name of a function")
    if entry_point and "def check(" in tests and "\ncheck(" not in tests:
        tests += f"\ncheck({entry_point})\n"
    return Problem(name, text_of(row, "prompt"), tests, entry_point)


def read_completions(path: StrPath, problems: Sequence[Problem]) -> dict[str, list[str]]:
    """Read samples in HumanEval's form: JSONL of task_id and completion, several of each problem.

    Raises NapkinError for one of another problem, and where a problem has fewer samples than others: pass@k of unequal
    numbers would not be of one setting.
    """
    samples: dict[str, list[str]] = {problem.name: [] for problem in problems}
    for line, row in json_rows(path, read_text(path)):
        name = str(row.get("task_id") or row.get("id") or "")
        if name not in samples:
            raise NapkinError(f"'{path}' line {line}: there is no problem {name[:40]!r}: name the problems' own file")
        if not isinstance(row.get("completion"), str):
            raise NapkinError(f"'{path}' line {line}: it has no text as 'completion': correct it")
        samples[name].append(row["completion"])
    counts = {name: len(each) for name, each in samples.items()}
    fewest, most = min(counts, key=lambda name: counts[name]), max(counts.values())
    if counts[fewest] != most:
        raise NapkinError(
            f"'{path}' has {counts[fewest]} samples of {fewest!r} and {most} of another problem: give as many of each"
        )
    return samples


def grade_problems(
    problems: Sequence[Problem],
    sample: Callable[[Problem], Sequence[str]],
    ks: Sequence[int],
    reward: Reward,
    log: ItemLog,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[ItemResult]:
    """The results of all problems, in their order; those in the log are not sampled again. `sample` gives the
    completions of a problem, `reward` judges a program beside its tests."""
    for problem in problems:
        progress(len(log.done), len(problems))
        if problem.name in log.done:
            continue
        completions = sample(problem)
        pairs = [(f"{_FENCE}python\n{problem.program(each)}\n{_FENCE}\n", problem.tests) for each in completions]
        passed = tuple(each.reward == 1 for each in reward.judge_all(pairs))
        scores = {f"pass@{k}": pass_at_k(len(passed), sum(passed), k) for k in ks}
        log.add([ItemResult(problem.name, "", "", scores, texts=tuple(completions), passed=passed)])
    progress(len(problems), len(problems))
    return [log.done[problem.name] for problem in problems]


def summarise_problems(settings: Mapping[str, Any], results: Sequence[ItemResult]) -> TaskResult:
    """The result of all problems, which `compare_results` takes like that of any task."""
    names = list(results[0].scores)
    return TaskResult(
        FORMAT,
        VERSION,
        scores={name: mean_estimate([each.scores[name] for each in results]) for name in names},
        sections={},
        names=[each.name for each in results],
        groups=["" for _ in results],
        item_scores={name: [each.scores[name] for each in results] for name in names},
        **settings,
    )


def sample_seed(seed: int, problem: str) -> int:
    """The seed of the first sample of a problem; those after it use the next ones, and no two problems share any."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{problem}".encode()).digest()[:5]) << 20
