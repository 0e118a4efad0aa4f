"""Finds out why a gradient differs between arrangements of the same examples: which hypothesis explains the difference.

If examples do not influence each other, the gradient of a batch is a sum of the examples' own gradients, each with a
weight: by the mean over tokens, an example's part of all trained tokens. Weights that are fitted to the gradient of an
arrangement show how it is normalised; what no weights explain is an influence of examples on each other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.hooks.checked_program import IGNORED, Arrangement, Checked, Gradient, length_of

SKETCHED = 2**20
"""The most entries of a gradient that weights are fitted to."""
EXPLAINED = 0.99
"""A hypothesis is reported if it explains this fraction of a difference."""


def sketch(gradient: Gradient, names: Sequence[str]) -> Tensor:
    """Entries of a gradient, evenly spread, in one vector; those of missing parameters are left out by `names`."""
    total = sum(gradient[name].numel() for name in names if name in gradient)
    step = math.ceil(max(total, 1) / SKETCHED)
    return torch.cat([gradient[name].flatten()[::step] for name in names if name in gradient])


def fitted_weights(parts: Tensor, whole: Tensor) -> tuple[Tensor, float]:
    """The weights with which the rows of `parts` sum up to `whole`, and the norm of what is left, relative to it."""
    # By a QR decomposition: the normal equations would square the condition number.
    weights = torch.linalg.lstsq(parts.T, whole[:, None], driver="gelsd").solution[:, 0]
    return weights, float((whole - weights @ parts).norm() / whole.norm())


@dataclass(frozen=True)
class Examples:
    """The gradients of single examples, beside that of the whole batch."""

    parts: Tensor
    """Each example's own gradient, one row each, as sketches."""
    weights: Tensor
    """The weights of the examples in the batch."""
    residual: float
    """The part of the batch's gradient that no weights explain."""
    bound: float
    """The largest residual that rounding explains."""
    tokens: Tensor | None
    """Trained tokens of each example; None if unknown."""
    lengths: Tensor | None

    @property
    def are_independent(self) -> bool:
        return self.residual <= self.bound

    @property
    def normalisation(self) -> str:
        """Name the sum that the batch's gradient is; empty if it is none of the usual ones."""
        n = len(self.weights)
        ones = torch.ones(n, dtype=torch.float64)
        cases = {"the mean over examples": ones / n, "the sum over examples": ones}
        if self.tokens is not None:
            cases = {"the mean over trained tokens": self.tokens / self.tokens.sum(), **cases}
        if self.lengths is not None:
            cases["the mean over all positions, padding included"] = self.lengths / (n * self.lengths.max())
        whole = self.weights @ self.parts
        for said, weights in cases.items():
            if float((weights @ self.parts - whole).norm() / whole.norm()) <= max(self.bound, 1e-6):
                return said
        return ""


def trained_tokens_of(examples: Sequence[Any]) -> Tensor | None:
    """Trained tokens of each example by its labels, of which the first is never a target."""
    counts = []
    for example in examples:
        labels = example.get("labels", example.get("input_ids")) if isinstance(example, Mapping) else None
        if labels is None:
            return None
        counts.append(float((torch.as_tensor(labels)[1:] != IGNORED).sum()))
    return torch.tensor(counts, dtype=torch.float64)


def lengths_of(examples: Sequence[Any]) -> Tensor | None:
    """Targets of each example, trained on or not."""
    lengths = [length_of(example) for example in examples]
    if any(each is None for each in lengths) or not all(isinstance(each, Mapping) for each in examples):
        return None
    return torch.tensor([float(each or 0) - 1 for each in lengths], dtype=torch.float64)


@dataclass(frozen=True)
class Cause:
    """An explanation of a difference."""

    said: str
    """The sentence, with the way out."""
    weights: tuple[float, ...] | None = None
    """The weights of the examples in this arrangement, relative to those of the reference."""


def cause_of(
    checked: Checked, arrangement: Arrangement, found: Gradient, names: Sequence[str], singles: Examples, bound: float
) -> Cause:
    """The likely cause of an arrangement's difference from the batch in one micro-batch."""
    whole = sketch(found, names)
    weights, residual = fitted_weights(singles.parts, whole)
    scale = float((weights.abs() * singles.parts.norm(dim=1)).sum() / whole.norm())
    relative = tuple((weights / singles.weights).tolist())
    if residual > bound * max(1.0, scale) and singles.are_independent:
        return Cause(_influence(checked, arrangement, singles.bound))
    if not singles.are_independent:
        return Cause("examples of a micro-batch influence each other: see 'each alone'")
    difference = (whole - singles.weights @ singles.parts).norm()
    rounding = float(bound * max(1.0, scale) * whole.norm() / difference)
    best, least = "", math.inf
    for said, predicted in _hypotheses(arrangement, weights, singles):
        left = float((whole - predicted @ singles.parts).norm() / difference)
        if left < least:
            best, least = said, left
        if left <= rounding:
            # The first hypothesis that explains all of it: the others are equivalent here.
            break
    if least > 1 - EXPLAINED:
        listed = ", ".join(f"{each:.3g}" for each in relative)
        best = f"examples weigh {listed} times what they weigh in one micro-batch: check what the loss is divided by"
    return Cause(best, relative)


