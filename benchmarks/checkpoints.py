"""How long training stands still for a checkpoint: napkin's in the background and not, beside torch.save.

    python benchmarks/checkpoints.py --parameters 20e6

torch.save into a new file, synced and renamed over the old one, is what a careful plain loop does: no checksums, no
second copy, and a pickle.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from napkin.checkpoint.state import Snapshot, snapshot
from napkin.checkpoint.writer import CheckpointWriter
from napkin.model.config import ModelConfig
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.training_config import OptimizerConfig, TrainingConfig
from napkin.train_step.step import TrainState, build_train_state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=20e6)
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    width = 256
    model = ModelConfig(vocab_size=round(options.parameters / width), context_length=8, d_model=width, n_layers=1)
    recipe = Recipe(model=model, optimizer=OptimizerConfig(warmup_steps=0), training=TrainingConfig(batch_size=1))
    train_state = build_train_state(ResolvedRecipe(recipe, Precision("fp32", "cpu")))
    train_state.optimizer.all_state()
    size = taken(train_state, 0).bytes
    print(
        f"{size / 1e6:.0f} MB: weights and AdamW's moments; best of {options.repetitions}, "
        f"{torch.get_num_threads()} threads"
    )
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "napkin, background": napkin_way(train_state, Path(folder) / "background", background=True),
            "napkin, wait": napkin_way(train_state, Path(folder) / "wait", background=False),
            "torch.save, synced": torch_way(train_state, Path(folder) / "torch.pt"),
            "a copy of the tensors": copy_way(train_state),
        }
        waits: dict[str, list[float]] = {name: [] for name in ways}
        for repetition in range(options.repetitions + 1):
            for name, way in ways.items():
                seconds = way(repetition)
                # The first time memory is made.
                if repetition:
                    waits[name].append(seconds)
    base = min(waits["torch.save, synced"])
    print(f"{'':<24}{'training waits':>16}{'median':>10}{'/ torch.save':>14}")
    for name, seconds in waits.items():
        least, median = min(seconds), statistics.median(seconds)
        print(f"{name:<24}{least * 1e3:>13.1f} ms{median * 1e3:>7.0f} ms{least / base:>14.3f}")


def taken(train_state: TrainState, step: int) -> Snapshot:
    return snapshot(train_state, step=step, seconds=0.0, tokenizer="t", train_tokens="d")


def napkin_way(train_state: TrainState, folder: Path, *, background: bool) -> Callable[[int], float]:
    folder.mkdir()
    writer = CheckpointWriter(folder, background=background, keep=1, keep_best=False)

    def save(step: int) -> float:
        begin = time.perf_counter()
        writer.save(taken(train_state, step))
        seconds = time.perf_counter() - begin
        writer.wait()
        return seconds

    return save


def torch_way(train_state: TrainState, path: Path) -> Callable[[int], float]:
    def save(step: int) -> float:
        begin = time.perf_counter()
        draft = path.with_suffix(".tmp")
        with open(draft, "wb") as file:
            moments = {name: train_state.optimizer.state[p] for name, p in train_state.model.named_parameters()}
            torch.save({"model": train_state.model.state_dict(), "optimizer": moments, "step": step}, file)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        return time.perf_counter() - begin

    return save


def copy_way(train_state: TrainState) -> Callable[[int], float]:
    tensors = [part.tensor for part in taken(train_state, 0).parts()]
    buffers = [torch.empty_like(tensor) for tensor in tensors]

    def copy(_: int) -> float:
        begin = time.perf_counter()
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        return time.perf_counter() - begin

    return copy


if __name__ == "__main__":
    main()
