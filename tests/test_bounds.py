"""Bounds stand at their fields: a value outside is refused with both ends, and the help shows them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from napkin.bounds import Bounds, bounds_of, refuse_outside
from napkin.cli import main
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig


@dataclass
class Sizes:
    rows: Annotated[int | Literal["auto"] | None, Bounds(1, 8)] = 1
    share: Annotated[float, Bounds(0, 0.5)] = 0.0
    name: str = ""


def test_both_ends_none_and_words_are_allowed() -> None:
    for rows in (1, 8, None, "auto"):
        refuse_outside("sizes", Sizes(rows=rows))
    refuse_outside("sizes", Sizes(share=0.5))


@pytest.mark.parametrize(("rows", "share"), [(0, 0), (9, 0), (1, 0.51), (1, float("nan"))])
def test_a_value_outside_is_refused(rows: int, share: float) -> None:
    with pytest.raises(NapkinError, match=r"sizes\.(rows|share) is .*: use (1 to 8|0 to 0\.5)"):
        refuse_outside("sizes", Sizes(rows=rows, share=share))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 0}, r"training\.micro_batch_size is 0: use 1 to 17179869184"),
        ({"steps": 0}, r"training\.steps is 0: use 1 to 1000000000000"),
        ({"rounding_seed": -1}, r"training\.rounding_seed is -1: use 0 to 9223372036854775807"),
    ],
)
def test_tables_of_a_recipe_refuse_their_own_fields(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NapkinError, match=message):
        TrainingConfig(**options)


def test_every_number_of_a_model_has_bounds() -> None:
    numbers = {name for name, value in vars(ModelConfig()).items() if type(value) in (int, float)}
    assert numbers <= bounds_of(ModelConfig).keys()
    with pytest.raises(NapkinError, match=r"model\.n_layers is 5000: use 1 to 4096"):
        Recipe(model=ModelConfig(n_layers=5000))


def test_the_help_shows_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help", "all"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Activation checkpointing is applied to every n-th block only. 1 to 4096." in shown
