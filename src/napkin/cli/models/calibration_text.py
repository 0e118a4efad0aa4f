"""Tokens that stand for those a model will read: windows of a text, or of a run's training tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from napkin.cli.common.files import open_documents
from napkin.errors import NapkinError

if TYPE_CHECKING:
    from torch import Tensor

    from napkin.inference.loaded_model import LoadedModel

_MOST_TOKENS = 2**24


def require_calibration_tokens(n_tokens: int) -> None:
    """Raise NapkinError for a number of tokens that is out of range."""
    if not 1 <= n_tokens <= _MOST_TOKENS:
        raise NapkinError(f"--calibration-tokens is {n_tokens}: use 1 to {_MOST_TOKENS:,}")


def calibration_windows(
    trained: "LoadedModel", texts: Sequence[str], n_tokens: int, longest: int | None = None, seed: int = 0
) -> "Tensor":
    """Draw windows of tokens, one per row, about `n_tokens` in all, each of the model's context or of `longest` tokens.

    Raises NapkinError where there is no text to draw them from.
    """
    import numpy as np
    import torch

    from napkin.data.token_file import TokenFile
    from napkin.recipe.data_config import paths_and_weights
    from napkin.recipe.tuning_recipe import TuningRecipe

    if texts:
        tokens = np.array([id for each in open_documents(texts) for id in trained.encode_prompt(each.text)])
    else:
        path = None
        if trained.run_folder is not None and not isinstance(recipe := trained.recipe, TuningRecipe):
            path = trained.run.token_file(paths_and_weights(recipe.data.train)[0][0])
        if path is None or not Path(path).is_file():
            raise NapkinError(
                f"'{trained.folder}' has no training tokens to calibrate on: name a text with --calibration-text"
            )
        tokens = TokenFile.open(path, tokenizer_fingerprint=trained.tokenizer.fingerprint).tokens
    length = min(trained.context_length, longest or trained.context_length, len(tokens))
    if not length:
        raise NapkinError("the calibration text has no tokens: name another with --calibration-text")
    n = max(1, min(n_tokens // length, len(tokens) // length))
    starts = np.random.default_rng(seed).integers(0, len(tokens) - length + 1, size=n)
    return torch.from_numpy(np.stack([np.asarray(tokens[at : at + length], dtype=np.int64) for at in starts.tolist()]))
