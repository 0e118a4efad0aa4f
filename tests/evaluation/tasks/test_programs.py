"""pass@k beside the count of all subsets, and programs in HumanEval's form in the sandbox."""

import itertools
import json
from pathlib import Path

import pytest

from napkin.errors import NapkinError
from napkin.evaluation.tasks import compare_results, open_log
from napkin.evaluation.tasks.programs import (
    Problem,
    grade_problems,
    pass_at_k,
    read_completions,
    read_problems,
    sample_seed,
    summarise_problems,
)
from napkin.evaluation.uncertainty import mean_estimate
from napkin.grading.reward import code_reward

PROMPT = 'from typing import List\n\n\ndef largest(numbers: List[int]) -> int:\n    """The largest number."""\n'
CHECK = "def check(candidate):\n    assert candidate([1, 3, 2]) == 3\n    assert candidate([-1]) == -1\n"
GOOD, BAD = "    return max(numbers)\n", "    return numbers[1]\n"
WHOLE = "Here it is:\n```python\ndef largest(numbers: List[int]) -> int:\n    return sorted(numbers)[-1]\n```\n"


def test_the_estimate_is_the_share_of_subsets_with_a_sample_that_passes() -> None:
    for n in range(1, 9):
        for c in range(n + 1):
            samples = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = list(itertools.combinations(samples, k))
                assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-14)


def test_of_many_samples_no_digit_is_lost() -> None:
    # C(n - c, k) / C(n, k) with one sample that passes is (n - k) / n.
    assert pass_at_k(10**6, 1, 7) == pytest.approx(7e-6, rel=1e-12)
    assert pass_at_k(100_000, 99_999, 1) == 0.99999
    with pytest.raises(NapkinError, match="use 1 to 3 as k"):
        pass_at_k(3, 1, 4)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    problems, completions = tmp_path / "problems.jsonl", tmp_path / "completions.jsonl"
    rows = [{"task_id": f"p/{n}", "prompt": PROMPT, "test": CHECK, "entry_point": "largest"} for n in range(2)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [
        ("p/0", GOOD),
        ("p/0", BAD),
        ("p/0", WHOLE),
        ("p/1", BAD),
        ("p/1", "    import os; os._exit(0)\n"),
        ("p/1", ""),
    ]
    completions.write_text("".join(json.dumps({"task_id": name, "completion": text}) + "\n" for name, text in samples))
    return problems, completions


def test_programs_that_pass_their_tests_are_counted_and_kept(files: tuple[Path, Path], tmp_path: Path) -> None:
    problems = read_problems(files[0])
    samples = read_completions(files[1], problems)
    log_path, asked = tmp_path / "log.jsonl", []

    def sample(problem: Problem) -> list[str]:
        asked.append(problem.name)
        return samples[problem.name]

    with open_log(log_path, {}) as log:
        grade_problems(problems[:1], sample, [1, 2], code_reward(), log)
    with open_log(log_path, {}) as log:
        results = grade_problems(problems, sample, [1, 2], code_reward(), log)
    assert asked == ["p/0", "p/1"]
    assert [each.passed for each in results] == [(True, False, True), (False, False, False)]
    settings = {"task": {"score": "pass@1", "files": {}}, "model": {}, "made_with": {}}
    found = summarise_problems(settings, results)
    assert found.item_scores == {"pass@1": [2 / 3, 0.0], "pass@2": [1.0, 0.0]}
    assert found.scores["pass@1"] == mean_estimate([2 / 3, 0.0])
    assert compare_results(found, found).difference == 0


def test_what_is_no_problem_and_no_sample_is_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    problems = read_problems(files[0])
    with open(files[1], "a") as file:
        file.write(json.dumps({"task_id": "p/0", "completion": GOOD}) + "\n")
    with pytest.raises(NapkinError, match="has 3 samples of 'p/1' and 4 of another"):
        read_completions(files[1], problems)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"task_id": "x", "prompt": PROMPT, "test": "x = 1", "entry_point": "largest"}))
    with pytest.raises(NapkinError, match="line 1: the reference has no `assert`"):
        read_problems(bad)
    bad.write_text(json.dumps({"task_id": "x", "prompt": PROMPT}))
    with pytest.raises(NapkinError, match="line 1: it has no 'tests'"):
        read_problems(bad)


def test_no_two_problems_share_a_seed() -> None:
    seeds = sorted(sample_seed(seed, f"p/{n}") for seed in range(3) for n in range(200))
    assert min(second - first for first, second in itertools.pairwise(seeds)) >= 2**20
    assert seeds[-1] < 2**62
