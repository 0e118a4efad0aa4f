"""The coordinate check of µP: does what a step changes in the activations stay the same as the model grows wider?

Yang et al. 2022 (Tensor Programs V), appendix D.1: with µP the mean size of the change of each activation after a few
steps does not depend on the width; with plain layers at one learning rate it grows with it.

The transfer test goes on from there: whether the best learning rate stays where it is as the model grows wider, as
numbers and as a picture of loss over learning rate.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from napkin.data.token_file import TokenFile
from napkin.errors import NapkinError
from napkin.model.transformer import Transformer
from napkin.planning.planner import resolve
from napkin.planning.step.machine import ThisMachine
from napkin.recipe.data_config import paths_and_weights
from napkin.recipe.recipe import Recipe
from napkin.report.xy_picture import Series, xy_svg
from napkin.scaling.isoflop import parabola_minimum
from napkin.scaling.sweep import Standing
from napkin.scaling.trials import Trial, Value
from napkin.train_step.step import build_train_state

STEPS = 10
"""After which the change is read."""
STEEPEST = 0.25
"""Slope of the change over the width, both in logarithms, up to which it counts as independent. Plain layers have 0.5
to 1 in theory."""
_ROWS = 4
"""Number of sequences whose activations are read."""


@dataclass(frozen=True)
class CoordinateCheck:
    """The change of activations in a few steps, at several widths."""

    widths: tuple[int, ...]
    changes: dict[str, tuple[float, ...]]
    """Mean absolute change of each activation after `STEPS` steps, by the part of the model, for each width."""

    def slope(self, part: str) -> float:
        """Slope of the logarithm of the change over the logarithm of the width, by least squares."""
        return float(np.polyfit(np.log(self.widths), np.log(np.maximum(self.changes[part], 1e-300)), 1)[0])

    @property
    def holds(self) -> bool:
        """True if no part's change depends on the width, up to `STEEPEST`."""
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
    """The outputs of the embedding, each block and the head for these tokens."""
    activations: dict[str, Tensor] = {}

    def keep(part: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            activations[part] = (output if isinstance(output, Tensor) else output[0]).float().clone()

        return hook

    handles = [block.register_forward_hook(keep(f"block {number}")) for number, block in enumerate(model.blocks)]
    try:
        activations["logits"] = model(tokens).float()
    finally:
        for handle in handles:
            handle.remove()
    return activations


# Yang et al. 2022 (Tensor Programs V), figure 1. Models of several widths are trained at several learning rates, each
# an ordinary run of a sweep; the best rate of a width is the vertex of the parabola through the lowest loss and its
# neighbours, over the logarithm of the rate.

FARTHEST = 2.0
"""The best rates of all widths are to be within this factor of each other."""


@dataclass(frozen=True)
class BestRate:
    """The learning rate with the lowest loss at a width."""

    width: int
    rate: float
    """The rate of the vertex; where the lowest loss is at the edge of what was tried, its own."""
    loss: float
    """The lowest of the runs."""
    is_bracketed: bool
    """True if runs of lower and of higher rate have a higher loss."""


@dataclass(frozen=True)
class Transfer:
    """The best rates of several widths."""

    best: tuple[BestRate, ...]

    @property
    def factor(self) -> float:
        """The largest of the best rates over the smallest."""
        rates = [each.rate for each in self.best]
        return max(rates) / min(rates)

    @property
    def holds(self) -> bool | None:
        """True if they are within `FARTHEST`; None where a best rate is not bracketed, and may lie farther out."""
        if not all(each.is_bracketed for each in self.best):
            return None
        return self.factor <= FARTHEST


def widened(base: Recipe, width: int, *, mup: bool = True) -> Recipe:
    """The recipe at another width: heads as wide as before, d_ff in proportion, µP's multipliers from the base's width.

    Raises NapkinError where heads do not divide the width.
    """
    model, head_dim = base.model, base.model.resolved_head_dim
    heads, rest = divmod(width, head_dim)
    if rest or not heads:
        raise NapkinError(
            f"a width of {width} is not a multiple of head_dim {head_dim}: use {head_dim}, {2 * head_dim}, …"
        )
    shrunk = model.n_heads // model.resolved_n_kv_heads
    if heads % shrunk:
        raise NapkinError(
            f"a width of {width} has {heads} heads, which {shrunk} queries per key do not divide: use multiples of "
            f"{shrunk * head_dim}"
        )
    return dataclasses.replace(
        base,
        model=dataclasses.replace(
            model,
            d_model=width,
            n_heads=heads,
            n_kv_heads=None if shrunk == 1 else heads // shrunk,
            head_dim=None if model.head_dim is None else head_dim,
            d_ff=None if model.d_ff is None else round(width * model.d_ff / model.d_model),
            mup_base_d_model=(model.mup_base_d_model or model.d_model) if mup else None,
        ),
    )


def transfer_trials(
    base: Recipe, widths: Sequence[int], rates: Sequence[float], *, mup: bool = True
) -> tuple[Trial, ...]:
    """A run for each width and learning rate.

    Raises NapkinError for fewer than two widths or three rates, for one that is given twice, and for one that no recipe
    can have.
    """
    for given, least, what in ((widths, 2, "widths"), (rates, 3, "learning rates")):
        if len(set(given)) < least:
            raise NapkinError(f"a transfer test needs {least} {what}, {len(set(given))} are given: give more")
        if len(set(given)) < len(given):
            raise NapkinError(f"one of the {what} is given twice: give each once")
    trials = []
    for width in sorted(widths):
        wide = widened(base, width, mup=mup)
        for rate in sorted(rates):
            optimizer = dataclasses.replace(wide.optimizer, learning_rate=rate)
            values: dict[str, Value] = {"model.d_model": width, "optimizer.learning_rate": rate}
            name = f"d_model={width},learning_rate={rate:.6g}"
            trials.append(Trial(name, values, dataclasses.replace(wide, optimizer=optimizer)))
    return tuple(trials)


def curves(standings: Sequence[Standing]) -> dict[int, list[tuple[float, float]]]:
    """(learning rate, loss) of the runs that are at their end with a finite loss, by width."""
    losses: dict[int, list[tuple[float, float]]] = {}
    for each in standings:
        recipe = each.trial.recipe
        points, rate = losses.setdefault(recipe.model.d_model, []), recipe.optimizer.learning_rate
        assert rate is not None
        if each.loss is not None and math.isfinite(each.loss):
            points.append((rate, each.loss))
    return {width: sorted(points) for width, points in losses.items()}


def transfer(by_width: dict[int, list[tuple[float, float]]]) -> Transfer:
    """The best rate of each width from its (learning rate, loss). Raises NapkinError for a width without a loss."""
    missing = [str(width) for width, points in by_width.items() if not points]
    if missing:
        raise NapkinError(f"no run of width {', '.join(missing)} is at its end with a finite loss: use lower rates")
    return Transfer(tuple(_best(width, sorted(points)) for width, points in sorted(by_width.items())))


def _best(width: int, points: list[tuple[float, float]]) -> BestRate:
    rates, losses = zip(*points, strict=True)
    lowest = int(np.argmin(losses))
    if not 0 < lowest < len(points) - 1:
        return BestRate(width, rates[lowest], losses[lowest], is_bracketed=False)
    near = slice(lowest - 1, lowest + 2)
    minimum = parabola_minimum(np.log(rates[near]), np.array(losses[near]))
    assert minimum is not None
    return BestRate(width, math.exp(minimum[0]), losses[lowest], is_bracketed=True)


_SHADES = ("sky", "blue", "green", "orange", "vermilion", "purple", "grey")


def transfer_svg(curves: dict[int, list[tuple[float, float]]], transfer: Transfer) -> str:
    """Draw the curves, and at each one's lowest loss its best learning rate."""
    series = []
    for number, best in enumerate(transfer.best):
        points = curves[best.width]
        rates, losses = (np.array(column) for column in zip(*points, strict=True))
        shade = _SHADES[number % len(_SHADES)]
        series.append(Series(f"d_model {best.width}", rates, losses, shade, "line"))
        series.append(Series("", np.array([best.rate]), np.array([best.loss]), shade))
    return xy_svg(
        series,
        title="Loss over learning rate, by width",
        x_label="learning rate",
        y_label="loss, nats per token",
        log_y=False,
    )
