"""`napkin plan rule --params N ...`: a plan by rules of thumb, without a recipe.

Three questions: what a training run takes (--tokens), what can be trained in a given time (--within), and how well
devices are used (--tokens-per-second).
"""

from dataclasses import dataclass, field
from typing import Annotated

from napkin.accounting.quantities import format_figure
from napkin.cli.common.options import INLINED, JsonOption, Switch, command
from napkin.cli.common.terminal import print_json, print_table, say
from napkin.errors import NapkinError
from napkin.planning.rules import (
    USUAL_MFU,
    RuleDevices,
    RulePlan,
    RuleSizes,
    affordable_by_rule,
    rules_by_size,
    training_by_rule,
    utilisation_by_rule,
)
from napkin.units import format_count, parse_count, parse_seconds

_MOST = 1e9


@dataclass(frozen=True, kw_only=True)
class FailureOptions:
    """The rate of failures, and the seconds that a failure costs."""

    mtbf_hours: float | None = None
    """Mean time between failures of all devices together, in hours; None is the rate of the Llama 3 405B run."""
    restart_minutes: float | None = None
    """Minutes from a failure until training continues; None is 10."""

    def refuse_impossible(self) -> None:
        """Raise NapkinError for hours or minutes that cannot be."""
        hours, minutes = self.mtbf_hours, self.restart_minutes
        if hours is not None and not 0 < hours <= _MOST:
            raise NapkinError(f"--mtbf-hours is {hours}: use a number above 0, up to {_MOST:.0e}")
        if minutes is not None and not 0 <= minutes <= _MOST:
            raise NapkinError(f"--restart-minutes is {minutes}: use a number from 0 to {_MOST:.0e}")


LARGE = 100 * 10**9
"""Parameters from which on models are mostly mixtures of experts."""


@dataclass(frozen=True)
class PlanByRuleOptions(FailureOptions, JsonOption):
    """Plan by rule alone: 6 FLOPs per parameter and token.

    What training takes: --params 70B --tokens 15T --on 1024xH100. What a week is enough for: --on 8xH100 --within
    1week. How well devices are used: --params 7B --tokens-per-second 90k --on 8xH100."""

    params: str | None = None
    """Parameters: 124M, 70B."""
    active_params: str | None = None
    """Parameters that a token is computed with, of a mixture of experts: 37B of --params 671B."""
    tokens: str | None = None
    """Tokens: 300B, 15T. None is 20 per parameter, which is compute-optimal."""
    on: str | None = None
    """Devices: H100, 1024xH100, 8xmydevice.toml; `napkin hardware` lists them."""
    within: str | None = None
    """A time to train for: 36h, 10days, 1week."""
    tokens_per_second: str | None = None
    """Tokens per second of all devices, measured: 90k."""
    mfu: float | None = None
    """Model FLOPs utilization, a fraction of the dense peak; 0.5, if it is not given, is good."""
    format: str = "auto"
    """Number format of the matrix products; auto is bf16, or fp16 or fp32 on devices without it."""
    rules: Switch = False
    """Also print the other rules of thumb, as far as the sizes below are given."""
    sizes: Annotated[RuleSizes, INLINED] = field(default_factory=RuleSizes)


