"""One thing that is timed: a shape of a target, in a form, a precision and a pass, compiled or not, cold or warm.

A `Target` makes of each case a `Subject`, a module with its inputs, whose passes are timed; and a ledger, of which
`work_of` takes the FLOPs and bytes of a pass, and the least seconds that a machine needs for them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from napkin.accounting.counting import count
from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.pricing import computed_flops, price, roofs_of
from napkin.errors import NapkinError, suggestion
from napkin.hardware.ceilings import Ceilings
from napkin.hardware.sampling import Timed
from napkin.hardware.target import Target as CountTarget
from napkin.recipe.precision import Precision
from napkin.units import parse_bytes, parse_count

Shape = Mapping[str, int]
Pass = Literal["forward", "backward", "both", "step"]
"""A forward pass as in training, which keeps what the backward pass needs; that backward pass alone; both; both and
the update."""
LARGEST_DIMENSION = 2**40


@dataclass(frozen=True)
class Case:
    """One row of a table."""

    shape: Shape = field(hash=False)
    """All dimensions with their sizes."""
    form: str
    precision: Precision
    timed: Pass
    compiled: bool = False
    cold: bool = False

    @property
    def name(self) -> str:
        """The name of its form, and whether that is compiled."""
        return f"{self.form}+compiled" if self.compiled else self.form


@dataclass(frozen=True)
class Subject:
    """A module whose `forward(*inputs)` returns a tensor."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    step: Callable[[], object] | None = None
    """A whole training step, where it has an optimizer."""


class Target(ABC):
    """An operator or a module that can be timed."""

    dimensions: Sequence[str]
    named_sizes: Mapping[str, Mapping[str, Shape]] = {}
    """Dimensions whose values are names, which stand for several dimensions."""
    forms: Sequence[str]
    passes: Sequence[Pass]
    shapes: Sequence[Shape]
    """The shapes that are timed where none is named."""
    sweep: Sequence[Shape]

    @abstractmethod
    def whole(self, shape: Shape) -> dict[str, int]:
        """A shape with the dimensions that it does not name."""

    @abstractmethod
    def usual_forms(self, shape: Shape, precision: Precision) -> Sequence[str]:
        """The forms that are timed by default for a whole shape."""

    @abstractmethod
    def ledger(self, case: Case) -> Ledger:
        """The step of which a case is one pass, counted without allocating anything."""

    @abstractmethod
    def subject(self, case: Case) -> Subject:
        """The real thing, on the device of the case's precision."""


def read_shapes(
    texts: Sequence[str], dimensions: Iterable[str], named: Mapping[str, Mapping[str, Shape]] | None = None
) -> list[dict[str, int]]:
    """The dimensions that each text names, as numbers; counts may have prefixes, as in 64k.

    `named` has, for a dimension whose values are names, the dimensions that each name stands for:

    >>> read_shapes(["size=small,tokens=4k"], ["tokens", "d_model"], {"size": {"small": {"d_model": 768}}})
    [{'d_model': 768, 'tokens': 4000}]

    Raises NapkinError for a text that is none of these.
    """
    known, named, shapes = list(dimensions), named or {}, list[dict[str, int]]()
    for text in texts:
        shapes.append(shape := {})
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            name = name.replace("-", "_")
            if not equals:
                example = f"{known[0]}=64,{known[-1]}=128"
                raise NapkinError(f"--shapes '{text}' is not a shape: write dimensions as in {example}")
            if name in named:
                if value not in named[name]:
                    raise NapkinError(f"--shapes {name}='{value}' is not known: {suggestion(value, named[name])}")
                shape |= named[name][value]
                continue
            if name not in known:
                raise NapkinError(f"--shapes has no dimension '{name}': {suggestion(name, [*known, *named])}")
            try:
                shape[name] = parse_bytes(value) if name == "bytes" else parse_count(value)
            except NapkinError as error:
                raise NapkinError(f"--shapes {name}: {error}") from None
            if not 1 <= shape[name] <= LARGEST_DIMENSION:
                raise NapkinError(f"--shapes {name}={value} is out of range: use 1 to {LARGEST_DIMENSION}")
    return shapes


