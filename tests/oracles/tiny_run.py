"""The smallest run that has all parts of a large one: a text of bytes, its token files, a recipe."""

import dataclasses
import random
from pathlib import Path
from typing import Any

from napkin.data.corpus import Document
from napkin.data.token_file import SEPARATOR
from napkin.data.token_writer import write_token_file
from napkin.model.config import ModelConfig
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.tokenizer.bpe import ByteTokenizer
from napkin.training.pretraining import Pretraining

MODEL = ModelConfig(context_length=32, d_model=48, n_layers=1, n_heads=4, n_kv_heads=2)
TRAINING = TrainingConfig(
    steps=40, batch_size=4, threads=1, checkpoint_every=6, evaluate_every=10, evaluation_tokens=200, keep_best=False
)


def tiny_recipe(folder: Path | str, **training: Any) -> Recipe:
    """A recipe over the files in `folder`; fields of `training` changed as named."""
    return Recipe(
        data=DataConfig(f"{folder}/train.tokens", f"{folder}/validation.tokens", f"{folder}/tokenizer.json"),
        model=MODEL,
        optimizer=OptimizerConfig(warmup_steps=0),
        training=dataclasses.replace(TRAINING, **training),
    )


def with_recipe(preparation: Pretraining, recipe: Recipe) -> Pretraining:
    """The same data, read by another recipe."""
    return dataclasses.replace(preparation, resolved=dataclasses.replace(preparation.resolved, recipe=recipe))


def write_tiny_text(folder: Path) -> None:
    """Write tokenizer.json, train.tokens and validation.tokens to `folder`."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoin", k=draw.randint(1, 6))) for _ in range(100)]
    documents = [Document(name=str(n), text=" ".join(draw.choices(words, k=200))) for n in range(20)]
    tokenizer = ByteTokenizer([SEPARATOR])
    tokenizer.save(folder / "tokenizer.json")
    write_token_file(folder / "train.tokens", documents[1:], tokenizer)
    write_token_file(folder / "validation.tokens", documents[:1], tokenizer)
