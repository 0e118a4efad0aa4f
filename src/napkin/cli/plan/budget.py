"""`napkin budget`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from napkin.cli.common.options import JsonOption
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import print_json, say
from napkin.errors import NapkinError
from napkin.units import format_count, format_flops, format_seconds, parse_dollars, parse_seconds


@dataclass(frozen=True)
class BudgetOptions(RecipeOptions, JsonOption):
    """Say what a budget buys by a fitted law: the compute-optimal size and tokens, its loss, what the next 0.01 nats
    cost, and how far a smaller model should be trained where it will be used a lot. The recipe gives vocabulary,
    context, batch and the kind of model; sizes are those of `napkin ladder`."""

    law: str | None = None
    """A file of `napkin law fit` or `napkin ladder`."""
    on: str | None = None
    """Accelerators, as 8xH100; None is this machine."""
    flops: float | None = None
    """Budget in FLOPs."""
    within: str | None = None
    """Budget in time of the devices, as 10days."""
    for_: Annotated[str | None, tyro.conf.arg(name="for")] = None
    """Budget in money, as 1000usd."""
    inference_tokens: float | None = None
    """Tokens that the model will read and write in its life; None says nothing of over-training."""


@recipe_command("budget", BudgetOptions)
def main(options: BudgetOptions, _: RecipeSource) -> None:
    if options.law is None:
        raise NapkinError("no law is given: name a file of `napkin law fit` or `napkin ladder` with --law")
    with progress_line("planning") as line:
        from napkin.scaling.budget_answer import answer_budget, flops_for_less_loss, over_training
        from napkin.scaling.fitted_law import read_law

        law = read_law(options.law)
        answer = answer_budget(
            law,
            options.recipe,
            flops=options.flops,
            seconds=None if options.within is None else float(parse_seconds(options.within)),
            dollars=None if options.for_ is None else float(parse_dollars(options.for_)),
            on=options.on,
            progress=line.retitle,
        )
        line.retitle("solving")
        more = flops_for_less_loss(law, answer)
        longer = None if options.inference_tokens is None else over_training(law, answer, options.inference_tokens)
    best = answer.optimum
    price = answer.dollars(best.flops)
    next_price = None if more is None else answer.dollars(more - best.flops)
    if options.json:
        print_json(
            {
                "flops": best.flops,
                "parameters": vars(best.parameters),
                "tokens": vars(best.tokens),
                "loss": vars(best.loss),
                "seconds": answer.seconds,
                "dollars": price,
                "extrapolation": law.extrapolation(best.flops),
                "flops_for_0.01_nats_less": more,
                "dollars_for_0.01_nats_less": next_price,
                "over_training": None if longer is None else vars(longer),
            }
        )
        return
    money = "" if price is None else f", ${price:,.2f}"
    say(f"{format_flops(best.flops)} on {answer.plan.site.name}: {format_seconds(answer.seconds)}{money}")
    for name, found in (("parameters", best.parameters), ("tokens", best.tokens)):
        low, high = format_count(found.low), format_count(found.high)
        say(f"compute-optimal {name}: {format_count(found.estimate)}, 90% interval {low} to {high}")
    loss = best.loss
    say(f"loss: {loss.estimate:.4f} nats per token, 90% interval {loss.low:.4f} to {loss.high:.4f}")
    say(f"{law.extrapolation(best.flops):.3g} times the FLOPs of the law's largest run")
    if more is None:
        say("the next 0.01 nats: no FLOPs reach them by this law")
    else:
        cost = "" if next_price is None else f", ${next_price:,.2f}"
        say(f"the next 0.01 nats: {format_flops(more - best.flops)} more{cost}")
    if longer is not None:
        saved = 1 - longer.total_flops / longer.optimum_total_flops
        used = format_count(options.inference_tokens or 0)
        say(
            f"with {used} tokens of inference: {format_count(longer.parameters)} parameters and "
            f"{format_count(longer.tokens)} tokens reach the same loss with {saved:.1%} fewer FLOPs in all"
        )
