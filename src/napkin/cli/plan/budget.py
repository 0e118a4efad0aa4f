"""`napkin budget` says what FLOPs, days or dollars buy, `napkin fit` how large a model some accelerators can train."""

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from napkin.accounting.rules import bytes_per_parameter, largest_model_rule
from napkin.cli.common.options import JsonOption, command, require_above_zero
from napkin.cli.common.progress import progress_line
from napkin.cli.common.recipe_options import RecipeOptions, RecipeSource, recipe_command
from napkin.cli.common.terminal import print_json, say
from napkin.errors import NapkinError
from napkin.hardware.cluster import find_cluster
from napkin.recipe.training_config import OptimizerName
from napkin.units import format_bytes, format_count, format_flops, format_seconds, parse_dollars, parse_seconds


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
def budget_command(options: BudgetOptions, _: RecipeSource) -> None:
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
    for name, estimate in (("parameters", best.parameters), ("tokens", best.tokens)):
        low, high = format_count(estimate.low), format_count(estimate.high)
        say(f"compute-optimal {name}: {format_count(estimate.estimate)}, 90% interval {low} to {high}")
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


MOST_TOKENS = 2**22
"""Tokens of a device and step, at most: tracing the chunks of their loss takes minutes."""


@dataclass(frozen=True)
class FitOptions(JsonOption):
    """Say how large a model some accelerators can train: by rule, and with activations by count. Parameters, gradients
    and optimizer state are sharded over all devices; each device processes its own sequences."""

    on: str
    """Devices: H100, 8xH100; `napkin hardware` lists them."""
    optimizer: OptimizerName = "adamw"
    """Optimizer: adamw keeps two numbers per parameter, momentum, lion and muon one, sgd none."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Number format of the matrix products; auto is bf16 if the device has it. Weights, gradients and optimizer state
    are fp32."""
    batch_size: int = 1
    """Sequences per device and step."""
    context_length: int = 2048
    """Tokens per sequence."""
    vocab_size: int = 50304
    """Number of token ids."""


@command("fit", FitOptions)
def fit_command(options: FitOptions) -> None:
    require_above_zero(options, "batch_size", "context_length", "vocab_size")
    tokens, most = options.batch_size * options.context_length, MOST_TOKENS
    if tokens > most:
        raise NapkinError(
            f"--batch-size {options.batch_size} times --context-length {options.context_length} is {tokens:,} tokens, "
            f"too many to count: use numbers whose product is at most {most:,}"
        )
    cluster = find_cluster(options.on)
    n_devices, device = cluster.n_devices, cluster.device
    bytes_each = bytes_per_parameter(options.optimizer)
    by_rule = largest_model_rule(n_devices * device.advertised_bytes, bytes_per_parameter=bytes_each)
    if not options.json:
        say(
            f"rule   {n_devices:,} × {format_bytes(device.advertised_bytes)} ({device.name}) / {bytes_each} bytes "
            f"per parameter = {format_count(by_rule)} parameters: weight 4, gradient 4, {options.optimizer}'s state "
            f"{bytes_each - 8}; no activations"
        )
    with progress_line("counting") as line:
        from napkin.planning.fit import Family, gathered_bytes_of, largest_model
        from napkin.planning.step.machine import CatalogueMachine

        sizes = (options.vocab_size, options.context_length, options.batch_size)
        family = Family(*sizes, options.precision, options.optimizer)
        machine = CatalogueMachine(device, n_devices, node=cluster.node)
        largest = largest_model(family, machine, progress=line.retitle)
    config, ledger = largest.recipe.model, largest.ledger
    if options.json:
        count = {
            "parameters": ledger.parameters,
            **{name: getattr(config, name) for name in ("d_model", "n_layers", "n_heads")},
            "peak_bytes": ledger.peak_bytes,
            "gathered_bytes": gathered_bytes_of(largest),
            "usable_bytes": device.usable_bytes,
        }
        rule = {"bytes_per_parameter": bytes_each, "parameters": by_rule}
        print_json({"device": device.name, "n_devices": n_devices, "rule": rule, "count": count})
        return
    model = f"{format_count(ledger.parameters)} parameters in {config.n_layers} layers of d_model {config.d_model:,}"
    say(f"count  {model}: peak {format_bytes(ledger.peak_bytes)} of {format_bytes(device.usable_bytes)} per device")
    batch = f"--training.batch-size {n_devices * options.batch_size} --training.parallelism fsdp"
    model = " ".join(
        f"--model.{name.replace('_', '-')} {getattr(config, name)}"
        for name in ("d_model", "n_layers", "n_heads", "vocab_size", "context_length")
    )
    more = f"{batch} --optimizer.name {options.optimizer} --on {shlex.quote(options.on)}"
    # On one line, so that it can be copied.
    say(f"plan it: napkin plan {model} {more}", style="dim", wrap=False)
