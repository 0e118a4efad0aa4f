"""The fields of [data] that mix files: what of them is possible, and how data.curriculum is read.

Does not import torch: the command line reads recipes for its help.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import floor, isfinite

from napkin.errors import NapkinError
from napkin.recipe.train_files import TrainFiles, paths_and_weights, read_files

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