class Draw:
    """Draws inputs, the same for the same seed; those that are not ids are leaves that require gradients."""

    def __init__(self, device_type: str, dtype: torch.dtype) -> None:
        self.device_type, self.dtype = device_type, dtype
        # Not torch's own: a benchmark leaves the global random state as it is.
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator) * std
        return drawn.to(self.device_type, self.dtype).requires_grad_()

    def weight(self, *shape: int) -> Tensor:
        """A matrix whose products with normal numbers are normal: the standard deviation is 1/sqrt(last dimension)."""
        return self.normal(*shape, std=shape[-1] ** -0.5)

    def ids(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator).to(self.device_type)


def timed_pass(subject: Subject, which: Pass) -> Timed:
    """One pass as it is timed: before a backward pass alone, the forward pass is made and not timed."""
    if which == "step":
        assert subject.step is not None
        return Timed(subject.step)
    module, inputs = subject.module, subject.inputs
    if which == "forward":
        return Timed(lambda: module(*inputs))
    leaves = [each for each in (*module.parameters(), *inputs) if each.requires_grad]
    gradient = output_gradient(subject)
    outputs: list[Tensor] = []

    def prepare() -> None:
        for leaf in leaves:
            leaf.grad = None
        outputs[:] = [module(*inputs)]

    def backward() -> None:
        # The graph is freed with the last reference to its end, within the time, as in a step.
        outputs.pop().backward(gradient)

    def both() -> None:
        prepare()
        backward()

    return Timed(both) if which == "both" else Timed(backward, prepare)


def output_gradient(subject: Subject) -> Tensor:
    """The gradient that a backward pass begins with: ones, in memory of their own."""
    return torch.ones_like(subject.module(*subject.inputs)).contiguous().detach()


def count_passes(subject: Subject, target: CountTarget) -> Ledger:
    """The ledger of a forward and a backward pass; fake tensors stay fake.

    Raises NapkinError for what depends on values, as `napkin.count` does.
    """

    def passes(module: nn.Module, batch: Any) -> None:
        *inputs, gradient = batch
        module(*inputs).backward(gradient)
        for leaf in (*module.parameters(), *inputs):
            leaf.grad = None

    return count(subject.module, (*subject.inputs, output_gradient(subject)), passes, target=target)


@dataclass(frozen=True)
class Work:
    """FLOPs, bytes and memory of one call, as counted."""

    flops: int
    """FLOPs of contractions, recomputation included; of fused attention those of the pairs that its mask leaves."""
    bytes: int
    """Bytes that its operators read and write, each counted alone: more than fused code needs."""
    peak_bytes: int
    """Peak bytes of tensors; for a part of a step, those of the whole step."""
    roof_seconds: float
    """The longer of two times: FLOPs at the best rate of any product in their format, bytes at the bandwidth for arrays
    of the operators' sizes."""
    bound: Literal["FLOPs", "bytes"]
    """The larger of the two times."""
    planned_seconds: float
    """Seconds by the rooflines of its operators one after the other, each with the overhead of its call."""


def work_of(ledger: Ledger, timed: Pass, ceilings: Ceilings) -> Work:
    """The work of one pass of a counted step."""
    rows = tuple(row for row in ledger.rows if _TIMED[timed](row))
    roofs = roofs_of(rows, ceilings)
    arithmetic, moving = (sum(each) for each in zip((0.0, 0.0), *map(roofs.seconds, rows), strict=True))
    return Work(
        flops=round(sum(map(computed_flops, rows))),
        bytes=sum(row.bytes_read + row.bytes_written for row in rows),
        peak_bytes=ledger.peak_bytes,
        roof_seconds=max(arithmetic, moving),
        bound="FLOPs" if arithmetic >= moving else "bytes",
        planned_seconds=price(replace(ledger, rows=rows, timeline=()), ceilings).seconds,
    )


_TIMED: dict[Pass, Callable[[Row], bool]] = {
    "forward": lambda row: row.in_forward_pass,
    "backward": lambda row: not row.in_forward_pass and row.phase != "optimizer",
    "both": lambda row: row.phase != "optimizer",
    "step": lambda row: True,
}
