"""Answers that an environment judges while others are drawn: in threads, where it allows that."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

from napkin.alignment.environments.environment import Environment, Outcome


class AnswerJudging:
    """Begins to judge answers in the order in which they come; outcomes depend neither on threads nor on time."""

    def __init__(self, environment: Environment) -> None:
        n_parallel = getattr(environment, "n_parallel", 0)
        self._environment, self._pool = environment, ThreadPoolExecutor(n_parallel) if n_parallel > 0 else None
        self.may_wait = self._pool is not None and getattr(environment, "one_turn", False)
        """Whether outcomes are best asked for when nothing is left to draw."""

    def begin(self, state: Any, answer: str) -> Callable[[], Outcome]:
        """What gives the outcome: waits for it, or where the environment allows no threads, finds it."""
        if self._pool is None:
            return partial(self._environment.step, state, answer)
        return self._pool.submit(self._environment.step, state, answer).result

    def __enter__(self) -> "AnswerJudging":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool is not None:
            # After an error nobody waits for what has not begun.
            self._pool.shutdown(wait=kind is None, cancel_futures=True)
