"""The ledger of one training step: a row for each operator call.

A ledger comes from `count` (traced on fake tensors) or from `meter` (a real step). Plans, progress bars, reports and
tests read their figures from it, so that each figure has one formula only.

A row of a collective says which (`CollectiveCall`), and `component_of` what a call is for: the part of a model that it
belongs to, by the module that made it and by what it multiplies.
"""

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from napkin.accounting.quantities import Line, Summary, largest, with_calls, with_parts
from napkin.units import format_bytes, format_flops

METERED_STEP = 2
"""The first step creates the optimizer's state and the second warms caches: the third, number 2, is like all later."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One call of a collective, as one rank sees it."""

    operation: str
    """Name of the collective in `Interconnect.seconds`; besides these "receive", "broadcast", "scatter", "gather" and
    "reduce"."""
    data_bytes: int
    """Bytes of the whole tensor: what each rank has after an all-gather, before a reduce-scatter, before and after an
    all-reduce; what it gives to an all-to-all, or sends."""
    ranks: tuple[int, ...]
    """Ranks that take part; of a send, the sender and the receiver are among them."""
    peer: int | None = None
    """The other rank of a send or receive."""

    @property
    def group_size(self) -> int:
        return len(self.ranks)


# Modules are told apart by their names and classes, from the innermost to the outermost. The names are those of
# napkin's models, of torch's layers and of the Hugging Face library's.

Component = Literal[
    "embedding",
    "attention projections",
    "attention scores",
    "feed-forward",
    "norms",
    "head",
    "loss",
    "optimizer",
    "other",
]
"""Attention scores are the products of queries, keys and values, and everything between them: rotation, mask, softmax.
"Other" is residual sums, dropout and modules whose names do not tell."""

Word = tuple[str, str]
"""A module's name in its parent, and its class."""

_PARTS: tuple[tuple[Component, re.Pattern[str]], ...] = (
    ("norms", re.compile(r"norm|^ln(_|\d|$)|rms")),
    ("loss", re.compile(r"loss|criterion|entropy")),
    ("attention scores", re.compile(r"att(e)?n")),
    ("feed-forward", re.compile(r"mlp|ffn|feed_?forward|expert|moe|swiglu|router|intermediate")),
    ("head", re.compile(r"head$|^unembed|^classifier$|^score$")),
    ("embedding", re.compile(r"emb|^wte$|^wpe$|^(tokens|positions)$")),
)
_PROJECTIONS: tuple[tuple[Component, re.Pattern[str]], ...] = (
    (
        "attention projections",
        re.compile(r"^(qkv|query|key|value|out|output|[qkvo])(_?proj)?$|^query_key_value$"),
    ),
    ("feed-forward", re.compile(r"^(up|down|gate|fc\d?|linear\d|w[123]|gate_up)(_?proj)?$")),
)


def component_of(words: Sequence[Word], *, contraction: bool, of_activations: bool, after_head: bool) -> Component:
    """The component of a call of the forward pass.

    Args:
        words: of the modules that it runs in, the innermost first; none outside of all modules.
        contraction: whether it is one.
        of_activations: whether it multiplies activations alone.
        after_head: whether the head has run.
    """
    part = _part_of(words)
    if of_activations:
        return "feed-forward" if part == "feed-forward" else "attention scores"
    if part == "attention scores":
        return "attention projections" if contraction or "linear" in words[0][1].lower() else part
    if part != "other":
        return part
    if after_head:
        # A fused loss multiplies by the head's matrix again for its gradient.
        return "head" if contraction else "loss"
    # A model's own product with a parameter, outside of its layers, is the one with its output matrix.
    return "head" if contraction and len(words) <= 1 else "other"


def _part_of(words: Sequence[Word]) -> Component:
    for name, kind in words:
        for part, pattern in _PROJECTIONS if "linear" in kind.lower() else ():
            if pattern.search(name.lower()):
                return part
        for part, pattern in _PARTS:
            if pattern.search(name.lower()) or (name and pattern.search(kind.lower())):
                return part
    return "other"


Phase = Literal["forward", "backward", "recompute", "optimizer"]
Category = Literal[
    "parameters", "gradients", "optimizer state", "weight copies", "activations", "inputs", "temporaries"
]
"""The purpose of a storage; weight copies are what autocast makes of the parameters in a narrower format."""
STATE: tuple[Category, ...] = ("parameters", "gradients", "optimizer state")


