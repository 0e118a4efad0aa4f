"""The best use of a budget by a fitted law: the best size and tokens, the price of the next 0.01 nats, and
over-training."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from napkin.errors import NapkinError
from napkin.planning.planner import SharedPlans, resolve
from napkin.planning.step.machine import Machine, machine_of
from napkin.planning.step.run_plan import Plan
from napkin.recipe.recipe import Recipe
from napkin.scaling.fitted_law import FittedLaw, Optimum
from napkin.scaling.ladder import Design, Shapes
from napkin.scaling.predicted_loss import flops_per_step

_PASSES = 4
_MOST_FLOPS = 1e36
INFERENCE_FLOPS = 2
"""FLOPs per parameter and token that is read or written: a forward pass, by rule."""


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
        """Seconds of the whole run."""
        return self.optimum.flops / self.flops_per_second

    def dollars(self, flops: float) -> float | None:
        """The price of so many FLOPs; None where the devices have none."""
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
    """The same for the compute-optimal model."""


def answer_budget(
    law: FittedLaw,
    base: Recipe,
    *,
    flops: float | None = None,
    seconds: float | None = None,
    dollars: float | None = None,
    on: str | Machine | None = None,
    design: Design | None = None,
    progress: Callable[[str], None] = lambda doing: None,
) -> BudgetAnswer:
    """The compute-optimal run for FLOPs, or for seconds or dollars of devices, by counted FLOPs and planned seconds.

    Shapes are those of a ladder over the base recipe. Raises NapkinError for a budget that is not a positive number,
    and in dollars where the devices have no price.
    """
    given = [each for each in (flops, seconds, dollars) if each is not None]
    if len(given) != 1 or not 0 < given[0] < _MOST_FLOPS:
        raise NapkinError("give one budget above 0: --flops 1e21, --within 10days or --for 1000usd")
    shapes, machine, planner = (
        Shapes(base, design or Design()),
        machine_of(on, device=base.training.device),
        SharedPlans(),
    )
    excess, compute, found = 1.0, flops, None
    heads = 2
    for _ in range(_PASSES):
        recipe = dataclasses.replace(base, model=shapes.model(heads))
        progress(f"planning d_model {recipe.model.d_model}")
        plan = planner(resolve(recipe, machine), machine)
        size = shapes.parameters(heads)
        excess = flops_per_step(plan) / plan.tokens_per_step / 6 / size
        if flops is None:
            compute = _seconds(seconds, dollars, plan) * flops_per_step(plan) / plan.seconds_per_step
        assert compute is not None
        ratio = excess
        best = law.optimum(compute, flops_per_token=lambda parameters, ratio=ratio: 6 * parameters * ratio)
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

    low, high = math.log(answer.optimum.flops), math.log(_MOST_FLOPS)
    if loss(_MOST_FLOPS) > wanted:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if loss(math.exp(middle)) > wanted else (low, middle)
    return math.exp(high)


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

    found = (total(size, best.tokens.estimate), size, best.tokens.estimate)
    for step in range(1, 400):
        parameters = size * 0.99**step
        tokens = _tokens_to(law, loss, parameters, best.tokens.estimate)
        if tokens is None:
            break
        found = min(found, (total(parameters, tokens), parameters, tokens))
    least, parameters, tokens = found
    return OverTraining(parameters, tokens, per_token * parameters * tokens, least, total(size, best.tokens.estimate))


def _tokens_to(law: FittedLaw, loss: float, parameters: float, fewest: float) -> float | None:
    """Tokens after which a model of that size has the loss; None where no number of tokens reaches it."""
    low, high = math.log(fewest), math.log(fewest) + 14
    if law.mean_loss(parameters, math.exp(high)) > loss:
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if law.mean_loss(parameters, math.exp(middle)) > loss else (low, middle)
    return math.exp(high)


def _seconds(seconds: float | None, dollars: float | None, plan: Plan) -> float:
    if seconds is not None:
        return seconds
    price = plan.site.usd_per_hour
    if not price or dollars is None:
        raise NapkinError("these devices have no price: give the budget in time, as --within 10days, or as --flops")
    return dollars / price * 3600
