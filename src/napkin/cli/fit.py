"""`napkin fit`."""

from dataclasses import dataclass
from typing import Literal

from napkin.accounting.rules import bytes_per_parameter, largest_model_rule
from napkin.cli.options import Switch, parse
from napkin.cli.terminal import print_json, progress_line, say
from napkin.errors import NapkinError
from napkin.hardware.catalogue import find_device
from napkin.recipe.recipe import OptimizerName
from napkin.units import format_bytes, format_count, parse_devices


@dataclass(frozen=True)
class FitOptions:
    """Say how large a model some accelerators can train: by rule, and with activations by count. Parameters, gradients
    and optimizer state are spread over all devices; each works on sequences of its own."""

    on: str
    """Devices: H100, 8xH100; `napkin hardware` lists them."""
    optimizer: OptimizerName = "adamw"
    """What updates the weights: adamw keeps two numbers per parameter, momentum, lion and muon one, sgd none."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Format of the matrix products, auto being bf16 where the device has it; weights, gradients and optimizer state
    are fp32."""
    batch_size: int = 1
    """Sequences that a device works on at a time."""
    context_length: int = 2048
    """Tokens per sequence."""
    vocab_size: int = 50304
    """Token ids."""
    json: Switch = False
    """Print the result for programs."""


def main(arguments: list[str]) -> None:
    """Print the largest model by rule and by count."""
    options = parse(FitOptions, "fit", arguments)
    for name in ("batch_size", "context_length", "vocab_size"):
        if getattr(options, name) < 1:
            raise NapkinError(f"--{name.replace('_', '-')} is {getattr(options, name)}: use a number above 0")
    n_devices, name = parse_devices(options.on)
    device = find_device(name)
    products = device.choose_format(options.precision)
    a_parameter = bytes_per_parameter(options.optimizer)
    by_rule = largest_model_rule(n_devices * device.advertised_bytes, bytes_per_parameter=a_parameter)
    if not options.json:
        say(
            f"rule   {n_devices:,} × {format_bytes(device.advertised_bytes)} ({device.name}) / {a_parameter} bytes per "
            f"parameter = {format_count(by_rule)} parameters: weight 4, gradient 4, {options.optimizer}'s state "
            f"{a_parameter - 8}; no activations"
        )
    with progress_line("counting") as line:
        from napkin.planning.catalogue_plan import target_of
        from napkin.planning.largest_model import Family, largest_model
        from napkin.recipe.precision import Precision

        family = Family(
            options.vocab_size,
            options.context_length,
            options.batch_size,
            Precision(products, "cuda"),
            target_of(device),
            options.optimizer,
        )
        found = largest_model(family, device, n_devices, progress=line.retitle)
    config, ledger = found.config, found.ledger
    if options.json:
        print_json(
            {
                "device": device.name,
                "n_devices": n_devices,
                "rule": {"bytes_per_parameter": a_parameter, "parameters": by_rule},
                "count": {
                    "parameters": ledger.parameters,
                    "d_model": config.d_model,
                    "n_layers": config.n_layers,
                    "n_heads": config.n_heads,
                    "peak_bytes": found.peak_bytes,
                    "gathered_bytes": found.gathered_bytes,
                    "usable_bytes": device.usable_bytes,
                },
            }
        )
        return
    model = f"{format_count(ledger.parameters)} parameters in {config.n_layers} layers of d_model {config.d_model:,}"
    say(f"count  {model}: peak {format_bytes(found.peak_bytes)} of the {format_bytes(device.usable_bytes)} on a device")