@dataclass(frozen=True, slots=True)
class Row:
    """One call of one operator.

    FLOPs are those of contractions (matrix products, attention, convolutions): a multiply and an add are two.
    Elementwise work, which is bound by bytes, has a column of its own and is in no other sum.
    """

    module: str
    """Path of the innermost module whose forward pass made the call; "" outside of any module."""
    phase: Phase
    operator: str
    format: str
    """Number format of a contraction's inputs, or of another operator's output: "bf16", "fp32", ..."""
    flops: int
    """FLOPs of the contraction; attention counted over all query-key pairs, recomputation left out."""
    causal_flops: int
    """FLOPs over the pairs that a causal mask leaves; equal to `flops` without a mask."""
    recomputed_flops: int
    """FLOPs that recompute what an earlier operator computed (in flash attention's backward pass)."""
    contraction: tuple[int, int, int, int] | None
    """(batch, m, n, k): `batch` products of [m, k] and [k, n]; None for other operators."""
    bytes_read: int
    bytes_written: int
    bytes_allocated: int
    """Bytes of the storages that the call created."""
    bytes_kept: int
    """Bytes of its storages that the forward pass keeps for the backward pass."""
    elementwise_flops: int = 0
    """One for each element of the largest operand or result, for operators that compute but are not contractions."""
    component: Component = "other"
    """The part of the model that the call belongs to; a gradient belongs to the part that it is the gradient of."""
    of_activations: bool = False
    """True if a contraction multiplies activations, no parameter among its factors, as attention does; or is the
    gradient of one that does."""
    early: bool = False
    """True if the forward pass computes it although it is a gradient, as a fused loss does."""
    hides_scratch: bool = False
    """True if the call takes scratch of unknown size."""
    collective: CollectiveCall | None = None
    """The collective that the call sends to other ranks or receives from them; None for what computes."""
    call: Hashable = field(default=None, repr=False)
    """The operator and its arguments, for `time_operators` to repeat; None if the call cannot be repeated."""

    @property
    def in_forward_pass(self) -> bool:
        """True if the call is made during the forward pass, what it computes of the backward pass included."""
        return self.phase == "forward" or self.early

    @property
    def is_fused_attention(self) -> bool:
        """True if one kernel computes scores, softmax and their products with values, and skips what a mask hides."""
        return self.operator.startswith(("_scaled_dot_product_", "flash_attention", "compiled_attention"))


class Moment(NamedTuple):
    """The memory that was in use at one moment of a step."""

    row: int
    """Number of the row that ran."""
    bytes_alive: int
    state_bytes: int
    """Bytes of the peak in parameters, gradients and optimizer state: what can be sharded."""
    weight_copy_bytes: int
    """Bytes of the peak in weight copies, which sharding makes anew for each layer while it runs."""
    gradient_bytes: int = 0
    """Bytes of the state that are gradients."""
    activation_bytes: int = 0
    """Bytes of the peak that the forward pass keeps for the backward pass."""


Column = Literal["module", "phase", "operator", "format", "component"]
SUMS = ("flops", "elementwise_flops", "bytes_read", "bytes_written", "bytes_allocated", "bytes_kept")
"""The figures of a row that `Ledger.sums_by` sums."""


