"""Environments of the user's, files of prompts, and conversations of solved tasks."""

import json
from pathlib import Path

import pytest

from napkin.environments import ENVIRONMENTS, PromptFile, SolvedEnvironment, environment_chats, environment_named
from napkin.errors import NapkinError
from napkin.grading.sandbox.confinement import can_confine

OWN = """
from napkin.environments import Outcome, ask

class Doubling:
    def start(self, seed):
        number = seed % 1000
        return ask(f"twice {number}?", number)

    def step(self, state, answer):
        if answer == "give up":
            return Outcome(float("nan"))
        if answer == "hint":
            return Outcome(0.0, done=False)
        return Outcome(float(int(answer) == 2 * state))

    def solution(self, state):
        return str(2 * state)

class Broken:
    def start(self, seed):
        return 1 / 0

    def step(self, state, answer):
        return None

nothing = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_an_environment_of_the_users_is_split_and_its_failures_are_told(own: str) -> None:
    training, held_out = (environment_named(f"{own}:Doubling", held_out=side) for side in (False, True))
    asked, kept = ({each.start(seed).split_key for seed in range(300)} for each in (training, held_out))
    assert asked
    assert kept
    assert not asked & kept
    state = training.start(5).state
    assert training.step(state, str(2 * state)).reward == 1
    assert training.step(state, "give up").failure == "ValueError: the reward is nan: a finite number is needed"
    assert training.step(state, "ten").failure == "ValueError: invalid literal for int() with base 10: 'ten'"
    assert training.step(state, "hint").failure == "ValueError: an episode that is not done needs a message"
    assert isinstance(training, SolvedEnvironment)


@pytest.mark.parametrize("name", ["Broken", "Missing", "nothing"])
def test_an_environment_that_is_none_is_refused_in_one_line(own: str, name: str) -> None:
    with pytest.raises(NapkinError, match=name):
        environment_named(f"{own}:{name}").start(0)
    with pytest.raises(NapkinError, match="is not a file"):
        environment_named(f"missing.py:{name}")


def test_each_epoch_of_a_file_of_prompts_has_each_prompt_once(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"{n} + {n}?", "answer": 2 * n} for n in range(100)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    training, held_out = (environment_named(str(path), held_out=side) for side in (False, True))
    assert isinstance(training, PromptFile)
    assert isinstance(held_out, PromptFile)
    size = len(training)
    epochs = [[training.start(seed).messages for seed in range(first, first + size)] for first in (0, size)]
    assert len(set(epochs[0])) == size
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1]
    assert len(held_out) + size == 100
    assert not set(epochs[0]) & {held_out.start(seed).messages for seed in range(len(held_out))}
    task = training.start(0)
    assert training.step(task.state, f"\\boxed{{{task.state}}}").reward == 1
    assert training.step(task.state, "\\boxed{1.5}").reward == 0


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"answer": 1}', "line 2: it has no prompt"),
        ('{"prompt": "x"}', "line 2: it has no answer"),
        ('{"prompt": "x", "answer": ""}', "line 2: the reference has no answer"),
        ('{"messages": [{"role": "assistant", "content": "x"}], "answer": "1"}', "line 2: messages are not"),
        ('{"messages": 3, "answer": "1"}', "line 2: messages are not"),
    ],
)
def test_a_bad_line_of_prompts_is_named(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1 + 1", "answer": "2"}\n' + line + "\n")
    with pytest.raises(NapkinError, match=what):
        environment_named(str(path))


@pytest.mark.skipif(not can_confine(), reason="the system has no filter of system calls for a process")
def test_lines_of_human_eval_are_tests_of_their_entry_point(tmp_path: Path) -> None:
    path = tmp_path / "programs.jsonl"
    rows = [
        {
            "task_id": f"HumanEval/{n}",
            "prompt": f'def plus(x):\n    """x + {n}"""\n',
            "entry_point": "plus",
            "canonical_solution": f"    return x + {n}\n",
            "test": f"METADATA = {{}}\n\ndef check(candidate):\n    assert candidate(1) == {n + 1}\n",
        }
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    prompts = environment_named(str(path), reward="code")
    assert isinstance(prompts, PromptFile)
    task = prompts.start(0)
    body = next(row["canonical_solution"] for row in rows if row["prompt"] == task.messages[0].content)
    for program, reward in ((task.messages[0].content + body, 1.0), ("def plus(x): return 0", 0.0), ("x = 1", 0.0)):
        outcome = prompts.step(task.state, f"```python\n{program}\n```")
        assert (outcome.reward, outcome.failure) == (reward, None)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("empty.jsonl", "missing.jsonl"):
        with pytest.raises(NapkinError, match=name):
            environment_named(str(tmp_path / name))


@pytest.mark.parametrize("name", sorted(ENVIRONMENTS))
def test_conversations_of_solved_tasks_are_those_of_the_environment(name: str) -> None:
    environment = environment_named(name)
    assert isinstance(environment, SolvedEnvironment)
    lines = list(environment_chats(environment, 20, seed=7))
    assert list(environment_chats(environment, 10, seed=17)) == lines[10:]
    for seed, line in enumerate(lines, 7):
        messages = json.loads(line)["messages"]
        task = environment.start(seed)
        assert messages[0]["content"] == task.messages[0].content
        state, total, done = task.state, 0.0, False
        for number in range(1, len(messages), 2):
            assert messages[number]["role"] == "assistant"
            outcome = environment.step(state, messages[number]["content"])
            state, total, done = outcome.state, total + outcome.reward, outcome.done
        assert (done, total) == (True, 1)


def test_steps_of_a_maze_lead_as_they_say_and_end() -> None:
    environment = environment_named("maze")
    task = environment.start(3)
    outcome = environment.step(task.state, "through the wall")
    assert outcome.message == task.state.picture()
    assert outcome.state.steps_left == task.state.steps_left - 1
    state, turns = task.state, 0
    while not outcome.done or turns == 0:
        outcome = environment.step(state, "?")
        state, turns = outcome.state, turns + 1
    assert (turns, outcome.reward) == (task.state.steps_left, 0)
