"""The values of data.train: one token file, several, or several with weights.

Does not import torch: the command line reads these types for its help.
"""

from math import isfinite

from napkin.errors import NapkinError

TrainFiles = str | tuple[str, ...] | dict[str, float]


def paths_and_weights(train: TrainFiles) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """The files in their order, and their weights where there are any."""
    if isinstance(train, str):
        return (train,), None
    return tuple(train), tuple(train.values()) if isinstance(train, dict) else None


def refuse_impossible_files(train: TrainFiles) -> None:
    """Raise NapkinError where there is no file, a file twice, or a weight that is not a finite number above 0."""
    paths, weights = paths_and_weights(train)
    if not paths:
        raise NapkinError("data.train names no token file: name one or more")
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise NapkinError(
            f"data.train names '{twice}' twice: name it once, with a larger weight if it should be sampled more often"
        )
    for path, weight in zip(paths, weights or (), strict=weights is not None):
        if not (isfinite(weight) and weight > 0):
            raise NapkinError(f"data.train: the weight of '{path}' is {weight}: use a number above 0, or leave it out")


def read_files(texts: list[str]) -> TrainFiles:
    """Parse command-line arguments: FILE, FILE FILE ... or FILE=WEIGHT FILE=WEIGHT ...

    Raises ValueError where only some files have a weight, or a file is named twice.
    """
    weighted = [_weighted(text) for text in texts]
    weights = {path: weight for path, weight in weighted if weight is not None}
    if not weights:
        return texts[0] if len(texts) == 1 else tuple(texts)
    if any(weight is None for _, weight in weighted):
        raise ValueError("give every file a weight, or none: FILE=WEIGHT FILE=WEIGHT ...")
    if len(weights) < len(texts):
        raise ValueError("it names a file twice: name it once, with the sum of its weights")
    return weights


def write_files(train: TrainFiles) -> list[str]:
    """The inverse of `read_files`."""
    paths, weights = paths_and_weights(train)
    return (
        list(paths) if weights is None else [f"{path}={weight:g}" for path, weight in zip(paths, weights, strict=True)]
    )


def _weighted(text: str) -> tuple[str, float | None]:
    path, equals, weight = text.rpartition("=")
    try:
        return (path, float(weight)) if equals else (text, None)
    except ValueError:
        # A file's name may have an equals sign.
        return text, None
