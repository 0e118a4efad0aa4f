"""The predictions of a fitted law for planned runs: the loss of one, and the best use of a budget, by counted FLOPs.

Of a budget it says the best size and tokens, the price of the next 0.01 nats, and what over-training saves.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.planning.planner import Planner, SharedPlans, plan_resolved, resolve, vocab_size_of
from napkin.planning.services.replica import count_parameters
from napkin.planning.step.machine import Machine, Progress, machine_of
from napkin.planning.step.run_plan import Plan
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.runs.accounting_files import PredictedLoss
from napkin.scaling.fitted_law import FittedLaw, Optimum, read_law


def with_predicted_loss(plan: Plan, law: FittedLaw, source: str) -> Plan:
    """The plan with the loss that the law predicts for its parameters, tokens and counted FLOPs.

    `source` is where the law was read. Raises NapkinError for a law of several training sets.
    """
    if len(law.groups) > 1:
        raise NapkinError(f"'{source}' is a law of {len(law.groups)} training sets: fit one to the runs on one of them")
    flops = plan.steps * flops_per_step(plan)
    tokens = plan.steps * plan.tokens_per_step
    loss = law.predict(float(count_parameters(plan.recipe.model)), float(tokens), flops=flops)
    named = f"{law.form.name} of {source}"
    predicted = PredictedLoss(loss.estimate, loss.low, loss.high, named, law.extrapolation(flops))
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


USUAL_ASPECT = 64.0
"""d_model / n_layers; Kaplan et al. 2020 find hardly any difference from 30 to 100."""
_PASSES = 4
_MOST_FLOPS = 1e36
INFERENCE_FLOPS = 2
"""FLOPs per parameter and token that is read or written: a forward pass, by rule."""


class Shapes:
    """The models of one aspect ratio, by their number of parameters; all else is the base recipe's."""

    def __init__(self, base: Recipe, *, aspect: float = USUAL_ASPECT, mup: bool = False) -> None:
        """`aspect` is d_model / n_layers; with `mup`, µP's multipliers are those from the base's width."""
        self.base = dataclasses.replace(base.model, vocab_size=vocab_size_of(base))
        self.aspect, self.mup = aspect, mup
        self.parameters = functools.cache(lambda heads: count_parameters(self.model(heads)))
        """Parameters of the model with this many heads, counted without allocating them."""

    def model(self, heads: int) -> ModelConfig:
        """The model with this many heads, each as wide as the base's."""
        width = heads * self.base.resolved_head_dim
        grouped = self.base.resolved_n_kv_heads != self.base.n_heads
        return dataclasses.replace(
            self.base,
            d_model=width,
            n_layers=max(2, round(width / self.aspect)),
            n_heads=heads,
            n_kv_heads=max(1, heads * self.base.resolved_n_kv_heads // self.base.n_heads) if grouped else None,
            head_dim=None,
            d_ff=None if self.base.d_ff is None else round(width * self.base.d_ff / self.base.d_model),
            mup_base_d_model=self.base.d_model if self.mup else self.base.mup_base_d_model,
        )

    def nearest(self, parameters: float) -> int:
        """The heads of the model that is nearest to so many parameters, by their ratio."""
        low, high = 1, 2
        while self.parameters(high) < parameters:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.parameters(middle) < parameters else (low, middle)
        return min((low, high), key=lambda heads: abs(math.log(self.parameters(heads) / parameters)))


@dataclass(frozen=True)
class BudgetAnswer:
    """The best run within a budget."""

    optimum: Optimum
    plan: Plan
    """The plan of the nearest shape on the devices."""
    flops_per_token: float
    """Counted, of that shape, over 6·N: what 6·N·D leaves out is attention, and the head."""

    @property
    def flops_per_second(self) -> float:
        """FLOP/s that the plan reaches on all devices."""
        return flops_per_step(self.plan) / self.plan.seconds_per_step

    @property
    def seconds(self) -> float:
        return self.optimum.flops / self.flops_per_second

    def dollars(self, flops: float) -> float | None:
        """The price of this many FLOPs; None for devices without a price."""
        price = self.plan.site.usd_per_hour
        return None if price is None else flops / self.flops_per_second / 3600 * price


@dataclass(frozen=True)
class OverTraining:
    """A smaller model, trained on more tokens to the same loss."""

    parameters: float
    tokens: float
    training_flops: float
    total_flops: float
    """FLOPs of training and inference."""
    optimum_total_flops: float
    """FLOPs of training and inference of the compute-optimal model."""


def answer_budget(
    law: FittedLaw,
    base: Recipe,
    *,
    flops: float | None = None,
    seconds: float | None = None,
    dollars: float | None = None,
    on: str | Machine | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> BudgetAnswer:
    """The compute-optimal run for FLOPs, or for seconds or dollars of devices, by counted FLOPs and planned seconds.

    Models are `Shapes` of the base recipe. Raises NapkinError for a budget that is not a positive number,
    and in dollars where the devices have no price.
    """
    budgets = [each for each in (flops, seconds, dollars) if each is not None]
    if len(budgets) != 1 or not 0 < budgets[0] < _MOST_FLOPS:
        raise NapkinError("give one budget above 0: --flops 1e21, --within 10days or --for 1000usd")
    shapes, machine, planner = Shapes(base), machine_of(on, device=base.training.device), SharedPlans()
    compute, found, heads = flops, None, 2
    for _ in range(_PASSES):
        recipe = dataclasses.replace(base, model=shapes.model(heads))
        progress(f"planning d_model {recipe.model.d_model}")
        plan = planner(resolve(recipe, machine), machine)
        excess = flops_per_step(plan) / plan.tokens_per_step / 6 / shapes.parameters(heads)
        if dollars is not None:
            price = plan.site.usd_per_hour
            if not price:
                raise NapkinError(
                    "these devices have no price: give the budget in time, as --within 10days, or as --flops"
                )
            seconds = dollars / price * 3600
        if seconds is not None:
            compute = seconds * flops_per_step(plan) / plan.seconds_per_step
        assert compute is not None
        best = law.optimum(compute, flops_per_token=lambda parameters, excess=excess: 6 * parameters * excess)
        found = BudgetAnswer(best, plan, excess)
        nearest = shapes.nearest(best.parameters.estimate)
        if nearest == heads:
            break
        heads = nearest
    assert found is not None
    return found


def flops_for_less_loss(law: FittedLaw, answer: BudgetAnswer, nats: float = 0.01) -> float | None:
    """FLOPs of the compute-optimal run whose loss is lower by `nats`; None where no FLOPs reach it."""
    wanted = answer.optimum.loss.estimate - nats

    def loss(flops: float) -> float:
        per_token = 6 * answer.flops_per_token
        return law.optimum(flops, flops_per_token=lambda parameters: per_token * parameters).loss.estimate

    return _least_with(lambda flops: loss(flops) <= wanted, answer.optimum.flops, _MOST_FLOPS, within=1e-4)


def over_training(law: FittedLaw, answer: BudgetAnswer, inference_tokens: float) -> OverTraining:
    """The size whose FLOPs of training and inference are least at the loss of the optimum (Sardana & Frankle 2023).

    Raises NapkinError for a number of tokens that is not positive.
    """
    if not 0 < inference_tokens < 1e30:
        raise NapkinError(f"--inference-tokens is {inference_tokens:g}: use a number above 0")
    best, per_token = answer.optimum, 6 * answer.flops_per_token
    size, loss = best.parameters.estimate, best.loss.estimate

    def total(parameters: float, tokens: float) -> float:
        return per_token * parameters * tokens + INFERENCE_FLOPS * parameters * inference_tokens

    fewest = best.tokens.estimate
    found = (total(size, fewest), size, fewest)
    for step in range(1, 400):
        parameters = size * 0.99**step
        reaches = functools.partial(lambda size, tokens: law.mean_loss(size, tokens) <= loss, parameters)
        tokens = _least_with(reaches, fewest, fewest * math.exp(14), within=1.4e-8)
        if tokens is None:
            break
        found = min(found, (total(parameters, tokens), parameters, tokens))
    least, parameters, tokens = found
    return OverTraining(parameters, tokens, per_token * parameters * tokens, least, total(size, fewest))


def _least_with(holds: Callable[[float], bool], least: float, most: float, *, within: float) -> float | None:
    """The least number from which on a condition holds, by bisection of logarithms; None where it never does."""
    low, high = math.log(least), math.log(most)
    if not holds(most):
        return None
    while high - low > within:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(math.exp(middle)) else (middle, high)
    return math.exp(high)
