"""A job of some ranks that trains a recipe after the other: each a process, forked when all is imported.

Its arguments are a folder with cases.json, how many ranks there are, and a free port. A case is a name and what it
changes of the recipe's tables. The first rank leaves the losses of all steps in NAME.json; half of the way another
learner takes over, from the checkpoint in NAME/.
"""

import dataclasses
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from napkin.checkpoint.checkpoint import Checkpoint, load_learner, snapshot
from napkin.checkpoint.sharded_writer import open_writer
from napkin.distributed.ranks import ALONE, Ranks, joined
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import OptimizerConfig, Recipe, TrainingConfig
from napkin.train_step.step import Learner, build_learner
from reliability.ranks import place

MODEL = ModelConfig(vocab_size=61, context_length=16, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2)
Case = dict[str, Any]


def steps_of(case: Case) -> int:
    """How many steps it is trained for."""
    return case.get("steps", 50)


def recipe_of(case: Case) -> Recipe:
    """The recipe of a case."""
    training = {"batch_size": 4, "steps": steps_of(case), "precision": "fp32", "device": "cpu"}
    return Recipe(
        model=dataclasses.replace(MODEL, **case.get("model", {})),
        optimizer=OptimizerConfig(**{"warmup_steps": 0, **case.get("optimizer", {})}).resolved,
        training=TrainingConfig(**training | case.get("training", {})),
    )


def learner_of(case: Case, ranks: Ranks = ALONE) -> Learner:
    """This rank's part of a case's learner, as it begins."""
    recipe = recipe_of(case)
    learner = build_learner(recipe, Precision(recipe.training.precision, "cpu"), ranks)  # pyright: ignore[reportArgumentType]
    if learner.loss_scale is not None:
        # Beyond fp16's range at first.
        learner.loss_scale.scale = 2.0**23
    return learner


def losses(learner: Learner, steps: range) -> list[float]:
    """Train on this rank's rows of some batches; losses, norms and losses without gradient, one after the other."""
    figures: list[float] = []
    for number in steps:
        draw = torch.Generator().manual_seed(number)
        rows = learner.spread.ranks.rows(4)
        # Something to learn: a token follows from the one before it.
        first = torch.randint(61, (4, 1), generator=draw)
        tokens = (first + 7 * torch.arange(learner.recipe.model.context_length + 1)) % 61
        inputs, targets = tokens[rows, :-1], tokens[rows, 1:]
        shares = learner.shares(targets) if learner.spread.ranks.size > 1 else None
        loss, norm = learner.step(number, inputs, targets, shares=shares)
        figures += [loss.item(), norm.item()]
        if number % 10 == 9:
            with learner.averaged(), torch.no_grad():
                learner.model.eval()
                figures.append(float(learner.spread.mean(learner.model.loss(inputs, targets))))
                learner.model.train()
    return figures


def save(learner: Learner, folder: Path, *, step: int) -> Checkpoint:
    """A checkpoint by all ranks, that is not published before they have trained on."""
    folder.mkdir(exist_ok=True)
    trained = threading.Event()

    def wait_for_training() -> None:
        assert trained.wait(300), "the ranks did not train while they wrote"

    settings: dict[str, Any] = {"background": True, "keep": 2, "keep_best": False}
    settings["before_publishing"] = wait_for_training
    with open_writer(learner.spread.ranks, learner.recipe, folder, **settings) as writer:
        learner.spread.settle()
        writer.save(snapshot(learner, step=step, seconds=1.0, tokenizer="a", train_tokens="b"))
        losses(learner, range(step, step + 1))
        trained.set()
        written = writer.wait()
    assert written is not None
    return written


def train_cases(folder: Path) -> None:
    """Run all cases on this rank."""
    cases: dict[str, Case] = json.loads((folder / "cases.json").read_text())
    with joined(TrainingConfig(device="cpu", rank_timeout=300.0)) as ranks:
        for name, case in cases.items():
            half, steps = steps_of(case) // 2, steps_of(case)
            learner = learner_of(case, ranks)
            figures = losses(learner, range(half))
            saved = save(learner, folder / name, step=half)
            # The step that was done meanwhile is undone, and so is the rest of what a learner remembers.
            resumed = learner_of(case, ranks)
            load_learner(saved, resumed)
            figures += losses(resumed, range(half, steps))
            if ranks.is_first:
                (folder / f"{name}.json").write_text(json.dumps(figures))


def main(folder: Path, size: int, port: int) -> int:
    """Fork the ranks, and wait for them: 0 where all have ended well."""
    torch.set_num_threads(1)
    children: list[int] = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.environ.update(place(rank, size, port))
            try:
                train_cases(folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
