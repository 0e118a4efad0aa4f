import dataclasses
import re
from pathlib import Path

import pytest

from napkin.cli.common.options import field_docstrings
from napkin.cli.plan.recipe import with_comments
from napkin.optim.registry import OPTIMIZERS
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe
from napkin.recipe.training_config import OptimizerConfig
from napkin.recipe.tuning_recipe import TuningRecipe


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_comments_say_what_left_out_fields_come_to(tmp_path: Path, name: str) -> None:
    recipe = Recipe(optimizer=OptimizerConfig(name=name))
    printed = with_comments(recipe)
    path = tmp_path / "recipe.toml"

    path.write_text(printed)
    assert read_recipe(path) == recipe

    path.write_text(re.sub(r"^# (\w+ = )", r"\1", printed, flags=re.MULTILINE))
    chosen = dataclasses.replace(recipe.optimizer.resolved, warmup_steps=recipe.warmup_steps)
    assert read_recipe(path).optimizer == chosen


def test_fields_that_nothing_is_known_of_are_named() -> None:
    named = with_comments(Recipe()).partition("[model]")[2].partition("[optimizer]")[0]
    assert "# d_ff = 704\n" in named
    assert "# attention_window is not set\n" in named


@pytest.mark.parametrize("recipe", [Recipe(), TuningRecipe()], ids=["training", "tuning"])
def test_every_field_is_explained_by_the_sentence_above_it(recipe: Recipe) -> None:
    tables = with_comments(recipe).split("\n[")
    for table in dataclasses.fields(recipe):
        [text] = [each for each in tables if each.removeprefix("[").startswith(f"{table.name}]")]
        values = getattr(recipe, table.name)
        for field in dataclasses.fields(values):
            [above] = re.findall(rf"\n\n((?:# .*\n)+)(?:# )?{field.name} (?:= |is not set)", text)
            said = " ".join(line.removeprefix("# ") for line in above.splitlines())
            meaning = field_docstrings(type(values))[field.name]
            assert said.endswith(".")
            assert said[:-1].partition(". One of ")[0] in meaning
            assert len(said) > 10


def test_a_field_with_choices_names_them() -> None:
    words = with_comments(Recipe()).replace("\n# ", " ")
    assert 'One of none, selective, full.\nrecompute = "none"\n' in words
