"""The validation loss of a planned run by a fitted law."""

import dataclasses
from pathlib import Path

import torch

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.model.transformer import Transformer
from napkin.planning.planner import Planner, plan_resolved
from napkin.planning.step.machine import Machine, Progress
from napkin.planning.step.run_plan import Plan
from napkin.recipe.resolved import ResolvedRecipe
from napkin.runs.accounting_files import PredictedLoss
from napkin.scaling.fitted_law import FittedLaw, read_law


def with_predicted_loss(plan: Plan, law: FittedLaw, source: str) -> Plan:
    """The plan with the loss that the law predicts for its parameters, tokens and counted FLOPs.

    `source` is where the law was read. Raises NapkinError for a law of several training sets.
    """
    if len(law.groups) > 1:
        raise NapkinError(f"'{source}' is a law of {len(law.groups)} training sets: fit one to the runs on one of them")
    flops = plan.steps * flops_per_step(plan)
    tokens = plan.steps * plan.tokens_per_step
    found = law.predict(float(count_parameters(plan.recipe.model)), float(tokens), flops=flops)
    named = f"{law.form.name} of {source}"
    predicted = PredictedLoss(found.estimate, found.low, found.high, named, law.extrapolation(flops))
    return dataclasses.replace(plan, predicted_loss=predicted)


def predicting(path: str, planner: Planner = plan_resolved) -> Planner:
    """A planner whose plans have the loss that the law in a file predicts. Raises NapkinError for another file."""
    law, name = read_law(path), Path(path).name

    def planned(resolved: ResolvedRecipe, machine: Machine, *, progress: Progress = lambda doing: None) -> Plan:
        return with_predicted_loss(planner(resolved, machine, progress=progress), law, name)

    return planned


def flops_per_step(plan: Plan) -> float:
    """Counted FLOPs of a step of all devices."""
    return plan.layout.model_flops if plan.layout else float(plan.ledger.flops * plan.site.n_devices)


def count_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, without allocating them."""
    with torch.device("meta"):
        made = Transformer(model)
    return sum(parameter.numel() for parameter in made.parameters())
