import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.optim.registry import OPTIMIZERS
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import format_recipe, read_recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig

paths = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
recipes = st.builds(
    Recipe,
    data=st.builds(DataConfig, train=paths, validation=st.none() | paths, tokenizer=paths, verify=st.booleans()),
    model=st.builds(
        ModelConfig,
        vocab_size=st.integers(0, 2**24),
        context_length=st.integers(1, 4096),
        d_model=st.just(64),
        n_heads=st.sampled_from([1, 2, 4, 8]),
        n_kv_heads=st.sampled_from([None, 1]),
        d_ff=st.none() | st.integers(1, 1000),
        rope_theta=st.floats(1, 1e12),
        norm_eps=st.floats(1e-30, 1),
        tie_embeddings=st.booleans(),
    ),
    optimizer=st.builds(
        OptimizerConfig,
        learning_rate=st.floats(0, 10),
        warmup_steps=st.none() | st.integers(0, 99),
        weight_decay=st.floats(0, 100),
    ),
    training=st.builds(
        TrainingConfig,
        steps=st.integers(100, 10**12),
        batch_size=st.sampled_from([12, 24]),
        micro_batch_size=st.sampled_from([None, 1, 6]),
        precision=st.sampled_from(["auto", "fp32", "bf16"]),
        init_seed=st.integers(0, 2**63 - 1),
    ),
)


# The checks of types pick an element of a tuple by chance, which hypothesis cannot know.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@given(recipes)
def test_a_printed_recipe_reads_back_equal(tmp_path_factory: pytest.TempPathFactory, recipe: Recipe) -> None:
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    path.write_bytes(format_recipe(recipe).encode())
    assert read_recipe(path) == recipe


@pytest.mark.parametrize(
    ("toml", "train"),
    [
        ('train = "a.tokens"', "a.tokens"),
        ('train = ["a.tokens", "b.tokens"]', ("a.tokens", "b.tokens")),
        ('[data.train]\n"a.tokens" = 3\n"b.tokens" = 0.5', {"a.tokens": 3.0, "b.tokens": 0.5}),
        ('train = {"a.tokens" = 1}', {"a.tokens": 1.0}),
    ],
)
def test_training_text_may_be_a_file_several_or_several_with_weights(tmp_path: Path, toml: str, train: object) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f"[data]\n{toml}\n")
    recipe = read_recipe(path)
    assert recipe.data.train == train
    path.write_text(format_recipe(recipe))
    assert read_recipe(path) == recipe


def test_a_file_may_name_as_little_as_it_likes(tmp_path: Path) -> None:
    for text in ("", "[model]\n", "\ufeff[training]\r\nsteps = 1000\r\n"):
        (tmp_path / "recipe.toml").write_text(text, encoding="utf-8", newline="")
        assert read_recipe(tmp_path / "recipe.toml") == Recipe()


def test_a_printed_recipe_has_every_field_that_toml_can_say() -> None:
    printed = tomllib.loads(format_recipe(Recipe()))
    for table in dataclasses.fields(Recipe):
        values = dataclasses.asdict(getattr(Recipe(), table.name))
        said = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        assert printed[table.name] == {name: value for name, value in said.items() if value is not None}


def test_no_evaluation_is_said_with_an_empty_name(tmp_path: Path) -> None:
    recipe = Recipe(data=DataConfig(validation=None))
    assert tomllib.loads(format_recipe(recipe))["data"]["validation"] == ""
    assert DataConfig(validation="").validation is None


@pytest.mark.parametrize(
    ("steps", "warmup_steps"), [(1, 0), (9, 0), (10, 1), (100, 10), (499, 49), (500, 50), (1000, 50), (10**6, 50)]
)
def test_warmup_is_50_steps_or_a_tenth_of_a_short_run(steps: int, warmup_steps: int) -> None:
    assert Recipe(training=TrainingConfig(steps=steps)).warmup_steps == warmup_steps


def test_a_chosen_warmup_is_kept() -> None:
    assert Recipe(optimizer=OptimizerConfig(warmup_steps=3), training=TrainingConfig(steps=4)).warmup_steps == 3
    with pytest.raises(NapkinError, match=r"warmup_steps 4.*training.steps 4: use 0.*3"):
        Recipe(optimizer=OptimizerConfig(warmup_steps=4), training=TrainingConfig(steps=4))


NUMBERS = [
    (table, field.name)
    for table, cls in (("model", ModelConfig), ("optimizer", OptimizerConfig), ("training", TrainingConfig))
    for field in dataclasses.fields(cls)
    if field.name not in ("tie_embeddings", "name", "schedule", "fused", "precision", "device")
]


