"""Token files of a run that have moved: the same contents at another path are the same data."""

import dataclasses
from pathlib import Path

from napkin.checkpoint.folder import checkpoint_paths, read_checkpoint
from napkin.data.mixing import TokenMixture
from napkin.data.token_file import TokenFile
from napkin.errors import CorruptFile, NapkinError
from napkin.recipe.data_config import DataConfig
from napkin.recipe.recipe import Recipe
from napkin.recipe.train_files import TrainFiles, paths_and_weights
from napkin.runs.run_folder import RunFolder
from napkin.tokenizer.tokenizer_file import load_tokenizer


def has_moved(run: RunFolder, name: str, now: TrainFiles | None) -> bool:
    """Whether `now`, another value of the run's data.`name`, names the same contents at another path."""
    try:
        match name, now:
            case "tokenizer", str():
                return load_tokenizer(now).fingerprint == run.tokenizer.fingerprint
            case "train", str() | tuple() | dict():
                return _train_checksum(now) == _checksum_before(run)
            case "validation", str():
                before = run.recipe.data.validation
                return before is not None and _validation_has_moved(run, before, now)
    except NapkinError:
        pass
    return False


def with_moved_data(run: RunFolder, data: DataConfig) -> Recipe:
    """The run's recipe with the places of `data`'s token files.

    Raises NapkinError where the training tokens are not those that the run was trained with.
    """
    recipe = run.recipe
    before = recipe.data
    moved = dataclasses.replace(before, train=data.train, validation=data.validation)
    if moved == before:
        return recipe
    if moved.train != before.train:
        trained_with = _checksum_before(run)
        if trained_with is not None and _train_checksum(moved.train) != trained_with:
            paths = ", ".join(f"'{path}'" for path in paths_and_weights(moved.train)[0])
            raise NapkinError(
                f"{paths}: these are not the tokens that '{run.path}' was trained with: name the same files at their "
                "new place, or start a new run with `napkin train`"
            )
    return dataclasses.replace(recipe, data=moved)


def _train_checksum(train: TrainFiles) -> str:
    paths, weights = paths_and_weights(train)
    return TokenMixture([TokenFile.open(path) for path in paths], weights).sha256


def _checksum_before(run: RunFolder) -> str | None:
    """The checksum of the tokens that the run was trained with; None before its first checkpoint if they are gone."""
    for path in checkpoint_paths(run.checkpoints):
        try:
            return read_checkpoint(path, verify=False).state.train_tokens
        except CorruptFile:
            continue
    try:
        return _train_checksum(run.recipe.data.train)
    except NapkinError:
        return None


def _validation_has_moved(run: RunFolder, before: str, now: str) -> bool:
    """A run does not record the checksum of its validation tokens: where the old file is gone, the name has to do."""
    found = TokenFile.open(now, tokenizer_fingerprint=run.tokenizer.fingerprint)
    if Path(before).is_file():
        return TokenFile.open(before).sha256 == found.sha256
    return Path(before).name == Path(now).name
