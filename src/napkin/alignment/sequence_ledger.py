"""The ledger of a step on a batch of units: the step itself, traced on fake tensors."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.counting import count
from napkin.accounting.ledger import Ledger
from napkin.alignment.objective import BatchTotals, Objective, WeightedLogProbabilities
from napkin.alignment.sequence_packing import Arrangement, SequenceMicroBatch, micro_batches_of
from napkin.alignment.sequence_step import loss_of_parts, refuse_divided_models, units_of_rank
from napkin.alignment.token_sequence import Unit
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.step import build_train_state
from napkin.train_step.step_ledger import as_rank


def count_step_on_units(
    resolved: ResolvedRecipe,
    units: Sequence[Unit],
    objective: Objective,
    *,
    max_tokens: int,
    arrangement: Arrangement = "packed",
    rank: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Ledger:
    """The ledger of `train_on_units` on one rank: of a batch like this one, whose tokens and values do not matter.

    All micro-batches are traced, since each has its own shape. Raises NapkinError as `train_on_units` does.
    """
    layout = resolved.layout
    refuse_divided_models(layout)

    def parts_of(rank: int, at_least: int = 1) -> list[SequenceMicroBatch]:
        own = units_of_rank(units, layout, rank)
        context_length = resolved.recipe.model.context_length
        return micro_batches_of(
            own, max_tokens=max_tokens, row_length=context_length, arrangement=arrangement, at_least=at_least
        )

    wanted = 1
    if layout.strategy == "fsdp":
        wanted = max(len(parts_of(other)) for other in range(layout.world_size))
    totals = BatchTotals.of_units(units)
    parts = parts_of(rank, wanted)
    if isinstance(objective, WeightedLogProbabilities):
        parts = [part.with_coefficients(objective.coefficients(part, totals)) for part in parts]
    tensors: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    for part in parts:
        part.mapped(noted)
    on_cpu = dataclasses.replace(resolved, precision=resolved.precision.on("cpu"))
    with FakeTensorMode(), as_rank(resolved.world_size, rank) as ranks:
        train_state = build_train_state(on_cpu, ranks)

        def step(model: Any, batch: Sequence[Tensor]) -> Any:
            fakes = iter(batch)
            traced = [part.mapped(lambda _: next(fakes)) for part in parts]
            loss_of = loss_of_parts(traced, objective, totals, {})
            return train_state.step_on_sequences(0, [part.rows for part in traced], loss_of)

        return count(
            train_state.model,
            tuple(tensors),
            step,
            target=resolved.counted_for,
            # DDP decides on its buckets before the second step.
            warm_up=2 if resolved.strategy == "ddp" else 1,
            progress=progress,
        )
