"""[data] of a recipe: the files that a run reads.

data.train is one token file, several, or several with weights; `refuse_impossible_mixture` says what of the fields that
mix them is possible. This file does not import torch: the command line reads its types for its help.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, isfinite
from typing import Literal

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


Phases = list[tuple[int, tuple[float, ...]]]
"""Steps, and the weights of the files from there on."""


def refuse_impossible_mixture(
    train: TrainFiles, temperature: float, max_epochs: float | None, curriculum: Sequence[str]
) -> None:
    """Raise NapkinError where the fields of [data] that mix files contradict each other or are out of range."""
    paths, weights = paths_and_weights(train)
    if not temperature > 0:
        raise NapkinError(f"data.temperature of {temperature} is not possible: use a number above 0")
    if temperature != 1 and weights is not None:
        raise NapkinError(
            f"data.temperature {temperature:g} weights files by their lengths, and data.train has weights: "
            "leave one of them out"
        )
    if max_epochs is not None and not max_epochs > 0:
        raise NapkinError(f"data.max_epochs of {max_epochs} is not possible: use a number above 0, or None")
    read_curriculum(curriculum, paths)


def read_curriculum(curriculum: Sequence[str], paths: Sequence[str]) -> Phases:
    """The steps of data.curriculum, and from each the weights of all files. Raises NapkinError for a line that cannot
    be read, a file that data.train does not name, weights that are all 0, or steps that do not increase."""
    phases: Phases = []
    for line in curriculum:
        step, *files = line.split()
        if not (step.isdecimal() and files):
            raise NapkinError(f"data.curriculum: '{line}' is not of the form 'STEP FILE=WEIGHT FILE=WEIGHT'")
        try:
            weights = read_files(files)
        except ValueError as error:
            raise NapkinError(f"data.curriculum: '{line}': {error}") from None
        if not isinstance(weights, dict):
            raise NapkinError(f"data.curriculum: '{line}': give every file a weight: FILE=WEIGHT FILE=WEIGHT ...")
        unknown = next((file for file in weights if file not in paths), None)
        if unknown is not None:
            raise NapkinError(f"data.curriculum: '{unknown}' is not a file of data.train: name it there too")
        wrong = next((weight for weight in weights.values() if not (isfinite(weight) and weight >= 0)), None)
        if wrong is not None or not any(weights.values()):
            raise NapkinError(f"data.curriculum: '{line}': use weights from 0, not all of them 0")
        if int(step) <= (phases[-1][0] if phases else 0):
            raise NapkinError(f"data.curriculum: step {step} does not come after the one before: order them, from 1")
        phases.append((int(step), tuple(weights.get(path, 0.0) for path in paths)))
    return phases


def shortened_curriculum(curriculum: Sequence[str], factor: Fraction) -> tuple[str, ...]:
    """The lines of data.curriculum in a run that is `factor` times as long: in order, and from step 1, as before."""
    lines: list[str] = []
    last = 0
    for line in curriculum:
        step, *files = line.split()
        last = max(last + 1, floor(factor * int(step)))
        lines.append(" ".join([str(last), *files]))
    return tuple(lines)


def renamed_phase(line: str, names: dict[str, str]) -> str:
    """A line of data.curriculum with its files named as `names` says; a file that is not in there keeps its name."""
    step, *files = line.split()
    weighted = (file.rpartition("=") for file in files)
    return " ".join([step, *(f"{names.get(path, path)}={weight}" for path, _, weight in weighted)])


@dataclass(frozen=True)
class DataConfig:
    """Files the run reads; paths are relative to the folder that `napkin` is started in."""

    train: TrainFiles = "data/train.tokens"
    """Token file to train on, as `napkin tokenizer encode` makes it; or several, sampled in proportion to their
    lengths; or several with weights, the proportions of the training windows: as a table in TOML, as FILE=WEIGHT on
    the command line."""

    validation: str | None = "data/validation.tokens"
    """Token file for evaluation only; None, or "" in a TOML file, disables evaluation."""

    tokenizer: str = "data/tokenizer.json"
    """The tokenizer that both were encoded with."""

    verify: bool = True
    """Whether the tokens are verified: each block of 512 KiB against its checksum, when a batch first reads it. Files
    with a single checksum, of an earlier napkin, are read whole before training: about a second per gigabyte."""

    separate_documents: bool = False
    """Whether documents that share a window are masked from each other, as if each stood alone; also in evaluations."""

    windows: Literal["auto", "shifted", "fixed"] = "auto"
    """Where the windows of an epoch begin: shifted, where those of the previous epoch ended; or fixed, at the first
    token, so that the last tokens of a file may never be targets. auto is shifted; a run that is older than this option
    stays fixed."""

    prefetch: Literal["auto", "on", "off"] = "auto"
    """Whether a thread prepares the next batch while the current one trains; the batches are the same. auto is on with
    a GPU, to which they are copied in the background, and off on a CPU, where all cores train."""

    temperature: float = 1.0
    """For several files without weights: each is sampled in proportion to its length to the power of 1/temperature. 1
    is proportional to length; larger values sample short files more often."""

    max_epochs: float | None = None
    """How often a document may be read in the whole run: a file that would be read more often gets a smaller share, and
    the others get the rest. None does not limit it."""

    curriculum: tuple[str, ...] = ()
    """Weights that replace those of data.train from a step on, as "STEP FILE=WEIGHT FILE=WEIGHT", steps increasing; a
    file that is not named is left out from there."""

    def __post_init__(self) -> None:
        # TOML has no None, and leaving the field out means its default.
        if self.validation == "":
            object.__setattr__(self, "validation", None)
        refuse_impossible_files(self.train)
        refuse_impossible_mixture(self.train, self.temperature, self.max_epochs, self.curriculum)
