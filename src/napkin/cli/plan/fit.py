"""`napkin fit`."""

import shlex
from dataclasses import dataclass
from typing import Literal

from napkin.accounting.rules import bytes_per_parameter, largest_model_rule
from napkin.cli.common.options import JsonOption, command
from napkin.cli.common.progress import progress_line
from napkin.cli.common.terminal import print_json, say
from napkin.errors import NapkinError
from napkin.hardware.cluster import find_cluster
from napkin.recipe.training_config import OptimizerName
from napkin.units import format_bytes, format_count

MOST_TOKENS = 2**22
"""Of a device and step; tracing the chunks of their loss takes minutes."""


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
def main(options: FitOptions) -> None:
    for name in ("batch_size", "context_length", "vocab_size"):
        if getattr(options, name) < 1:
            raise NapkinError(f"--{name.replace('_', '-')} is {getattr(options, name)}: use a number above 0")
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

        machine = CatalogueMachine(device, n_devices, node=cluster.node)

        family = Family(
            options.vocab_size, options.context_length, options.batch_size, options.precision, options.optimizer
        )
        found = largest_model(family, machine, progress=line.retitle)
    config, ledger = found.recipe.model, found.ledger
    if options.json:
        print_json(
            {
                "device": device.name,
                "n_devices": n_devices,
                "rule": {"bytes_per_parameter": bytes_each, "parameters": by_rule},
                "count": {
                    "parameters": ledger.parameters,
                    "d_model": config.d_model,
                    "n_layers": config.n_layers,
                    "n_heads": config.n_heads,
                    "peak_bytes": ledger.peak_bytes,
                    "gathered_bytes": gathered_bytes_of(found),
                    "usable_bytes": device.usable_bytes,
                },
            }
        )
        return
    model = f"{format_count(ledger.parameters)} parameters in {config.n_layers} layers of d_model {config.d_model:,}"
    say(f"count  {model}: peak {format_bytes(ledger.peak_bytes)} of {format_bytes(device.usable_bytes)} per device")
    batch = f"--training.batch-size {n_devices * options.batch_size} --training.parallelism fsdp"
    model = " ".join(
        f"--model.{name.replace('_', '-')} {getattr(config, name)}"
        for name in ("d_model", "n_layers", "n_heads", "vocab_size", "context_length")
    )
    more = f"{batch} --optimizer.name {options.optimizer} --on {shlex.quote(options.on)}"
    # One line, to be copied.
    say(f"plan it: napkin plan {model} {more}", style="dim", wrap=False)
