"""A job of some ranks that trains a recipe after the other: each a process, forked when all is imported.

Its arguments are a folder with cases.json, how many ranks there are, and a free port. A case is a name and what it
changes of the recipe's tables. Rank 0 leaves the losses of all steps in NAME.json; halfway another train state takes
over, from the checkpoint in NAME/.
"""

import dataclasses
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from napkin.checkpoint.restore import load_train_state
from napkin.checkpoint.sharded_writer import open_writer
from napkin.checkpoint.state import Checkpoint, snapshot
from napkin.data.batches import IGNORE_INDEX, document_ids
from napkin.distributed.fake_ranks import forget_meshes
from napkin.distributed.joining import join_ranks
from napkin.distributed.ranks import ALONE, Ranks
from napkin.model.config import ModelConfig
from napkin.recipe.data_config import DataConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, ParallelismConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state
from reliability.ranks import fork_ranks

MODEL = ModelConfig(vocab_size=61, context_length=16, d_model=24, n_layers=3, n_heads=4, n_kv_heads=2)
Case = dict[str, Any]
Figure = list[Any]
"""What it is of, and the number; a list, as JSON has it."""


def steps_of(case: Case) -> int:
    """How many steps it is trained for."""
    return case.get("steps", 50)


def recipe_of(case: Case) -> Recipe:
    """The recipe of a case."""
    # JSON has no tuples.
    chosen: Case = case.get("parallelism", {})
    parallelism: Case = {name: tuple(value) if isinstance(value, list) else value for name, value in chosen.items()}
    training = {"batch_size": 4, "steps": steps_of(case), "precision": "fp32", "device": "cpu"}
    return Recipe(
        model=dataclasses.replace(MODEL, **case.get("model", {})),
        optimizer=OptimizerConfig(**{"warmup_steps": 0, **case.get("optimizer", {})}).resolved,
        training=TrainingConfig(**training | case.get("training", {})),
        data=DataConfig(**case.get("data", {})),
        parallelism=ParallelismConfig(**parallelism),
    )


def train_state_of(case: Case, ranks: Ranks = ALONE) -> TrainState:
    """This rank's part of a case's train state, as it begins."""
    recipe = recipe_of(case)
    train_state = build_train_state(ResolvedRecipe(recipe, Precision(recipe.training.precision, "cpu")), ranks)  # pyright: ignore[reportArgumentType]
    if train_state.loss_scale is not None:
        # Beyond fp16's range at first.
        train_state.loss_scale.scale = 2.0**23
    return train_state


def losses(train_state: TrainState, steps: range) -> list[Figure]:
    """Train on this rank's rows of some batches; losses, norms and losses without gradient, one after the other.

    Where documents are separate, the last token of each has no target.
    """
    figures: list[Figure] = []
    for number in steps:
        draw = torch.Generator().manual_seed(number)
        parallel_model, batch_size = train_state.parallel_model, train_state.recipe.training.batch_size
        rows = parallel_model.rows(batch_size)
        # Something to learn: a token follows from the one before it.
        first = torch.randint(61, (batch_size, 1), generator=draw)
        tokens = (first + 7 * torch.arange(train_state.recipe.model.context_length + 1)) % 61
        inputs, targets, documents = tokens[rows, :-1], tokens[rows, 1:].clone(), None
        if train_state.recipe.data.separate_documents:
            documents = document_ids(inputs, 7)
            targets[inputs == 7] = IGNORE_INDEX
        is_even = parallel_model.ranks.world_size == 1 and documents is None
        weights = None if is_even else train_state.micro_batch_weights(targets)
        loss, norm = train_state.step(number, inputs, targets, documents, weights=weights)
        figures += [["loss", loss.item()], ["norm", norm.item()]]
        if number == 0 and train_state.recipe.model.n_experts:
            tokens_per_expert, _ = train_state.expert_tokens()
            figures += [["tokens", float(count)] for layer in tokens_per_expert or [] for count in layer]
        if number % 3 == 2:
            with train_state.averaged(), torch.no_grad():
                train_state.model.eval()
                nats = parallel_model.ranks.all_reduce_sum(parallel_model.evaluation_nats(inputs, targets, documents))
                figures.append(["evaluation", float(nats) / tokens[:, 1:].numel()])
                train_state.model.train()
    return figures


def save(train_state: TrainState, folder: Path, *, step: int) -> Checkpoint:
    """A checkpoint by all ranks, that is not published before they have trained on."""
    folder.mkdir(exist_ok=True)
    trained = threading.Event()

    def wait_for_training() -> None:
        assert trained.wait(300), "the ranks did not train while they wrote"

    settings: dict[str, Any] = {"background": True, "keep": 2, "keep_best": False}
    settings["before_publishing"] = wait_for_training
    with open_writer(train_state.parallel_model.ranks, train_state.resolved.layout, folder, **settings) as writer:
        train_state.parallel_model.reshard()
        writer.save(snapshot(train_state, step=step, seconds=1.0, tokenizer="a", train_tokens="b"))
        losses(train_state, range(step, step + 1))
        trained.set()
        written = writer.wait()
    assert written is not None
    return written


def train_cases(folder: Path) -> None:
    """Run all cases on this rank."""
    cases: dict[str, Case] = json.loads((folder / "cases.json").read_text())
    with join_ranks(TrainingConfig(device="cpu", rank_timeout=300.0)) as ranks:
        for name, case in cases.items():
            figures = train_case(case, ranks, folder / name)
            if ranks.is_rank_zero:
                (folder / f"{name}.json").write_text(json.dumps(figures))
            leave_groups(ranks)


def train_case(case: Case, ranks: Ranks, folder: Path) -> list[Figure]:
    """Train a case, of which halfway another train state takes over from a checkpoint."""
    half, steps = steps_of(case) // 2, steps_of(case)
    train_state = train_state_of(case, ranks)
    figures = losses(train_state, range(half))
    if not case.get("saves", True):
        return figures + losses(train_state, range(half, steps))
    saved = save(train_state, folder, step=half)
    # The step that was done meanwhile is undone, and so is the rest of what a train state remembers.
    resumed = train_state_of(case | case.get("resumed", {}), ranks)
    load_train_state(saved, resumed)
    return figures + losses(resumed, range(half, steps))


def leave_groups(ranks: Ranks) -> None:
    """End the process groups that a case has made: each of gloo's has threads, thousands after many cases."""
    forget_meshes()
    gc.collect()
    ranks.all_reduce_max(0)
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.exit(fork_ranks(lambda rank: train_cases(folder), int(sys.argv[2]), int(sys.argv[3])))
