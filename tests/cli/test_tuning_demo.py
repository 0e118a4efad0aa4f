"""The demo of reinforcement learning: what its teacher teaches, and recipes that are read back."""

import json
from pathlib import Path

from napkin.cli.demo import ENVIRONMENT, SOLVED, demo_recipes, write_solved
from napkin.environments import environment_named
from napkin.environments.environment import is_held_out
from napkin.recipe.toml_file import format_recipe, read_recipe


def test_two_of_three_results_of_the_teacher_are_one_too_large(tmp_path: Path) -> None:
    write_solved(tmp_path, 0)
    mistakes, asked = [], set()
    for line in (tmp_path / "solved.jsonl").read_text().splitlines():
        question, answer = (message["content"] for message in json.loads(line)["messages"])
        first, _, second = question.removesuffix("=").partition("+")
        mistakes.append(int(answer) - int(first) - int(second))
        asked.add("+".join(sorted((first, second), key=int)))
    assert len(mistakes) == SOLVED
    assert set(mistakes) == {0, 1}
    assert abs(sum(mistakes) / SOLVED - 2 / 3) < 0.03
    # Nobody is taught what is asked in the end.
    assert not any(map(is_held_out, asked))
    held_out = environment_named(ENVIRONMENT, held_out=True)
    assert is_held_out(held_out.start(3).content)


def test_the_recipes_are_read_back_as_they_are_written(tmp_path: Path) -> None:
    for name, recipe in demo_recipes(tmp_path, 3).items():
        (tmp_path / f"{name}.toml").write_text(format_recipe(recipe))
        assert read_recipe(tmp_path / f"{name}.toml") == recipe
