"""What is asked first of several devices is answered: how long, with which batch, and how divided."""

import json
from pathlib import Path

import pytest

from cli.conftest import Napkin
from napkin.cli.common.recipe_options import RecipeSource
from napkin.cli.plan import layouts
from napkin.model.config import preset
from napkin.recipe.recipe import Recipe
from napkin.recipe.toml_file import read_recipe

TINY = "--model.vocab-size 300 --model.d-model 16 --model.n-layers 1 --model.n-heads 2 --model.context-length 1024"


@pytest.mark.thorough
def test_a_plan_and_a_run_are_as_long_as_their_tokens(place: Path, napkin: Napkin) -> None:
    # 4 sequences of 16 tokens per step: 10 steps are 640 tokens, and 641 take another.
    for tokens, steps in (("640", 10), ("641", 11)):
        planned = json.loads(napkin("plan", "tiny.toml", "--tokens", tokens, "--json").out)
        assert (planned["steps"], planned["tokens_per_step"]) == (steps, 64)
    priced = json.loads(napkin("plan", "tiny.toml", "--tokens", "1B", "--on", "T4", "--json").out)
    one_step = json.loads(napkin("plan", "tiny.toml", "--training.steps", "1", "--on", "T4", "--json").out)
    assert priced["dollars"] == pytest.approx(-(-(10**9) // 64) * one_step["dollars"])
    assert napkin("train", "tiny.toml", "--tokens", "0.5k", "--run", "runs/new").status == 0
    assert read_recipe("runs/new/recipe.toml").training.steps == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--tokens 1M --training.steps 5", ("--tokens", "--training.steps")),
        ("--tokens 0", ("--tokens", "above 0")),
        ("--tokens many", ("many", "1.5T")),
    ],
)
def test_a_budget_of_tokens_that_says_nothing_is_refused(
    place: Path, napkin: Napkin, options: str, said: tuple[str, ...]
) -> None:
    done = napkin("plan", "tiny.toml", *options.split())
    assert done.status == 2
    assert all(each in done.err for each in said)


def test_fewer_steps_than_the_warm_up_of_a_file_shorten_it(place: Path, napkin: Napkin) -> None:
    text = Path("tiny.toml").read_text().replace("steps = 6", "steps = 600")
    Path("long.toml").write_text(text + "\n[optimizer]\nwarmup_steps = 60\n")
    done = napkin("recipe", "long.toml", "--training.steps", "40")
    assert done.status == 0
    Path("short.toml").write_text(done.out)
    assert read_recipe("short.toml").optimizer.warmup_steps == 4
    refused = napkin("recipe", "long.toml", "--training.steps", "40", "--optimizer.warmup-steps", "60")
    assert refused.status == 2


def test_the_first_line_of_a_plan_says_that_it_does_not_fit(napkin: Napkin) -> None:
    # The optimizer's state alone is more than a T4 has.
    model = "--model.vocab-size 300000 --model.d-model 4096 --model.n-layers 1 --model.n-heads 2".split()
    done = napkin("plan", *model, "--model.context-length", "64", "--training.batch-size", "1", "--on", "T4")
    assert done.status == 2
    assert done.out.splitlines()[0].startswith("it does not fit: a step needs")
    assert "for a step" in done.err


@pytest.mark.thorough
def test_a_batch_that_does_not_divide_is_chosen_and_the_best_layout_is_planned(napkin: Napkin) -> None:
    done = napkin("plan", *TINY.split(), "--on", "3xT4", "--tokens", "1B", "--json")
    assert done.status == 0, done.err
    best = json.loads(done.out)["layouts"][0]
    assert best["fits"]
    assert best["batch_size"] % 3 == 0
    assert best["dollars"] is None or best["dollars"] > 0
    # What is given is kept, and refused.
    refused = napkin("plan", *TINY.split(), "--on", "3xT4", "--training.batch-size", "16")
    assert refused.status == 2
    assert "16" in refused.err


def test_what_devices_cannot_hold_whole_is_seen_without_counting() -> None:
    llama, small = (Recipe(model=preset(name)) for name in ("llama-3-8b", "gpt2"))
    given = {"training.batch_size"}
    assert "120 GB" in (layouts.obstacle(llama, "8xH100", given) or "")
    assert layouts.obstacle(small, "8xH100", given) is None
    assert layouts.obstacle(llama, "8xB200", given) is None
    assert "16 sequences" in (layouts.obstacle(small, "64xH100", set()) or "")


def test_a_layout_is_open_where_neither_file_nor_options_say_one(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[model]\nd_model = 64\n")
    assert layouts.leaves_layout_open("8xH100", RecipeSource(str(recipe), ("--training.steps", "5")).given())
    assert not layouts.leaves_layout_open("H100", set())
    assert not layouts.leaves_layout_open(None, set())
    for options in ("--training.parallelism fsdp", "--parallelism.shard=8", "--training.micro_batch_size 1"):
        assert not layouts.leaves_layout_open("8xH100", RecipeSource(str(recipe), tuple(options.split())).given())
    recipe.write_text("[parallelism]\nshard = 8\n")
    assert not layouts.leaves_layout_open("8xH100", RecipeSource(str(recipe), ()).given())


@pytest.mark.parametrize(("n_devices", "context"), [(64, 8192), (24, 256), (7, 1024), (1000, 2048), (1, 512)])
def test_the_batch_that_is_chosen_divides_among_the_devices_or_is_divided_by_them(n_devices: int, context: int) -> None:
    model = Recipe().model.__class__(vocab_size=300, context_length=context)
    recipe, told = layouts._with_batch(Recipe(model=model), n_devices, given=set())
    batch = recipe.training.batch_size
    assert batch % n_devices == 0 or n_devices % batch == 0
    assert 0.5 <= batch * context / layouts.USUAL_TOKENS <= 2
    assert told is not None
    assert f"{batch:,}" in told


@pytest.mark.thorough
def test_a_plan_of_one_layout_prints_the_bytes_of_each_rank_by_use(napkin: Napkin) -> None:
    layers = TINY.replace("--model.n-layers 1", "--model.n-layers 2")
    batch = "--training.batch-size 4 --training.micro-batch-size 1"
    typed = f"plan {layers} {batch} --parallelism.pipeline 2 --on 4xH100".split()
    done = napkin(*typed)
    assert done.status == 0, done.err
    heading = next(line for line in done.out.splitlines() if line.lstrip().startswith("pipeline rank"))
    assert all(use in heading for use in ("parameters", "optimizer state", "activations", "peak"))
