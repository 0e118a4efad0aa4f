"""The plan of a step on examples: counted on fake tensors in the shapes that a real batch has, priced like any
other."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.counting import count
from napkin.accounting.ledger import Ledger
from napkin.accounting.quantities import QuantityRow, QuantityTable
from napkin.accounting.rules import seconds_rule
from napkin.chats.token_sequence import Example
from napkin.model.config import ModelConfig
from napkin.planning.rules import step_flops_by_rule
from napkin.planning.step.longest_step import LongestStep
from napkin.planning.step.machine import Machine, Progress
from napkin.planning.step.run_plan import RULE_MFU, Plan
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import TrainState, build_train_state
from napkin.train_step.step_ledger import warm_up_of
from napkin.tuning.packing import Packing, SequenceMicroBatch, chunks_of, micro_batches_of
from napkin.tuning.sequence_step import (
    BatchTotals,
    Objective,
    TaughtObjective,
    examples_of_rank,
    loss_of_parts,
    refuse_divided_models,
    score_parts,
    totals_of,
    with_known_coefficients,
)

REFERENCE_TOKENS, REFERENCE_FLOPS, REFERENCE_SECONDS = (f"reference: {what}" for what in ("tokens", "FLOPs", "seconds"))
"""Rows in the plan of a run that scores all examples by a reference before its first step."""


LONGEST_STEP = "peak bytes, longest step"
"""The row of the step with the longest batch."""


@dataclass(frozen=True, repr=False)
class ExamplePlan(Plan):
    """The plan of a run that trains on examples."""

    tokens: int = 0
    """Tokens that a device trains on in a step, padding included."""
    scored_tokens: int = 0
    """Tokens that a device scores without gradients before that, padding included."""
    sequence_tokens: int = 0
    """The sum of both, without padding."""
    reference_tokens: int = 0
    """Tokens of the reference's pass over all examples before the first step, on all devices, without padding."""
    longest: LongestStep | None = None
    """The step that takes most memory; None if all steps are equal."""
    teacher: ModelConfig | None = None
    """The teacher that computes the tokens of a step too, without gradients; None where none does."""
    row_length: int = 0
    """Tokens of a row of the largest micro-batch; 0 is the context length."""

    @property
    def fits(self) -> bool:
        return super().fits and (self.longest is None or self.longest.fits)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the counted batch on all devices, each of which has about as many."""
        return (self.tokens + self.scored_tokens) * self.resolved.layout.batch_parts

    @property
    def rule_flops(self) -> float:
        """FLOPs of a step by the rule 6·N·T with attention; a third of it without gradients."""
        taught = 0.0 if self.teacher is None else step_flops_by_rule(self._by_rows(self.teacher), self.tokens / 3)
        return step_flops_by_rule(self._by_rows(self.recipe.model), self.tokens + self.scored_tokens / 3) + taught

    def _by_rows(self, model: ModelConfig) -> ModelConfig:
        """The model with a context as long as rows are: examples may be short beside what it could read."""
        return dataclasses.replace(model, context_length=self.row_length or model.context_length)

    @property
    def rule_seconds(self) -> float:
        return super().rule_seconds + seconds_rule(self._rule_reference_flops, self.site.matmul_peak, mfu=RULE_MFU)

    @property
    def seconds(self) -> float:
        return super().seconds + self.reference_seconds

    @property
    def _rule_reference_flops(self) -> float:
        return step_flops_by_rule(
            self._by_rows(self.recipe.model), self.reference_tokens / 3 / self.resolved.layout.batch_parts
        )

    @property
    def reference_flops(self) -> float:
        """FLOPs of the reference's pass on one device."""
        return self._of_reference * self.ledger.forward_flops

    @property
    def reference_seconds(self) -> float:
        """Seconds of the reference's pass; 0 without one."""
        forward = self.price.by_phase.get("forward")
        return 0.0 if forward is None else self._of_reference * forward.seconds

    @property
    def _of_reference(self) -> float:
        """The ratio of a device's tokens in the reference's pass to those in a step."""
        return self.reference_tokens / self.resolved.layout.batch_parts / max(self.sequence_tokens, 1)

    def table(self) -> QuantityTable:
        """The table of any plan, with rows for the reference's pass where there is one."""
        rows = list(super().table())
        if self.scored_tokens:
            rows = [_noted(row, "FLOPs per step", _SCORED_NOTE) for row in rows]
        if self.teacher is not None:
            rows = [_noted(row, "FLOPs per step", "the rule has 2·N·T for the teacher's forward pass") for row in rows]
            rows = [_noted(row, "peak bytes", "the teacher's weights included") for row in rows]
        if self.longest is not None and self.longest.is_counted:
            place = 1 + next(place for place, row in enumerate(rows) if row.quantity == "peak bytes")
            rows.insert(place, QuantityRow(LONGEST_STEP, "bytes", count=self.longest.peak_bytes, note=self._longest()))
        if not self.reference_tokens:
            return QuantityTable(rows)
        rule_flops = self._rule_reference_flops
        rule_seconds = seconds_rule(rule_flops, self.site.matmul_peak, mfu=RULE_MFU)
        rows = [_noted(row, "seconds in all", "the reference's log-probabilities included") for row in rows]
        note = "once, before the first step; tokens without padding, computed as those of a step's forward pass are"
        return QuantityTable(
            [
                *rows,
                QuantityRow(REFERENCE_TOKENS, "count", None, self.reference_tokens, note=note),
                QuantityRow(REFERENCE_FLOPS, "FLOP", rule_flops, self.reference_flops, note=note),
                QuantityRow(REFERENCE_SECONDS, "seconds", rule_seconds, self.reference_seconds, note=note),
            ]
        )

    def _longest(self) -> str:
        assert self.longest is not None
        return f"step {self.longest.number:,} of {self.longest.n_steps:,}: {self.longest.shape} at a time"


