"""`napkin plan --params N --tokens T --on DEVICES`: a plan by rules of thumb, without a recipe."""

from dataclasses import dataclass

from napkin.accounting.rules import seconds_rule, training_flops_rule
from napkin.cli.options import JsonOption, parse
from napkin.cli.terminal import print_json, say
from napkin.errors import NapkinError
from napkin.hardware.accelerators import find_device
from napkin.units import format_count, format_flops, format_rate, format_seconds, parse_count, parse_devices


@dataclass(frozen=True)
class PlanByRuleOptions(JsonOption):
    """Say what training a model of a given size takes, by rule: 6 FLOPs per parameter and token."""

    params: str
    """Parameters: 124M, 70B."""
    tokens: str
    """Tokens: 300B, 15T."""
    on: str
    """Devices: H100, 1024xH100; `napkin hardware` lists them."""
    mfu: float = 0.5
    """Model FLOPs utilization, a fraction of the dense peak; 0.5 is good."""
    format: str = "bf16"
    """Number format of the matrix products."""


def main(arguments: list[str]) -> None:
    """Print FLOPs, days, dollars and kWh, with the arithmetic."""
    options = parse(PlanByRuleOptions, "plan", arguments)
    if not 0 < options.mfu <= 1:
        raise NapkinError(f"--mfu is {options.mfu}: use a fraction above 0, up to 1")
    parameters, tokens = parse_count(options.params), parse_count(options.tokens)
    if not parameters or not tokens:
        raise NapkinError(f"--params {options.params} and --tokens {options.tokens}: use numbers above 0")
    n_devices, name = parse_devices(options.on)
    device = find_device(name)
    peak = device.peak(options.format)
    flops = training_flops_rule(parameters, tokens)
    seconds = seconds_rule(flops, n_devices * peak, mfu=options.mfu)
    device_hours = n_devices * seconds / 3600
    dollars = device_hours * device.price.usd_per_hour if device.price else None
    kilowatt_hours = device_hours * device.watts / 1000 if device.watts else None
    if options.json:
        figures = {"flops": flops, "seconds": seconds, "days": seconds / 86400, "device_hours": device_hours}
        print_json({"device": device.name, **figures, "dollars": dollars, "kilowatt_hours": kilowatt_hours})
        return
    say(f"FLOPs    6 · {format_count(parameters)} · {format_count(tokens)} = {format_flops(flops)} ({flops:.3g})")
    say(f"rate     {n_devices:,} × {format_rate(peak)} dense {options.format} ({device.name}) × MFU {options.mfu}")
    time = f"{seconds / 86400:,.2f} days" if seconds > 86400 else format_seconds(seconds)
    say(f"time     {time}, {format_count(device_hours)} device hours")
    if dollars is not None and device.price:
        price = f"${device.price.usd_per_hour:.2f} per hour, {device.price.offer}, {device.price.date}"
        say(f"price    ${format_count(dollars)} at {price}")
    if kilowatt_hours is not None:
        say(f"energy   {format_count(kilowatt_hours)} kWh at {device.watts:.0f} W per board, without cooling")
    say("The rule ignores attention over long contexts, and restarts; `napkin plan recipe.toml` counts a real step.")