def numbered_alike(module: str) -> str:
    """A module's path with its numbers left out: "blocks.*.attention"."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module)


@dataclass(frozen=True, repr=False)
class Ledger(Summary):
    """The operator calls of a step, and the memory that was in use while they ran."""

    rows: tuple[Row, ...]
    parameters: int
    """Number of parameters; shared ones count once."""
    peak_bytes: int
    """Largest number of bytes in tensors at one time. For a CUDA device, in blocks of the caching allocator, with
    scratch and cuBLAS's workspaces: what torch.cuda.max_memory_allocated reports."""
    resident_bytes: int
    """Bytes in tensors before the step begins: parameters, optimizer state, all that stays from step to step."""
    peak_by_category: dict[Category, int]
    """Bytes in tensors at the peak; adds up to `peak_bytes`."""
    timeline: tuple[Moment, ...] = field(repr=False)
    """For each row that allocated or freed memory, its moment of most bytes."""
    unknown_operators: dict[str, int]
    """Calls of operators without a formula: their FLOPs are missing from every sum."""
    reserved_bytes: int | None = None
    """For a CUDA device, what torch's caching allocator has reserved by the end of the step, earlier steps included:
    what torch.cuda.max_memory_reserved reports. None on a CPU, whose allocator keeps nothing."""
    watch_bytes: int = 0
    """Bytes that recording the step added to its peak; left out of `peak_bytes`."""
    unknown_scratch: dict[str, int] = field(default_factory=dict)
    """Calls of operators whose scratch could not be measured, or depends on values that a trace does not have: it may
    be missing from the peak."""
    source: Literal["trace", "run"] = "trace"
    """True if the step was traced on fake tensors, or ran."""
    assumption: str = ""
    """The assumption of a trace about values that it does not have."""
    trained_bytes: int = 0
    """Bytes of the parameters that have gradients."""
    frozen_bytes: int = 0
    """Bytes of the parameters that have none."""

    # The training loop reads it in each step.
    @cached_property
    def flops(self) -> int:
        """FLOPs of the step; recomputation left out (the F in MFU), attention over all pairs."""
        return sum(row.flops for row in self.rows if row.phase != "recompute")

    @property
    def hardware_flops(self) -> int:
        """FLOPs of the step, recomputation counted (the F in HFU), attention over all pairs."""
        return sum(row.flops + row.recomputed_flops for row in self.rows)

    @property
    def causal_flops(self) -> int:
        """FLOPs of the step over the query-key pairs that causal masks leave; recomputation left out."""
        return sum(row.causal_flops for row in self.rows if row.phase != "recompute")

    @property
    def attention_flops(self) -> int:
        """FLOPs of products of activations, which 6·N·T leaves out; recomputation left out, over all pairs."""
        return sum(row.flops for row in self.rows if row.of_activations and row.phase != "recompute")

    @property
    def forward_flops(self) -> int:
        return self.flops_by("phase").get("forward", 0)

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward pass; recomputation left out."""
        return self.flops_by("phase").get("backward", 0)

    @property
    def elementwise_flops(self) -> int:
        """FLOPs of elementwise work, one per element, recomputation left out; not in `flops`."""
        return sum(row.elementwise_flops for row in self.rows if row.phase != "recompute")

    @property
    def kept_bytes(self) -> int:
        """Bytes that the forward pass keeps for the backward pass."""
        return sum(row.bytes_kept for row in self.rows)

    def summary(self) -> Iterator[Line]:
        contractions = sum(row.contraction is not None for row in self.rows)
        rows = f"{len(self.rows):,} operator calls, {contractions:,} of them contractions"
        how = " of a step that ran" if self.source == "run" else ""
        yield "Ledger", f"{self.parameters:,} parameters; {rows}{how}"
        if self.assumption:
            yield "assumed", self.assumption
        phases = [(phase, flops) for phase, flops in self.flops_by("phase").items() if phase != "recompute"]
        parts = largest([*phases, ("recomputed, not in the sum", self.hardware_flops - self.flops)])
        yield "FLOPs", with_parts(self.flops, parts, format_flops)
        if self.elementwise_flops:
            yield "elementwise", f"{format_flops(self.elementwise_flops)}, one per element, not in the sum"
        yield "peak bytes", with_parts(self.peak_bytes, largest(self.peak_by_category.items()), format_bytes)
        if self.reserved_bytes is not None:
            yield "reserved bytes", format_bytes(self.reserved_bytes)
        if self.unknown_operators:
            yield "unknown operators", with_calls(self.unknown_operators) + ": their FLOPs are missing"
        if self.unknown_scratch:
            yield (
                "unknown scratch",
                with_calls(self.unknown_scratch)
                + ": what their kernels take for a moment may be missing from the peak",
            )

    def flops_by(self, column: Column) -> dict[str, int]:
        """FLOPs summed by the values of `column`, largest first."""
        sums: Counter[str] = Counter()
        for row in self.rows:
            sums[getattr(row, column)] += row.flops
        return dict(sums.most_common())

    def sums_by(self, column: Column, *, alike: bool = False) -> dict[str, dict[str, int]]:
        """Calls, FLOPs and bytes (`SUMS`) of the rows by the values of `column`, most FLOPs first.

        With `alike`, modules whose paths differ by a number alone are one row: "38 × blocks.*.feed_forward".
        """
        names = {getattr(row, column) for row in self.rows}
        shown = {name: name for name in names}
        if alike and column == "module":
            counts = Counter(map(numbered_alike, names))
            paths = {name: numbered_alike(name) for name in names}
            shown = {name: f"{counts[path]} × {path}" if counts[path] > 1 else name for name, path in paths.items()}
        sums: dict[str, dict[str, int]] = {name: {"calls": 0, **dict.fromkeys(SUMS, 0)} for name in shown.values()}
        for row in self.rows:
            into = sums[shown[getattr(row, column)]]
            into["calls"] += 1
            for name in SUMS:
                into[name] += getattr(row, name)
        return dict(sorted(sums.items(), key=lambda item: (-item[1]["flops"], -item[1]["bytes_written"])))

    def with_more_micro_batches(self, times: int) -> "Ledger":
        """The ledger of the same step with `times` more micro-batches, each like the last but one.

        The first has no gradients to add to, and with the last, gradients may be sent to other ranks: three are enough
        to extrapolate from. The whole batch must have its final size here already. Raises ValueError if this ledger has
        too few micro-batches.
        """
        ends = max((number for number, row in enumerate(self.rows) if row.phase == "backward"), default=0)
        begins = [
            number
            for number, (before, row) in enumerate(pairwise(self.rows[:ends]), start=1)
            if row.in_forward_pass and not before.in_forward_pass and before.phase != "optimizer"
        ]
        if len(begins) < 2:
            raise ValueError("there are too few micro-batches in this ledger to extrapolate from: trace three")
        begin, end = begins[-2:]
        length = end - begin
        timeline = [
            moment._replace(row=moment.row + length * (times if moment.row >= end else again))
            for moment in self.timeline
            for again in range(times + 1 if begin <= moment.row < end else 1)
        ]
        hiding = Counter(row.operator for row in self.rows[begin:end] if row.hides_scratch)
        return replace(
            self,
            rows=(*self.rows[:end], *(self.rows[begin:end] * times), *self.rows[end:]),
            unknown_scratch={name: calls + times * hiding[name] for name, calls in self.unknown_scratch.items()},
            timeline=tuple(sorted(timeline)),
        )
