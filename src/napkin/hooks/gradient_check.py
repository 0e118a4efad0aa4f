"""`check`: compares the gradients of one batch in all arrangements that must not change it.

The same examples are computed in one micro-batch, in another order, with more padding, in several micro-batches, packed
and on several ranks. The effect of rounding is measured: weights are moved at random by one unit of the coarsest format
in which the step computes; the change of the gradient, times the root of the longest sum, is the bound below which a
difference counts as rounding. Above it, `difference_causes` says why.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, no_type_check

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from napkin.accounting.quantities import Line, Summary
from napkin.errors import NapkinError, suggestion
from napkin.hooks.checked_program import Arrangement, Checked, Gradient, NotOffered
from napkin.hooks.difference_causes import (
    Examples,
    cause_of,
    fitted_weights,
    lengths_of,
    sketch,
    trained_tokens_of,
)
from napkin.hooks.fake_step import random_states_kept
from napkin.hooks.program_doors import load_program, name_of, open_program
from napkin.units import format_share

KINDS = ("again", "alone", "permuted", "padding", "micro-batches", "packed", "ranks")
"""The arrangements that are compared with one micro-batch, by what they change."""
NUDGES = 3
SHOWN_PARAMETERS = 5
FEWEST_EXAMPLES, MOST_EXAMPLES = 4, 64


@dataclass(frozen=True)
class ArrangementResult:
    """The gradient of one arrangement beside that of one micro-batch."""

    name: str
    difference: float
    """The norm of the difference, relative to the norm of the gradient."""
    bound: float
    """The largest difference that rounding explains."""
    factor: float
    """The gradient as a multiple of the other, as far as it points the same way."""
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Relative differences of the parameters that differ most."""
    cause: str = ""
    weights: tuple[float, ...] | None = None
    """The weights of the examples, relative to those in one micro-batch; None where no weights explain the gradient."""

    @property
    def differs(self) -> bool:
        return not self.difference <= self.bound


@dataclass(frozen=True, repr=False)
class GradientCheck(Summary):
    """The outcome of `check`."""

    results: tuple[ArrangementResult, ...]
    not_offered: Mapping[str, str]
    """Arrangements that were not checked, and why."""
    examples: int
    normalisation: str
    """The unit over which a micro-batch's gradient is a mean, if it is one of the usual ones."""
    number_format: str
    """The coarsest format in which the step computes."""
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """True if the gradient is the same in all arrangements, up to rounding."""
        return not any(result.differs for result in self.results)

    @property
    def causes(self) -> tuple[str, ...]:
        """A sentence for each arrangement that differs."""
        return tuple(
            f"{result.name}: the gradient is {result.factor:.4g} × that of one micro-batch, and "
            f"{format_share(result.difference)} away from it: {result.cause}"
            for result in self.results
            if result.differs
        )

    def summary(self) -> Iterator[Line]:
        differing = sum(result.differs for result in self.results)
        said = f"{differing} of {len(self.results)} arrangements differ" if differing else "the gradient is the same"
        yield "GradientCheck", f"{said}, {self.examples} examples"
        for result in self.results:
            yield result.name, f"{result.difference:.1e} (rounding {result.bound:.1e}) {result.cause}".rstrip()

    def as_values(self) -> dict[str, Any]:
        """The outcome for programs, as JSON has it."""
        return {
            "equal": self.equal,
            "examples": self.examples,
            "normalisation": self.normalisation,
            "number_format": self.number_format,
            "arrangements": [
                {
                    "name": result.name,
                    "differs": result.differs,
                    "difference": result.difference,
                    "bound": result.bound,
                    "factor": result.factor,
                    "parameters": dict(result.parameters),
                    "cause": result.cause,
                    "weights": result.weights,
                }
                for result in self.results
            ],
            "not_offered": dict(self.not_offered),
            "notes": list(self.notes),
        }


def check(
    program: Any,
    *,
    examples: int = 8,
    ranks: int = 2,
    arrangements: Sequence[str] = (),
    without_dropout: bool = False,
    progress: Callable[[str], None] = lambda doing: None,
) -> GradientCheck:
    """Compare the gradient of one batch in every arrangement that must not change it.

    Args:
        program: FILE.py or FILE.py:NAME, a module, a class or an object with `build()` and `loss(model, batch)` or
            `gradients(model, examples, arrangement)`, or a function `trainer(**arguments)` that returns a `Trainer`.
        examples: how many are compared, a multiple of 4.
        ranks: processes of this machine, with gloo; 1 leaves them out.
        arrangements: some of `KINDS`; all by default.
        without_dropout: whether all dropout is set to 0 first; otherwise a step that draws at random differs.
        progress: called with what is being computed.

    Raises NapkinError for a program that cannot be run.
    """
    for kind in arrangements:
        if kind not in KINDS:
            raise NapkinError(f"there is no arrangement '{kind}': {suggestion(kind, KINDS)}")
    if examples % 4 or not FEWEST_EXAMPLES <= examples <= MOST_EXAMPLES:
        raise NapkinError(
            f"{examples} examples cannot be divided evenly: use a multiple of 4 from {FEWEST_EXAMPLES} to "
            f"{MOST_EXAMPLES}"
        )
    if ranks < 1 or examples % ranks:
        raise NapkinError(f"{examples} examples cannot be divided among {ranks} ranks: use a divisor of {examples}")
    with random_states_kept():
        named = name_of(program)
        checked = open_program(load_program(program) if isinstance(program, str) else program, examples)
        return _Check(checked, named, ranks, arrangements or KINDS, progress).run(without_dropout)


