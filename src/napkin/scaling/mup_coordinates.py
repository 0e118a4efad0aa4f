"""The coordinate check of µP: does what a step changes in the activations stay the same as the model grows wider?

Yang et al. 2022 (Tensor Programs V), appendix D.1: with µP the mean size of the change of each activation after a few
steps does not depend on the width; with plain layers at one learning rate it grows with it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError
from napkin.model.transformer import Transformer
from napkin.planning.machine import ThisMachine
from napkin.planning.resolve import resolve
from napkin.recipe.recipe import Recipe
from napkin.recipe.train_files import paths_and_weights
from napkin.train_step.step import build_train_state

STEPS = 10
"""After which the change is read."""
STEEPEST = 0.25
"""Slope of the change over the width, both in logarithms, up to which it counts as independent. Plain layers have 0.5
to 1 in theory."""
_ROWS = 4
"""Sequences whose activations are read."""


@dataclass(frozen=True)
class CoordinateCheck:
    """How activations change in a few steps, at several widths."""

    widths: tuple[int, ...]
    changes: dict[str, tuple[float, ...]]
    """Mean absolute change of each activation after `STEPS` steps, by the part of the model, for each width."""

    def slope(self, part: str) -> float:
        """Of the logarithm of the change over the logarithm of the width, by least squares."""
        return float(np.polyfit(np.log(self.widths), np.log(np.maximum(self.changes[part], 1e-300)), 1)[0])

    @property
    def holds(self) -> bool:
        """Whether no part's change depends on the width, up to `STEEPEST`."""
        return all(abs(self.slope(part)) <= STEEPEST for part in self.changes)


def check_coordinates(
    recipes: Sequence[Recipe], *, steps: int = STEPS, progress: Callable[[int, int], None] = lambda done, total: None
) -> CoordinateCheck:
    """Train models of several widths for a few steps at the recipe's peak learning rate, on the same tokens.

    The recipes differ in their width alone and are trained in fp32 on this machine, without anything being written.
    Raises NapkinError for fewer than two widths, and for tokens that do not suffice.
    """
    widths = tuple(recipe.model.d_model for recipe in recipes)
    if len(set(widths)) < 2:
        raise NapkinError(f"a coordinate check compares widths, {len(set(widths))} is given: use two or more")
    changes: dict[str, list[float]] = {}
    for done, recipe in enumerate(recipes):
        progress(done, len(recipes))
        for part, change in _changes(recipe, steps).items():
            changes.setdefault(part, []).append(change)
    return CoordinateCheck(widths, {part: tuple(values) for part, values in changes.items()})


def _changes(recipe: Recipe, steps: int) -> dict[str, float]:
    plain = dataclasses.replace(recipe.optimizer, decay_steps=None, final_fraction=None)
    optimizer = dataclasses.replace(plain, schedule="constant", warmup_steps=0)
    training = dataclasses.replace(recipe.training, precision="fp32", steps=steps + 1, compile="off", device="cpu")
    recipe = dataclasses.replace(recipe, optimizer=optimizer, training=training)
    state = build_train_state(resolve(recipe, ThisMachine()))
    batches = _batches(recipe, steps)
    read = batches[0][0][:_ROWS]
    before = _activations(state.model, read)
    for number, (inputs, targets) in enumerate(batches):
        state.step(number, inputs, targets)
    after = _activations(state.model, read)
    return {part: (after[part] - before[part]).abs().mean().item() for part in before}


def _batches(recipe: Recipe, steps: int) -> list[tuple[Tensor, Tensor]]:
    """The first tokens of the first training file, in order."""
    path = paths_and_weights(recipe.data.train)[0][0]
    shape = (recipe.training.batch_size, recipe.model.context_length + 1)
    tokens = TokenFile.open(path)
    size = shape[0] * shape[1]
    if tokens.n_tokens < size:
        raise NapkinError(f"'{path}' has {tokens.n_tokens:,} tokens, a batch has {size:,}: use a smaller batch")
    batches = []
    for step in range(steps):
        first = step * size % (tokens.n_tokens - size + 1)
        rows = torch.from_numpy(np.asarray(tokens.tokens[first : first + size]).astype(np.int64)).view(shape)
        batches.append((rows[:, :-1].contiguous(), rows[:, 1:].contiguous()))
    return batches


@torch.no_grad()
def _activations(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """What the embedding, each block and the head give for these tokens."""
    found: dict[str, Tensor] = {}

    def keep(part: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            found[part] = (output if isinstance(output, Tensor) else output[0]).float().clone()

        return hook

    handles = [block.register_forward_hook(keep(f"block {number}")) for number, block in enumerate(model.blocks)]
    try:
        found["logits"] = model(tokens).float()
    finally:
        for handle in handles:
            handle.remove()
    return found
