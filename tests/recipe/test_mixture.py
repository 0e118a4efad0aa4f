from pathlib import Path

import pytest

from napkin.data import SEPARATOR, Document, TokenFile, TokenMixture, write_token_file
from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.recipe.data_config import DataConfig, renamed_phase
from napkin.recipe.mixture import open_mixture
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import TrainingConfig
from napkin.tokenizer import ByteTokenizer

TOKENS = {"long": 8001, "short": 801}


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    tokenizer = ByteTokenizer([SEPARATOR])
    return {
        name: str(write_token_file(tmp_path / f"{name}.tokens", [Document(name, "a" * (n - 2))], tokenizer).path)
        for name, n in TOKENS.items()
    }


def mixture(steps: int, **data: object) -> TokenMixture:
    recipe = Recipe(
        data=DataConfig(**data),  # pyright: ignore[reportArgumentType]
        model=ModelConfig(context_length=10),
        training=TrainingConfig(steps=steps, batch_size=10),
    )
    return open_mixture(recipe, TokenFile.open)


def test_no_document_is_read_more_often_than_max_epochs(paths: dict[str, str]) -> None:
    # 80 steps read 8,000 tokens: in equal parts 4,000 of each, 5 epochs of the short file.
    train = dict.fromkeys(paths.values(), 1.0)
    assert mixture(80, train=train).weights == (1, 1)
    assert mixture(80, train=train, max_epochs=2.0).weights == (6400, 1600)


def test_limits_hold_over_all_phases_of_a_curriculum(paths: dict[str, str]) -> None:
    train = dict.fromkeys(paths.values(), 1.0)
    later = f"10 {paths['short']}=1 {paths['long']}=1"
    found = mixture(80, train=train, max_epochs=2.0, curriculum=(later,))
    assert found.weights == (500, 500)
    assert found.later == ((10, (7000 - 1100, 1100)),)


def test_too_little_text_for_the_epochs_is_said(paths: dict[str, str]) -> None:
    with pytest.raises(NapkinError, match=r"max_epochs 0.5 leaves 4,400 tokens.*8,000"):
        mixture(80, train=tuple(paths.values()), max_epochs=0.5)


def test_a_temperature_is_taken_of_lengths(paths: dict[str, str]) -> None:
    weights = mixture(8, train=tuple(paths.values()), temperature=2.0).weights
    assert weights is not None
    assert weights[0] / weights[1] == pytest.approx((8001 / 801) ** 0.5)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"temperature": 0.0}, "use a number above 0"),
        ({"temperature": 2.0, "train": {"a": 1.0}}, "leave one of them out"),
        ({"max_epochs": -1.0}, "or None"),
        ({"curriculum": ("a=1",)}, "is not of the form"),
        ({"curriculum": ("3 a",)}, "give every file a weight"),
        ({"curriculum": ("3 b=1",)}, "'b' is not a file of data.train"),
        ({"curriculum": ("3 a=0",)}, "not all of them 0"),
        ({"curriculum": ("3 a=1", "3 a=2")}, "order them"),
        ({"curriculum": ("0 a=1",)}, "order them, from 1"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(NapkinError, match=message):
        DataConfig(**{"train": "a", **data})  # pyright: ignore[reportArgumentType]


def test_a_curriculum_follows_its_files_to_another_place() -> None:
    assert renamed_phase("30 a.tokens=2 b.tokens=1", {"a.tokens": "x/a.tokens"}) == "30 x/a.tokens=2 b.tokens=1"