@command("plan rule", PlanByRuleOptions)
def main(options: PlanByRuleOptions) -> None:
    plan, active = _plan(options)
    # The number of parameters may be what --within finds.
    parameters = float(_above_zero("params", options.params) or plan.parameters)
    rows = rules_by_size(parameters, options.sizes, active=active or plan.active, devices=plan.devices)
    if options.json:
        names = ("quantity", "formula", "unit", "rule")
        shown = [{name: getattr(row, name) for name in names} for row in rows] if options.rules else None
        print_json({**plan.as_values(), **({} if shown is None else {"rules": shown})})
        return
    for name, text in plan.lines:
        say(f"{name:<8} {text}")
    devices = plan.devices
    if devices is not None and options.format == "auto" and devices.format != "bf16":
        of = f"the catalogue has no bf16 for {devices.device.name}"
        say(f"{'format':<8} {devices.format}: {of}; --format chooses another")
    if options.params and parameters >= LARGE and options.active_params is None:
        say(
            "If it is a mixture of experts, a token is computed with a part of its parameters: --active-params 37B, "
            "for example"
        )
    if options.rules:
        by_rule = [format_count(row.rule) if row.unit == "count" else format_figure(row.rule, row.unit) for row in rows]
        cells = [(row.quantity, row.formula, figure) for row, figure in zip(rows, by_rule, strict=True)]
        print_table(("rule", "formula", "by rule"), cells, align="llr")
        sizes = ("n_layers", "d_model", "n_heads", "vocab_size")
        if missing := [f"--{name.replace('_', '-')}" for name in sizes if getattr(options.sizes, name) is None]:
            say(f"{', '.join(missing)} would add rules", style="dim")
    restarts = "" if "failures" in plan.figures else ", and restarts"
    say(f"The rule ignores attention over long contexts{restarts}; `napkin plan recipe.toml` counts a real step.")


def _plan(options: PlanByRuleOptions) -> tuple[RulePlan, float | None]:
    """The answer to the question that the options ask, and the active parameters, if they are given."""
    options.refuse_impossible()
    if options.mfu is not None and not 0 < options.mfu <= 1:
        raise NapkinError(f"--mfu is {options.mfu}: use a fraction above 0, up to 1")
    parameters = _above_zero("params", options.params)
    active = _above_zero("active-params", options.active_params)
    if active and not parameters:
        raise NapkinError("--active-params are a part of --params: give both, as in --params 671B --active-params 37B")
    if parameters and active and active > parameters:
        raise NapkinError(f"--active-params {options.active_params} is more than --params {options.params}")
    computed = active or parameters
    tokens = _above_zero("tokens", options.tokens)
    devices = None if options.on is None else RuleDevices.of(options.on, options.format)
    mfu = USUAL_MFU if options.mfu is None else options.mfu
    failures = {"mtbf_hours": options.mtbf_hours, "restart_minutes": options.restart_minutes}
    asks_for_failures = any(each is not None for each in failures.values())
    if asks_for_failures and (devices is None or options.within or options.tokens_per_second):
        raise NapkinError(
            "--mtbf-hours and --restart-minutes are for the time that a run takes: give --params, --tokens and --on"
        )
    if options.within is not None:
        if options.tokens_per_second is not None:
            raise NapkinError("--within and --tokens-per-second are two questions: ask one of them")
        if devices is None:
            raise NapkinError("--within needs devices: add --on 8xH100, for example")
        if computed and tokens:
            raise NapkinError("--within with --params and --tokens leaves nothing to find: leave one of them out")
        seconds = parse_seconds(options.within)
        if not seconds:
            raise NapkinError(f"--within is {options.within}: use a time above 0")
        return affordable_by_rule(devices, seconds, parameters=computed, tokens=tokens, mfu=mfu), active
    if options.tokens_per_second is not None:
        rate = _above_zero("tokens-per-second", options.tokens_per_second)
        if devices is None or not computed or rate is None:
            raise NapkinError("--tokens-per-second needs a model and devices: add --params 7B --on 8xH100, for example")
        if options.mfu is not None:
            raise NapkinError("--mfu is what --tokens-per-second finds: leave it out")
        return utilisation_by_rule(devices, computed, rate, tokens=tokens), active
    if not parameters:
        raise NapkinError("there is nothing to plan: give --params 7B, or --on 8xH100 --within 1week")
    return training_by_rule(parameters, tokens, active=active, devices=devices, mfu=mfu, **failures), active


def _above_zero(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    value = parse_count(text)
    if not value:
        raise NapkinError(f"--{name} is {text}: use a number above 0")
    return value