def test_every_number_of_a_recipe_has_limits(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    for table, name in NUMBERS:
        for value in (-1, 10**40, math.nan, math.inf, -math.inf):
            path.write_text(f"[{table}]\n{name} = {value}\n")
            with pytest.raises(NapkinError) as refused:
                read_recipe(path)
            assert name in str(refused.value), f"{table}.{name} = {value}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"momentum": 0.9},
            "optimizer.momentum is 0.9, but adamw has no such option: leave it out, or use it with momentum",
        ),
        ({"name": "lion", "eps": 1e-8}, "optimizer.eps is 1e-08, but lion has no such option"),
        ({"name": "lion", "fused": True}, "optimizer.fused is True, but there is no fused kernel for lion"),
        ({"decay_steps": 3}, "optimizer.decay_steps is 3, but the schedule cosine has no such option"),
        ({"schedule": "constant", "final_fraction": 0.1}, "use it with linear, cosine, warmup-stable-decay"),
        ({"schedule": "warmup-stable-decay", "decay_steps": 950}, "optimizer.decay_steps is 950: the warm-up leaves"),
    ],
)
def test_an_option_that_the_choice_does_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(NapkinError, match=message) as refused:
        Recipe(optimizer=OptimizerConfig(**options))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("field", ["name", "schedule"])
def test_a_name_that_no_table_has_is_refused(tmp_path: Path, field: str) -> None:
    (tmp_path / "recipe.toml").write_text(f'[optimizer]\n{field} = "adamx"\n')
    with pytest.raises(NapkinError, match=f"'adamx'.*optimizer.{field}"):
        read_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_resolved_recipe_names_every_number_that_the_optimizer_takes(name: str) -> None:
    resolved = OptimizerConfig(name=name, weight_decay=0.25).resolved
    assert resolved.weight_decay == 0.25
    assert resolved.options == {**OPTIMIZERS[name].options, "weight_decay": 0.25}
    assert resolved.resolved == resolved


@pytest.mark.parametrize(("batch_size", "context_length"), [(2**34, 2), (2**20, 2**20)])
def test_a_step_of_more_tokens_than_can_be_counted_is_refused(batch_size: int, context_length: int) -> None:
    with pytest.raises(NapkinError, match=f"{batch_size * context_length} tokens"):
        Recipe(model=ModelConfig(context_length=context_length), training=TrainingConfig(batch_size=batch_size))


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"training": {"stepz": 1}}, "training.stepz': did you mean 'training.steps'"),
        ({"optimiser": {}}, "'optimiser': did you mean 'optimizer'"),
        ({"training": {"xyz": 1}}, "use one of steps, batch_size"),
    ],
)
def test_an_unknown_field_is_refused_with_the_nearest(tmp_path: Path, values: dict[str, Any], field: str) -> None:
    import tomli_w

    path = tmp_path / "recipe.toml"
    path.write_text(tomli_w.dumps(values))
    with pytest.raises(NapkinError, match=field):
        read_recipe(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a" + ".a" * 200_000 + " = 1", "more than 32 dots"),
        ("[a" + " . a" * 200_000 + "]", "more than 32 dots"),
        ("[a" + ".'b'" * 200_000 + "]", "more than 32 dots"),
        ("a = [{a" + '."x"' * 200_000 + " = 1}]", "more than 32 dots"),
        ('a = ["""b"""", {a' + ".a" * 200_000 + ' = "c"}]', "more than 32 dots"),
        ("a = 1\n" * 2**18, "more than 1,048,576 bytes"),
        ("a = " + "[" * 100_000, "cannot be read"),
        ('"""\\' * 200_000, "is not TOML"),
        ('a = "' + '\\"' * 500_000, "is not TOML"),
    ],
)
def test_a_recipe_that_would_take_all_of_the_time_is_refused_in_a_line(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(NapkinError, match=line) as refused:
        read_recipe(tmp_path / "recipe.toml")
    assert "\n" not in str(refused.value)


def test_dots_in_strings_and_comments_are_no_depth(tmp_path: Path) -> None:
    dots = ".a" * 100
    strings = f"""["{dots}", '1{dots}', '''2{dots}''']"""
    (tmp_path / "recipe.toml").write_text(f"[data]  # {dots}\ntrain = {strings}\n")
    assert len(read_recipe(tmp_path / "recipe.toml").data.train) == 3