def _hypotheses(arrangement: Arrangement, fitted: Tensor, singles: Examples) -> Iterator[tuple[str, Tensor]]:
    """Sentences, with the weights of examples that they predict."""
    usual, n = singles.weights, len(singles.weights)
    kinds = [("micro-batch", "micro-batches", arrangement.micro_batches)]
    if arrangement.ranks > 1:
        of_ranks = [
            tuple(each for batch in arrangement.micro_batches[rank :: arrangement.ranks] for each in batch)
            for rank in range(arrangement.ranks)
        ]
        kinds.insert(0, ("rank", "ranks", of_ranks))
    for one, several, groups in kinds:
        if len(groups) > 1:
            yield from _of_groups(one, several, groups, usual)
        if singles.lengths is not None:
            padded = torch.zeros(n, dtype=torch.float64)
            for group in groups:
                padded[list(group)] = len(group) * (singles.lengths[list(group)].max() + arrangement.padding)
            yield (
                "padding counts in the mean: divide by the tokens that are trained on, and not by all positions",
                singles.lengths / padded / len(groups),
            )
    factor = float((fitted * usual).sum() / (usual * usual).sum())
    yield (
        f"all examples have {factor:.4g} times the weight: the loss is divided by another number",
        usual * factor,
    )
    if singles.tokens is not None:
        mean = torch.full((n,), 1.0 / n, dtype=torch.float64)
        yield "examples weigh the same here, whatever their lengths: divide by trained tokens, as elsewhere", mean
        by_token = singles.tokens / singles.tokens.sum()
        yield "tokens weigh the same here, and examples elsewhere: divide by the number of examples", by_token


def _of_groups(one: str, several: str, groups: Sequence[Sequence[int]], usual: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The hypotheses about what each micro-batch or rank computes alone."""
    of_group = torch.zeros_like(usual)
    for group in groups:
        of_group[list(group)] = usual[list(group)].sum()
    n, divide = len(groups), "divide by the trained tokens of the whole batch, over all micro-batches and ranks"
    alone = usual.sum() * usual / of_group
    yield f"each {one} is averaged by itself, so that tokens of short ones weigh more: {divide}", alone / n
    yield f"the {several} are added up, each averaged by itself, and the gradient grows with them: {divide}", alone
    yield f"the {several} are added up, and not averaged: divide by their number, {n}", usual * n
    yield f"the loss is divided by the number of {several}, {n}, besides its own divisor: divide once", usual / n


def _influence(checked: Checked, arrangement: Arrangement, bound: float) -> str:
    """Why examples that share a row change each other, by probes on two of them."""
    general = "examples influence each other here: the gradient is not a sum of their own gradients"
    if not arrangement.packed:
        return f"{general}; padding may be seen, or statistics of the batch be used"
    pair = [each for each in checked.examples if isinstance(each, Mapping) and len(each.get("input_ids", ())) > 3][:2]
    if len(pair) < 2:
        return f"{general}: attention or positions may not be reset between the documents of a row"
    try:
        return _leak(checked, arrangement.alone([0, 1]), pair, bound) or f"{general}, which its probes do not show"
    except NapkinError:
        return f"{general}: attention or positions may not be reset between the documents of a row"


def _leak(checked: Checked, packed: Arrangement, pair: Sequence[Mapping[str, Any]], bound: float) -> str:
    """Find what passes from the first document of a row to the second."""

    def of(*rows: Mapping[str, Any], arranged: Arrangement = packed) -> Gradient:
        return checked.gradient(arranged, examples=rows)

    def differ(one: Gradient, other: Gradient) -> bool:
        names = [name for name in one if name in other]
        a, b = sketch(one, names), sketch(other, names)
        return not float((a - b).norm() / b.norm()) <= bound

    first, second = ({**row, "labels": list(row.get("labels", row["input_ids"]))} for row in pair)
    second["labels"][0] = IGNORED
    silent = {**first, "labels": [IGNORED] * len(first["labels"])}
    altered = {**silent, "input_ids": [*reversed(list(first["input_ids"]))]}
    beside = Arrangement("beside", (0, 1), 2, seed=packed.seed)
    # The program must use the labels of these rows, or the probes show nothing.
    if differ(of(silent, second, arranged=beside), of(second, arranged=beside.alone([0]))):
        return ""
    plain, after, after_other = of(second, arranged=beside.alone([0])), of(silent, second), of(altered, second)
    causes = []
    if differ(after, after_other):
        causes.append(
            "a document sees the ones before it in its row: attention is not reset between documents; give each its "
            "own block of the mask, or position ids that an attention of variable lengths reads"
        )
    elif differ(after, plain):
        causes.append("positions are not reset: those of a document in a row go on from the one before it; begin at 0")
    begins = {**second, "labels": [second["input_ids"][0]] + [IGNORED] * (len(second["labels"]) - 1)}
    boundary = of(silent, begins)
    values = sketch(boundary, list(boundary))
    if bool(values.isfinite().all()) and float(values.norm()) > 0:
        causes.append(
            "the last token of a document is trained to predict the first of the next: set each first label to -100"
        )
    return "; ".join(causes)