class _Check:
    def __init__(
        self,
        checked: Checked,
        named: str | None,
        ranks: int,
        kinds: Sequence[str],
        progress: Callable[[str], None],
    ) -> None:
        self.checked, self.named, self.ranks, self.kinds, self.progress = checked, named, ranks, kinds, progress
        n = len(checked.examples)
        self.one = Arrangement("one micro-batch", tuple(range(n)), n)
        self.results: list[ArrangementResult] = []
        self.not_offered: dict[str, str] = {}
        self.notes: list[str] = []
        self.without_dropout = False
        self._singles: Examples | None = None

    def run(self, without_dropout: bool) -> GradientCheck:
        checked = self.checked
        if without_dropout:
            self._remove_dropout()
        self._measure()
        if "again" in self.kinds or self.results:
            self._again()
        for arrangement in self._arrangements():
            self.progress(arrangement.name)
            try:
                gradient = checked.gradient(arrangement)
            except NotOffered as why:
                self.not_offered[arrangement.name] = str(why)
            else:
                self.results.append(self._compared(arrangement, gradient))
        if "ranks" in self.kinds and self.ranks > 1:
            self._compare_ranks()
        lengths = lengths_of(checked.examples)
        if lengths is not None and len(set(lengths.tolist())) == 1:
            self.notes.append("all examples have one length: what depends on lengths does not show")
        if "alone" in self.kinds:
            self._alone()
        return GradientCheck(
            tuple(self.results),
            self.not_offered,
            len(checked.examples),
            self.singles.normalisation if self._singles is not None and self._singles.are_independent else "",
            self.number_format,
            tuple(self.notes),
        )

    def _arrangements(self) -> Iterator[Arrangement]:
        n, checked, order = len(self.checked.examples), self.checked, self.one.order
        if "permuted" in self.kinds:
            shuffled = (*order[1::2], *reversed(order[::2]))
            yield Arrangement("permuted", shuffled, n)
        if "padding" in self.kinds and checked.can_pad:
            yield Arrangement("more padding", order, n, padding=5)
        if "micro-batches" in self.kinds:
            yield Arrangement(f"{n // 2} micro-batches of 2", order, 2)
            yield Arrangement(f"{n} micro-batches of 1", order, 1)
        if "packed" in self.kinds:
            for packing in checked.packings:
                yield Arrangement(packing, order, n, packed=True, packing=packing)

    def _measure(self) -> None:
        """The gradient of one micro-batch, and the effect of rounding on it."""
        self.progress("one micro-batch")
        formats = _Formats()
        with formats:
            self.reference = self.checked.gradient(self.one)
        self.number_format = str(formats.coarsest).removeprefix("torch.")
        self.names = [name for name, each in self.reference.items() if bool((each != 0).any())]
        norm = _norm(self.reference, self.names)
        if not self.names or not math.isfinite(norm):
            what = "0" if not self.names else "not a number"
            raise NapkinError(f"the gradient of {len(self.checked.examples)} examples is {what}: train on some tokens")
        self.norm = norm
        unit = torch.finfo(formats.coarsest).eps / 2
        self.progress("what rounding does")
        noise = 0.0
        for seed in range(NUDGES):
            nudged = self.checked.gradient(self.one, nudge=(unit, seed))
            noise = max(noise, self._distance(nudged))
        # Roundings of a sum of n terms add up like a random walk of n steps.
        self.bound = max(noise, unit) * math.sqrt(formats.longest)

    def _again(self) -> None:
        self.progress("the same again")
        other_seed = Arrangement("the same again", self.one.order, self.one.micro_batch_size, seed=1)
        gradient = self.checked.gradient(other_seed)
        difference = self._distance(gradient)
        cause = ""
        if not difference <= self.bound:
            where = self._remove_dropout()
            if where:
                listed = ", ".join(where[:3]) + (f" and {len(where) - 3} others" if len(where) > 3 else "")
                cause = f"dropout is on ({listed}): the step draws at random; what follows is compared without it"
                self._measure()
            else:
                cause = "the step is random, and not because of the model's dropout: look for what it samples"
            self._add("the same again", difference, gradient, cause)
            return
        self._add("the same again", difference, gradient)

    def _remove_dropout(self) -> list[str]:
        self.without_dropout = True
        return self.checked.remove_dropout()

    def _alone(self) -> None:
        singles = self.singles
        cause = ""
        if not singles.are_independent:
            cause = (
                "examples of a micro-batch influence each other: its gradient is no weighted sum of theirs; padding is "
                "seen, or the loss uses statistics of the batch"
            )
        self.results.insert(
            1 if self.results and self.results[0].name == "the same again" else 0,
            ArrangementResult("each alone", singles.residual, singles.bound, 1.0, cause=cause),
        )

    def _compare_ranks(self) -> None:
        ranks, order = self.ranks, self.one.order
        size = len(order) // ranks
        arranged = [Arrangement(f"{ranks} ranks", order, size, ranks=ranks)]
        if size % 2 == 0:
            arranged.append(Arrangement(f"{ranks} ranks, 2 micro-batches each", order, size // 2, ranks=ranks))
        if self.named is None:
            self.not_offered[arranged[0].name] = "no other process can find the program: name it as FILE.py:NAME"
            return
        if self.checked.on_cuda:
            self.not_offered[arranged[0].name] = "ranks compute on the CPU, and the model is on a GPU: hide the GPU"
            return
        from napkin.hooks.checked_ranks import gradients_on_ranks

        self.progress(arranged[0].name)
        found = gradients_on_ranks(self.checked, self.named, arranged, without_dropout=self.without_dropout)
        self.results += [self._compared(each, gradient) for each, gradient in zip(arranged, found, strict=True)]

    def _compared(self, arrangement: Arrangement, found: Gradient) -> ArrangementResult:
        difference = self._distance(found)
        if difference <= self.bound:
            return self._result(arrangement.name, difference, found)
        if not math.isfinite(difference):
            return self._result(arrangement.name, difference, found, "the gradient is not a number here")
        self.progress(f"why '{arrangement.name}' differs")
        cause = cause_of(self.checked, arrangement, found, self.names, self.singles, self.bound)
        return self._result(arrangement.name, difference, found, cause.said, cause.weights)

    @property
    def singles(self) -> Examples:
        """The gradients of single examples, computed when they are first needed."""
        if self._singles is None:
            self.progress("each example alone")
            parts, kept = [], self.names
            for number in self.one.order:
                alone = self.checked.gradient(self.one.alone([number]))
                full = {name: alone.get(name, torch.zeros_like(self.reference[name])) for name in kept}
                parts.append(torch.nan_to_num(sketch(full, kept)))
            stacked, whole = torch.stack(parts), sketch(self.reference, kept)
            weights, residual = fitted_weights(stacked, whole)
            scale = float((weights.abs() * stacked.norm(dim=1)).sum() / whole.norm())
            examples = self.checked.examples
            self._singles = Examples(
                stacked,
                weights,
                residual,
                self.bound * max(1.0, scale),
                trained_tokens_of(examples),
                lengths_of(examples),
            )
        return self._singles

    def _add(self, name: str, difference: float, found: Gradient, cause: str = "") -> None:
        self.results.append(self._result(name, difference, found, cause))

    def _result(
        self,
        name: str,
        difference: float,
        found: Gradient,
        cause: str = "",
        weights: tuple[float, ...] | None = None,
    ) -> ArrangementResult:
        along = sum(float((found[each] * self.reference[each]).sum()) for each in self.names if each in found)
        differences = {
            each: float((found[each] - self.reference[each]).norm() / self.reference[each].norm())
            for each in self.names
            if each in found
        }
        largest = sorted(differences, key=lambda each: -differences[each])[:SHOWN_PARAMETERS]
        return ArrangementResult(
            name,
            difference,
            self.bound,
            along / self.norm**2,
            {each: differences[each] for each in largest},
            cause,
            weights,
        )

    def _distance(self, found: Gradient) -> float:
        """The norm of a gradient's difference from the reference, relative to the norm of that."""
        names = [*self.names, *(name for name in found if name not in self.reference)]
        squares = 0.0
        for name in names:
            one, other = found.get(name), self.reference.get(name)
            each = one if other is None else (other if one is None else one - other)
            assert each is not None
            squares += float(each.square().sum())
        return math.sqrt(squares) / self.norm if math.isfinite(squares) else math.inf


def _norm(gradient: Gradient, names: Sequence[str]) -> float:
    return math.sqrt(sum(float(gradient[name].square().sum()) for name in names))


# Runs for every operator of a step: the type checks that are on during tests would take half of their time.
@no_type_check
class _Formats(TorchDispatchMode):
    """The coarsest number format in which a step computes, and its longest dimension, over which it may sum."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest = torch.float64
        self.longest = 1

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point and leaf.numel() > 1:
                self.longest = max(self.longest, *leaf.shape)
                if torch.finfo(leaf.dtype).eps > torch.finfo(self.coarsest).eps:
                    self.coarsest = leaf.dtype
        return result
