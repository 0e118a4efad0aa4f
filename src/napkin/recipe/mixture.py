"""The training files of a recipe, mixed as its [data] says: weights, temperature, limits of epochs, curriculum."""

from collections.abc import Callable, Sequence

from napkin.data.mixing import TokenMixture, shares_within, temperature_weights
from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError
from napkin.recipe.data_config import Phases, paths_and_weights, read_curriculum
from napkin.recipe.recipe import Recipe


def open_mixture(recipe: Recipe, opened: Callable[[str], TokenFile]) -> TokenMixture:
    """The training files of a recipe, mixed as its [data] says; `opened` opens one.

    Raises NapkinError where data.max_epochs leaves too little text for the steps of the run.
    """
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


def _limited(phases: Phases, recipe: Recipe, files: Sequence[TokenFile]) -> Phases:
    """The phases with weights that read no file more often than data.max_epochs in all steps of the run."""
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
