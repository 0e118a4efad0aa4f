"""The plan of a step on units: counted on fake tensors in the shapes that a real batch has, priced like any other."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.counting import count
from napkin.accounting.ledger import Ledger
from napkin.alignment.objective import BatchTotals, Objective, totals_of
from napkin.alignment.sequence_packing import Arrangement, SequenceMicroBatch, micro_batches_of
from napkin.alignment.sequence_step import loss_of_parts, refuse_divided_models, units_of_rank, with_known_coefficients
from napkin.alignment.token_sequence import Unit
from napkin.planning.machine import Machine, Progress
from napkin.planning.run_plan import Plan
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import TrainState, build_train_state


@dataclass(frozen=True, repr=False)
class UnitPlan(Plan):
    """The plan of a run whose steps are on units."""

    tokens: int = 0
    """Tokens that a step computes, padding included."""

    @property
    def tokens_per_step(self) -> int:
        """Of the batch that was counted."""
        return self.tokens


def plan_units(
    resolved: ResolvedRecipe,
    units: Sequence[Unit],
    objective: Objective,
    machine: Machine,
    progress: Progress,
    *,
    max_tokens: int,
    arrangement: Arrangement = "packed",
) -> UnitPlan:
    """The plan of steps on batches like this one; several ranks are planned as rank 0, which has as much as any."""
    machine.prepare(resolved.recipe.training)
    progress("counting the step")
    refuse_divided_models(resolved.layout)
    settings = {"max_tokens": max_tokens, "row_length": resolved.recipe.model.context_length}
    parts = micro_batches_of(units_of_rank(units, resolved.layout, 0), **settings, arrangement=arrangement)
    ledger = count_units(resolved, parts, totals_of(parts), objective)
    progress("measuring this machine, once")
    ceilings = machine.ceilings(resolved.precision)
    site = machine.site(resolved.precision, ceilings)
    # The overhead between operators is that of a probe run in the shape of the largest micro-batch.
    rows, length = max((part.rows.inputs.shape for part in parts), key=lambda shape: shape[0] * shape[1])
    alike = resolved.with_model(context_length=length).with_training(batch_size=rows, micro_batch_size=None)
    [price] = machine.price(dataclasses.replace(alike, world_size=1), [ledger], ceilings, progress)
    tokens = sum(part.rows.inputs.numel() for part in parts)
    return UnitPlan(resolved, ledger, price, site, tokens=tokens)


def count_units(
    resolved: ResolvedRecipe, parts: Sequence[SequenceMicroBatch], totals: BatchTotals, objective: Objective
) -> Ledger:
    """The ledger of a step on micro-batches, in their shapes, in a single process."""

    def step(train_state: TrainState, parts: Sequence[SequenceMicroBatch]) -> None:
        train_state.step_on_sequences(0, [part.rows for part in parts], loss_of_parts(parts, objective, totals, {}))

    return count_parts(resolved, with_known_coefficients(parts, objective, totals), step)


def count_parts(
    resolved: ResolvedRecipe,
    parts: Sequence[SequenceMicroBatch],
    step: Callable[[TrainState, Sequence[SequenceMicroBatch]], None],
) -> Ledger:
    """The ledger of anything that is computed on micro-batches, in their shapes, in a single process."""
    alone = dataclasses.replace(resolved, precision=resolved.precision.on("cpu"), world_size=1)
    batch = [_tensors_of(part) for part in parts]
    with FakeTensorMode():
        train_state = build_train_state(alone)

    def counted(_: Any, fakes: list[dict[str, Any]]) -> None:
        step(train_state, [_with_tensors(*each) for each in zip(parts, fakes, strict=True)])

    return count(train_state.model, batch, counted, target=resolved.counted_for)


def _tensors_of(part: SequenceMicroBatch) -> dict[str, Any]:
    rows = {field.name: getattr(part.rows, field.name) for field in dataclasses.fields(part.rows)}
    tensors = {name: value for name, value in rows.items() if isinstance(value, Tensor)}
    return {"rows": tensors, "sequence": part.sequence, "unit": part.unit, "values": dict(part.values)}


def _with_tensors(part: SequenceMicroBatch, tensors: dict[str, Any]) -> SequenceMicroBatch:
    rows = dataclasses.replace(part.rows, **tensors["rows"])
    return dataclasses.replace(part, **{**tensors, "rows": rows})
