"""The mixture that a recipe's [data] describes: weights, temperature, limits of epochs, curriculum.

Does not import torch or numpy before a mixture is opened: the command line reads recipes for its help.
"""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from napkin.errors import NapkinError
from napkin.recipe.train_files import TrainFiles, paths_and_weights, read_files

if TYPE_CHECKING:
    from napkin.data.mixing import TokenMixture
    from napkin.data.token_file import TokenFile
    from napkin.recipe.recipe import Recipe

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


def renamed_phase(line: str, names: dict[str, str]) -> str:
    """A line of data.curriculum with its files named as `names` says; a file that is not in there keeps its name."""
    step, *files = line.split()
    weighted = (file.rpartition("=") for file in files)
    return " ".join([step, *(f"{names.get(path, path)}={weight}" for path, _, weight in weighted)])


def open_mixture(recipe: "Recipe", opened: "Callable[[str], TokenFile]") -> "TokenMixture":
    """The training files of a recipe, mixed as its [data] says; `opened` opens one.

    Raises NapkinError where data.max_epochs leaves too little text for the steps of the run.
    """
    from napkin.data.mixing import TokenMixture
    from napkin.data.mixture_phases import temperature_weights

    data = recipe.data
    paths, weights = paths_and_weights(data.train)
    files = [opened(path) for path in paths]
    later = read_curriculum(data.curriculum, paths)
    if data.temperature != 1:
        weights = temperature_weights([file.n_tokens for file in files], data.temperature)
    if data.max_epochs is not None:
        first = weights or tuple(float(file.n_tokens) for file in files)
        (_, weights), *later = _limited([(0, first), *later], recipe, files)
    return TokenMixture(files, weights, later)


def _limited(phases: Phases, recipe: "Recipe", files: "Sequence[TokenFile]") -> Phases:
    """The phases with weights that read no file more often than data.max_epochs in all steps of the run."""
    from napkin.data.mixture_phases import shares_within

    assert recipe.data.max_epochs is not None
    training = recipe.training
    per_step = training.batch_size * recipe.model.context_length
    left = [recipe.data.max_epochs * (file.n_tokens - 1) for file in files]
    limited: Phases = []
    ends = [*(step for step, _ in phases[1:]), training.steps]
    for (step, weights), end in zip(phases, ends, strict=True):
        tokens = per_step * max(0, min(end, training.steps) - step)
        shares = shares_within(weights, tokens, left) if tokens else weights
        if shares is None:
            enough = sum(left[number] for number, weight in enumerate(weights) if weight > 0)
            raise NapkinError(
                f"data.max_epochs {recipe.data.max_epochs:g} leaves {enough:,.0f} tokens for the steps from {step:,} "
                f"to {end:,}, which read {tokens:,}: raise it, add text, or train fewer steps"
            )
        limited.append((step, shares))
        left = [rest - share for rest, share in zip(left, shares if tokens else [0.0] * len(left), strict=True)]
    return limited
