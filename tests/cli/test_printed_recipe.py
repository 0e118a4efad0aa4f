import dataclasses
from pathlib import Path

import pytest

from napkin.cli.recipe import with_comments
from napkin.optim.names import OPTIMIZERS
from napkin.recipe.optimizer_config import OptimizerConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_comments_say_what_left_out_fields_come_to(tmp_path: Path, name: str) -> None:
    recipe = Recipe(optimizer=OptimizerConfig(name=name))
    printed = with_comments(recipe)
    path = tmp_path / "recipe.toml"

    path.write_text(printed)
    assert read_recipe(path) == recipe

    path.write_text("\n".join(line.removeprefix("# ") for line in printed.splitlines() if "not set" not in line))
    chosen = dataclasses.replace(recipe.optimizer.resolved, warmup_steps=recipe.warmup_steps)
    assert read_recipe(path).optimizer == chosen


def test_fields_that_nothing_is_known_of_are_named() -> None:
    named = with_comments(Recipe()).partition("[model]")[2].partition("[optimizer]")[0]
    assert "# d_ff = 704\n" in named
    assert "attention_window" in named.partition("# not set: ")[2]
