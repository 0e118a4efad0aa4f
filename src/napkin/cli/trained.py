"""A trained run, opened for use: `napkin evaluate` and `napkin generate` begin so."""

from dataclasses import dataclass

import torch

from napkin.errors import CorruptFile, NapkinError
from napkin.hardware.host import detect_host
from napkin.model.transformer import Transformer
from napkin.tokenizer.base import Tokenizer
from napkin.training.checkpoint import Checkpoint, checkpoints_newest_first, load_model
from napkin.training.precision import Precision, choose_device, choose_precision
from napkin.training.recipe import Recipe
from napkin.training.run_folder import RunFolder


@dataclass(frozen=True)
class TrainedRun:
    """A run's newest good model."""

    run: RunFolder
    recipe: Recipe
    tokenizer: Tokenizer
    model: Transformer
    precision: Precision
    checkpoint: Checkpoint


def open_trained(folder: str) -> TrainedRun:
    """Load the newest good checkpoint of a run, on the GPU if there is one."""
    run = RunFolder.open(folder)
    recipe, tokenizer, host = run.recipe, run.tokenizer, detect_host()
    torch.set_num_threads(host.cores)
    checkpoint = _newest_good(run)
    device_type = choose_device("auto")
    model = Transformer(recipe.model)
    load_model(checkpoint, model)
    precision = choose_precision("auto", device_type, host)
    return TrainedRun(run, recipe, tokenizer, model.to(device_type), precision, checkpoint)


def _newest_good(run: RunFolder) -> Checkpoint:
    damaged: CorruptFile | None = None
    for found in checkpoints_newest_first(run.checkpoints):
        if isinstance(found, Checkpoint):
            return found
        damaged = found
    raise damaged or NapkinError(f"'{run.path}' has no checkpoint yet: train it with `napkin resume {run.path}`")
