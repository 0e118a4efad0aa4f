"""A tiny model to start tuning from, and recipes that take a second."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.recipe.tuning_recipe import RECIPE_OF, TuningConfig, TuningRecipe
from napkin.training.run import train
from oracles.tiny_run import tiny_recipe, write_tiny_text

TRAINING = TrainingConfig(
    steps=6, batch_size=4, precision="fp32", device="cpu", checkpoint_every=3, evaluate_every=3, threads=1
)


def make_start(folder: Path) -> Path:
    """A run of two steps in `folder`."""
    write_tiny_text(folder)
    train(tiny_recipe(folder, steps=2), folder / "start")
    return folder / "start"


def write_conversations(path: Path, n: int, seed: int = 0) -> Path:
    """A JSONL file of short conversations."""
    draw = random.Random(seed)

    def text() -> str:
        return "".join(draw.choices("abcde ", k=draw.randint(1, 7))).strip() or "a"

    lines = [
        {"messages": [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]} for _ in range(n)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def tuning_recipe(folder: Path, method: str = "sft", *, tuning: Any = None, **training: Any) -> TuningRecipe:
    """A recipe that starts from `folder`/start and reads `folder`/train.jsonl and `folder`/held_out.jsonl."""
    recipe = RECIPE_OF[method]()  # pyright: ignore[reportArgumentType]
    data = dataclasses.replace(
        recipe.data, train=str(folder / "train.jsonl"), validation=str(folder / "held_out.jsonl")
    )
    config = TuningConfig(**{"method": method, "start": str(folder / "start"), **(tuning or {})})  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(
        recipe,
        data=data,
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=0),
        training=dataclasses.replace(TRAINING, **training),
        tuning=config,
    )
