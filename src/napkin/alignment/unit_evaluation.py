"""The loss and figures of an objective on units, without gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from napkin.alignment.lazy_units import chunks_of
from napkin.alignment.objective import BatchTotals, Objective, add_figures
from napkin.alignment.sequence_packing import Arrangement, micro_batches_of
from napkin.alignment.sequence_step import units_of_rank
from napkin.alignment.token_sequence import Unit
from napkin.model.language_model import evaluation_mode
from napkin.train_step.step import TrainState


@dataclass(frozen=True)
class UnitsEvaluation:
    """What an objective makes of units."""

    loss: float
    figures: dict[str, float]


def evaluate_units(
    train_state: TrainState,
    units: Sequence[Unit],
    objective: Objective,
    *,
    max_tokens: int,
    arrangement: Arrangement = "packed",
) -> UnitsEvaluation:
    """The loss and the figures of all units, some of them at a time; the ranks divide them. A collective."""
    model = train_state.parallel_model
    settings = {"max_tokens": max_tokens, "row_length": model.model.config.context_length, "arrangement": arrangement}
    totals = BatchTotals.of_units(units)
    found: dict[str, float] = {}
    with torch.no_grad(), evaluation_mode(model.model):
        for chunk in chunks_of(units):
            own = micro_batches_of(units_of_rank(chunk, model.layout, model.ranks.info.rank), **settings)
            if model.layout.batch_parts > 1:
                own += micro_batches_of([], **settings, at_least=model.ranks.all_reduce_max(len(own)) - len(own))
            for part in own:
                part = part.to(model.model.device)
                with train_state.precision.autocast():
                    scores = model.token_scores(part.rows)
                    if part.units:
                        loss, figures = objective.loss(part, scores, totals)
                        add_figures(found, {name: float(value) for name, value in {"loss": loss, **figures}.items()})
    model.reshard()
    everywhere: dict[str, float] = {}
    for each in model.ranks.all_gather(found):
        add_figures(everywhere, each)
    return UnitsEvaluation(everywhere.pop("loss"), everywhere)
