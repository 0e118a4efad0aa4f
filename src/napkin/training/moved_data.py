"""Token files of a run that have moved: the same contents at another path are the same data."""

import dataclasses
from pathlib import Path

from napkin.checkpoint.folder import checkpoint_paths, read_checkpoint
from napkin.data.token_file import TokenFile
from napkin.errors import CorruptFile, NapkinError
from napkin.recipe.curriculum import renamed_phase
from napkin.recipe.data_config import DataConfig
from napkin.recipe.mixture import open_mixture
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
                return _train_checksum(_with_train(run.recipe, now)) == _checksum_before(run)
            case "validation", str():
                before = run.recipe.data.validation
                return before is not None and _validation_has_moved(run, before, now)
    except NapkinError:
        pass
    return False


def found_again(run: RunFolder, data: DataConfig) -> DataConfig:
    """`data` with the places of its token files now, where the run was moved together with them; see
    `RunFolder.token_file`."""
    train: TrainFiles
    match data.train:
        case str():
            train = run.token_file(data.train)
        case dict():
            train = {run.token_file(path): weight for path, weight in data.train.items()}
        case paths:
            train = tuple(map(run.token_file, paths))
    validation = None if data.validation is None else run.token_file(data.validation)
    return dataclasses.replace(data, train=train, validation=validation)


def with_moved_data(run: RunFolder, data: DataConfig) -> Recipe:
    """The run's recipe with the places of `data`'s token files.

    Raises NapkinError where the training tokens are not those that the run was trained with.
    """
    recipe = run.recipe
    before = recipe.data
    if (data.train, data.validation) == (before.train, before.validation):
        return recipe
    moved = recipe
    if data.train != before.train:
        moved = _with_train(recipe, data.train)
        trained_with = _checksum_before(run)
        if trained_with is not None and _train_checksum(moved) != trained_with:
            paths = ", ".join(f"'{path}'" for path in paths_and_weights(data.train)[0])
            raise NapkinError(
                f"{paths}: these are not the tokens that '{run.path}' was trained with: name the same files at their "
                "new place, or start a new run with `napkin train`"
            )
    return dataclasses.replace(moved, data=dataclasses.replace(moved.data, validation=data.validation))


def _with_train(recipe: Recipe, train: TrainFiles) -> Recipe:
    """The recipe with other names of its training files, in its curriculum too: the first is the first, and so on."""
    names = dict(zip(paths_and_weights(recipe.data.train)[0], paths_and_weights(train)[0], strict=False))
    curriculum = tuple(renamed_phase(line, names) for line in recipe.data.curriculum)
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, train=train, curriculum=curriculum))


def _train_checksum(recipe: Recipe) -> str:
    return open_mixture(recipe, TokenFile.open).sha256


def _checksum_before(run: RunFolder) -> str | None:
    """The checksum of the tokens that the run was trained with; None before its first checkpoint if they are gone."""
    for path in checkpoint_paths(run.checkpoints):
        try:
            return read_checkpoint(path, verify=False).state.train_tokens
        except CorruptFile:
            continue
    try:
        return _train_checksum(run.recipe)
    except NapkinError:
        return None


def _validation_has_moved(run: RunFolder, before: str, now: str) -> bool:
    """A run does not record the checksum of its validation tokens: where the old file is gone, the name has to do."""
    found = TokenFile.open(now, tokenizer_fingerprint=run.tokenizer.fingerprint)
    if Path(before).is_file():
        return TokenFile.open(before).sha256 == found.sha256
    return Path(before).name == Path(now).name
