"""A trained run, opened for use: `napkin evaluate` and `napkin generate` begin so."""

from dataclasses import dataclass

import torch

from napkin.checkpoint.checkpoint import Checkpoint, load_averaged_model
from napkin.checkpoint.restore import load_newest
from napkin.cli.terminal import err
from napkin.errors import NapkinError
from napkin.hardware.host import detect_host
from napkin.model.transformer import Transformer
from napkin.recipe.precision import Precision, choose_device, choose_precision
from napkin.recipe.recipe import Recipe
from napkin.report.page import write_report
from napkin.runs.lock import is_being_trained
from napkin.runs.run_folder import RunFolder
from napkin.tokenizer.base import Tokenizer


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
    """Load the newest good checkpoint of a run, on the GPU if there is one; a damaged one is named and passed over."""
    run = RunFolder.open(folder)
    recipe, tokenizer, host = run.recipe, run.tokenizer, detect_host()
    torch.set_num_threads(host.cores)
    device_type = choose_device("auto")
    model = Transformer(recipe.model)
    checkpoint = _load_newest(run, model)
    precision = choose_precision("auto", device_type, host)
    return TrainedRun(run, recipe, tokenizer, model.to(device_type), precision, checkpoint)


def renew_report(run: RunFolder) -> None:
    """Write a run's report with what the folder holds by now; best done when the result has been printed."""
    write_report(run.path, training=is_being_trained(run.path))


def _load_newest(run: RunFolder, model: Transformer) -> Checkpoint:
    checkpoint, damaged = load_newest(run.checkpoints, lambda checkpoint: load_averaged_model(checkpoint, model))
    if checkpoint is None:
        raise NapkinError(f"'{run.path}' has no checkpoint yet: train it with `napkin resume {run.path}`")
    for error in damaged.values():
        err.print(f"a damaged checkpoint is passed over for '{checkpoint.path.name}': {error}", soft_wrap=True)
    return checkpoint
