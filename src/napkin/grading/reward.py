"""Rewards by name: functions of the text of an answer and of a reference.

Whatever the function does, training gets a finite number: where it raises, takes too long or returns something else,
the reward is 0, and the failure is counted and named.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Lock

from napkin.errors import NapkinError, NotJudged, first_line, suggestion
from napkin.grading.answers import (
    check_choice_reference,
    check_regex_reference,
    choice_score,
    exact_score,
    format_score,
    read_tags,
    regex_score,
)
from napkin.grading.mathematics.math_answer import (
    check_math_reference,
    check_number_reference,
    math_score,
    number_score,
)
from napkin.grading.sandbox.own_function import OwnFunction
from napkin.grading.sandbox.program_tests import ProgramLimits, ProgramTests, check_program_reference
from napkin.hardware.host import usable_cores

MOST_REASONS = 32
"""The most different failures to name; further ones are counted together, since messages may differ for each answer."""
OTHER_REASONS = "other reasons"
_counting = Lock()


class NamedFailures:
    """Names each reason why a reward could not be computed, once."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def new(self, reasons: Iterable[str | None]) -> list[str]:
        found = []
        for reason in reasons:
            if reason is not None and reason not in self._known and len(self._known) < MOST_REASONS:
                self._known.add(reason)
                found.append(reason)
        return found


@dataclass(frozen=True)
class Judgement:
    """The reward of an answer."""

    reward: float
    """Finite; 0 after a failure."""
    failure: str | None = None
    """Why there is no reward; None if there is one."""


@dataclass
class Reward:
    """A function that grades the text of an answer beside a reference.

    >>> reward = Reward("length", lambda answer, reference: float(len(answer) <= int(reference)))
    >>> reward("short", "10"), reward("short", "ten"), reward.failures
    (1.0, 0.0, Counter({"ValueError: invalid literal for int() with base 10: 'ten'": 1}))
    """

    name: str
    grade: Callable[[str, str], float]
    """The function of an answer's text and the reference. It may raise anything."""
    check_reference: Callable[[str], None] = lambda reference: None
    """Raises NapkinError for a reference that no answer could fulfil."""
    n_parallel: int = 0
    """Answers that are graded at a time, in threads, for functions that wait for other processes; 0 is in the calling
    thread."""
    failures: Counter[str] = field(default_factory=Counter)
    """Counts of the reasons why rewards could not be computed."""

    def __call__(self, answer: str, reference: str) -> float:
        """The reward; 0 if it could not be computed, which `failures` counts."""
        return self.judge(answer, reference).reward

    def judge(self, answer: str, reference: str) -> Judgement:
        judged = self._judged(answer, reference)
        self._count(judged)
        return judged

    def judge_all(self, pairs: Sequence[tuple[str, str]]) -> list[Judgement]:
        """Judge several answers and their references, in their order."""
        if self.n_parallel < 2 or len(pairs) < 2:
            return [self.judge(answer, reference) for answer, reference in pairs]
        with ThreadPoolExecutor(min(self.n_parallel, len(pairs))) as pool:
            judged = list(pool.map(lambda pair: self._judged(*pair), pairs))
        for each in judged:
            self._count(each)
        return judged

    def _judged(self, answer: str, reference: str) -> Judgement:
        try:
            reward = self.grade(answer, reference)
            if isinstance(reward, bool | int | float) and math.isfinite(reward):
                return Judgement(float(reward))
            what = f"is {reward}" if isinstance(reward, int | float) else f"is of type {type(reward).__name__}"
            return Judgement(0.0, f"the reward {what}: a finite number is needed")
        except NotJudged as error:
            return Judgement(0.0, first_line(error))
        except Exception as error:
            # A function of the user's may raise anything, and training goes on.
            return Judgement(0.0, f"{type(error).__name__}: {first_line(error)}")

    def _count(self, judged: Judgement) -> None:
        if judged.failure is not None:
            with _counting:
                known = judged.failure in self.failures or len(self.failures) < MOST_REASONS
                self.failures[judged.failure if known else OTHER_REASONS] += 1


_MOST_PARALLEL = 64
"""Programs that run at the same time: each takes two processes and four descriptors."""


def code_reward(seconds: float = ProgramLimits.seconds) -> Reward:
    """The reward of programs by their tests, each judged within so many seconds."""
    grade = ProgramTests(ProgramLimits(seconds=seconds))
    return Reward("code", grade, check_program_reference, n_parallel=min(usable_cores(), _MOST_PARALLEL))


REWARDS: dict[str, Callable[[], Reward]] = {
    "exact": lambda: Reward("exact", exact_score),
    "number": lambda: Reward("number", number_score, check_number_reference),
    "math": lambda: Reward("math", math_score, check_math_reference),
    "choice": lambda: Reward("choice", choice_score, check_choice_reference),
    "regex": lambda: Reward("regex", regex_score, check_regex_reference),
    "code": lambda: code_reward(),
}
"""Factories by name; each new reward counts its own failures."""


def reward_named(name: str) -> Reward:
    """A reward by its name, FILE.py:NAME of a function of the user's, format:TAG,TAG, or a sum of such with weights:
    "math + 0.2 * format:think,answer".

    Raises NapkinError for a name that is not known, and for a file that is not there, cannot be loaded or
    does not have the function.
    """
    if len(terms := name.split(" + ")) > 1:
        return _sum_of(name, terms)
    if ".py:" in name:
        path, _, function = name.rpartition(":")
        own = OwnFunction(path, function)
        # A misspelled name would otherwise be a whole run of rewards of 0.
        own.load()
        return Reward(name, own, n_parallel=1)
    kind, _, tags = name.partition(":")
    if kind == "format":
        return Reward("format", partial(format_score, tags=read_tags(tags)))
    if name not in REWARDS:
        known = suggestion(name, [*REWARDS, "format:think,answer"])
        raise NapkinError(f"'{name}' is not a reward: {known}, or name FILE.py:NAME")
    return REWARDS[name]()


def _sum_of(name: str, terms: Sequence[str]) -> Reward:
    """The weighted sum of rewards; it fails if one of them fails."""
    weighted: list[tuple[float, Reward]] = []
    for term in terms:
        weight, star, rest = term.partition(" * ")
        try:
            number = float(weight) if star else 1.0
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise NapkinError(f"the weight '{weight}' of reward '{name}' is not a number: use 0.2 * NAME")
        weighted.append((number, reward_named((rest if star else term).strip())))

    def grade(answer: str, reference: str) -> float:
        return sum(weight * float(each.grade(answer, reference)) for weight, each in weighted)

    def check(reference: str) -> None:
        for _, each in weighted:
            each.check_reference(reference)

    # A reward that judges one answer at a time does so in a sum as well.
    n_parallel = min((each.n_parallel for _, each in weighted if each.n_parallel), default=0)
    return Reward(name, grade, check, n_parallel=n_parallel)