_SCORED_NOTE = "the rule has 2·N·T for the mismatched completions, which are computed without gradients"


def _noted(row: QuantityRow, quantity: str, note: str) -> QuantityRow:
    return dataclasses.replace(row, note=f"{row.note}; {note}") if row.quantity == quantity else row


def plan_examples(
    resolved: ResolvedRecipe,
    examples: Sequence[Example],
    objective: Objective,
    machine: Machine,
    progress: Progress,
    *,
    max_tokens: int,
    packing: Packing = "packed",
    scored: Sequence[Example] = (),
    reference_tokens: int = 0,
) -> ExamplePlan:
    """Plan steps on batches like this one; several ranks are planned as rank 0, which has as much as any.

    `scored` are examples that a step scores without gradients before it trains on `examples`; `reference_tokens` is the
    size of the reference's pass before the first step.
    """
    machine.prepare(resolved.recipe.training)
    progress("counting the step")
    refuse_divided_models(resolved.layout)
    settings = {"max_tokens": max_tokens, "row_length": resolved.recipe.model.context_length}
    own = examples_of_rank(examples, resolved.layout, 0)
    parts = micro_batches_of(own, **settings, packing=packing)
    own_scored = [examples_of_rank(chunk, resolved.layout, 0) for chunk in chunks_of(scored)]
    scored_parts = [part for each in own_scored for part in micro_batches_of(each, **settings, packing=packing)]
    ledger = count_examples(resolved, parts, totals_of(parts), objective, scored_parts)
    progress("measuring this machine, once")
    ceilings = machine.ceilings(resolved.precision)
    site = machine.site(resolved.precision, ceilings)
    # The overhead between operators is that of a probe run in the shape of the largest micro-batch.
    rows, length = max((part.rows.inputs.shape for part in parts), key=lambda shape: shape[0] * shape[1])
    alike = resolved.with_model(context_length=length).with_training(batch_size=rows, micro_batch_size=None)
    [price] = machine.price(dataclasses.replace(alike, world_size=1), [ledger], ceilings, progress)
    tokens, scored_tokens = (sum(part.rows.inputs.numel() for part in each) for each in (parts, scored_parts))
    sequence_tokens = sum(len(sequence.tokens) for example in [*own, *chain(*own_scored)] for sequence in example)
    return ExamplePlan(
        resolved,
        ledger,
        price,
        site,
        tokens=tokens,
        scored_tokens=scored_tokens,
        sequence_tokens=sequence_tokens,
        reference_tokens=reference_tokens,
        row_length=length,
    )


def count_examples(
    resolved: ResolvedRecipe,
    parts: Sequence[SequenceMicroBatch],
    totals: BatchTotals,
    objective: Objective,
    scored: Sequence[SequenceMicroBatch] = (),
) -> Ledger:
    """Count a step on micro-batches, in their shapes, in a single process; `scored` come before it, without
    gradients."""

    def step(train_state: TrainState, everything: Sequence[SequenceMicroBatch]) -> None:
        before, parts = everything[: len(scored)], everything[len(scored) :]
        score_parts(train_state.parallel_model, before, autocast=train_state.precision.autocast)
        train_state.step_on_sequences(0, [part.rows for part in parts], loss_of_parts(parts, objective, totals, {}))

    known = [*scored, *with_known_coefficients(parts, objective, totals)]
    if isinstance(objective, TaughtObjective):
        return count_parts(resolved, known, step, prepare=objective.attach)
    return count_parts(resolved, known, step)


def count_parts(
    resolved: ResolvedRecipe,
    parts: Sequence[SequenceMicroBatch],
    step: Callable[[TrainState, Sequence[SequenceMicroBatch]], None],
    *,
    updates: bool = True,
    prepare: Callable[[TrainState], None] = lambda train_state: None,
) -> Ledger:
    """Count any computation on micro-batches, in their shapes, in a single process; `updates` is whether it updates the
    model's weights. `prepare` adds fake tensors that are held besides."""
    alone = dataclasses.replace(resolved, precision=resolved.precision.on("cpu"), world_size=1)
    batch = [_tensors_of(part) for part in parts]
    with FakeTensorMode():
        train_state = build_train_state(alone)
        prepare(train_state)

    def counted(_: Any, fakes: list[dict[str, Any]]) -> None:
        step(train_state, [_with_tensors(*each) for each in zip(parts, fakes, strict=True)])

    warm_up = warm_up_of(dataclasses.replace(resolved, world_size=1), train_state) if updates else 0
    return count(train_state.model, batch, counted, target=resolved.counted_for, warm_up=warm_up)


def _tensors_of(part: SequenceMicroBatch) -> dict[str, Any]:
    rows = {field.name: getattr(part.rows, field.name) for field in dataclasses.fields(part.rows)}
    tensors = {name: value for name, value in rows.items() if isinstance(value, Tensor)}
    return {"rows": tensors, "sequence": part.sequence, "example": part.example, "values": dict(part.values)}


def _with_tensors(part: SequenceMicroBatch, tensors: dict[str, Any]) -> SequenceMicroBatch:
    rows = dataclasses.replace(part.rows, **tensors["rows"])
    return dataclasses.replace(part, **{**tensors, "rows": rows})
