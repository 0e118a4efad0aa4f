"""Solved tasks as conversations: what a model can be trained on before it is rewarded."""

import json
from collections.abc import Iterator

from napkin.alignment.environments.environment import SolvedEnvironment
from napkin.errors import NapkinError

MOST_TURNS = 1000


def environment_chats(environment: SolvedEnvironment, n: int, seed: int = 0) -> Iterator[str]:
    """`n` lines of JSONL, each the conversation of a task with right answers: those of seeds `seed` and following.

    >>> from napkin.alignment.environments import environment_named
    >>> next(environment_chats(environment_named("arithmetic"), 1))
    '{"messages": [{"role": "user", "content": "1-1="}, {"role": "assistant", "content": "0"}]}'

    Raises NapkinError for an environment that knows no answers.
    """
    if not hasattr(environment, "solution"):
        raise NapkinError("the environment has no `solution`: only one that knows a right answer writes conversations")
    for number in range(seed, seed + n):
        task = environment.start(number)
        messages = [{"role": each.role, "content": each.content} for each in task.messages]
        state = task.state
        for _ in range(MOST_TURNS):
            answer = environment.solution(state)
            messages.append({"role": "assistant", "content": answer})
            outcome = environment.step(state, answer)
            if outcome.done or outcome.message is None:
                break
            messages.append({"role": "user", "content": outcome.message})
            state = outcome.state
        else:
            raise NapkinError(f"the task of seed {number} is not done after {MOST_TURNS} right answers: correct it")
        yield json.dumps({"messages": messages}, ensure_ascii=False)
