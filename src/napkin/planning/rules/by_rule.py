"""A plan by rules of thumb: 6 FLOPs per parameter and token on devices of the catalogue, without a model.

Three questions: what training takes (`training_by_rule`), what can be trained in a given time (`affordable_by_rule`),
and how well devices are used (`utilisation_by_rule`). A plan holds its figures and the arithmetic behind them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from napkin.accounting.failures import RESTART_MINUTES, failure_model
from napkin.accounting.quantities import Line, Summary
from napkin.accounting.rules import adamw_bytes_rule, compute_optimal_tokens_rule, seconds_rule, training_flops_rule
from napkin.hardware.cluster import find_cluster
from napkin.hardware.device import Device
from napkin.planning.step.failure_cost import failure_rows, failures_are_worth_saying, failures_of_run
from napkin.units import format_bytes, format_count, format_flops, format_rate, format_seconds, format_share

USUAL_MFU = 0.5
CHECKPOINT_BYTES_PER_PARAMETER = 12
"""Weight and two moments of AdamW, in fp32."""


@dataclass(frozen=True)
class RuleDevices:
    """Devices of one kind, and the number format in which they multiply matrices."""

    device: Device
    n: int
    n_nodes: int
    format: str

    @classmethod
    def of(cls, on: str, format: str = "auto") -> "RuleDevices":
        """Find devices by name, as in "8xH100".

        The format "auto" is bf16, or fp16 or fp32 where the catalogue has no bf16. Raises NapkinError for an unknown
        device, or a format that it does not have.
        """
        cluster = find_cluster(on)
        peaks = cluster.device.peaks
        if format == "auto":
            format = next((name for name in ("bf16", "fp16", "fp32") if name in peaks), next(iter(peaks)))
        cluster.device.peak(format)
        return cls(cluster.device, cluster.n_devices, cluster.n_nodes, format)

    @property
    def peak(self) -> float:
        """Dense FLOP/s of all devices."""
        return self.n * self.device.peak(self.format)

    def __str__(self) -> str:
        rate = format_rate(self.device.peak(self.format))
        return f"{self.n:,} × {rate} dense {self.format} ({self.device.name})"


@dataclass(repr=False)
class RulePlan(Summary):
    """The answer to a question: figures for programs, and for people a line for each, with its arithmetic."""

    devices: RuleDevices | None
    parameters: float
    """All parameters, those of experts included."""
    active: float
    """The parameters that a token is computed with."""
    figures: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def summary(self) -> Iterator[Line]:
        """The heading, and the lines."""
        yield "plan by rule", str(self.devices or f"{format_count(self.parameters)} parameters")
        yield from self.lines

    def as_values(self) -> dict[str, Any]:
        """The figures with the name of the devices."""
        named = {} if self.devices is None else {"device": self.devices.device.name, "format": self.devices.format}
        return {**named, **self.figures}

    def _spend(self, seconds: float) -> None:
        """Add seconds of all devices, their dollars and their energy."""
        assert self.devices is not None
        device, hours = self.devices.device, self.devices.n * seconds / 3600
        dollars = hours * device.price.usd_per_hour if device.price else None
        kilowatt_hours = hours * device.watts / 1000 if device.watts else None
        if dollars is not None:
            self.lines.append(("price", f"${format_count(dollars)} at {device.price}"))
        if kilowatt_hours is not None:
            energy = f"{format_count(kilowatt_hours)} kWh at {device.watts:.0f} W per board, without cooling"
            self.lines.append(("energy", energy))
        self.figures |= {"seconds": seconds, "days": seconds / 86400, "device_hours": hours}
        self.figures |= {"dollars": dollars, "kilowatt_hours": kilowatt_hours}


def training_by_rule(
    parameters: float,
    tokens: float | None = None,
    *,
    active: float | None = None,
    devices: RuleDevices | None = None,
    mfu: float = USUAL_MFU,
    mtbf_hours: float | None = None,
    restart_minutes: float | None = None,
) -> RulePlan:
    """FLOPs and bytes of training, and on devices time, dollars, energy and failures.

    Args:
        parameters: of the model.
        tokens: that it is trained on; None is 20 per parameter, which is compute-optimal.
        active: parameters that a token is computed with, of a mixture of experts; None is all.
        devices: that it is trained on; None leaves out time, dollars and energy.
        mfu: model-FLOPs utilisation to assume.
        mtbf_hours: mean time between failures of all devices; None is the rate of the Llama 3 405B run.
        restart_minutes: from a failure until training continues; None is 10.
    """
    plan = RulePlan(devices, parameters, active or parameters)
    if tokens is None:
        tokens = round(compute_optimal_tokens_rule(plan.active))
        found = f"20 · {format_count(plan.active)} = {format_count(tokens)}"
        plan.lines.append(("tokens", f"{found}, compute-optimal; or --tokens"))
    flops = training_flops_rule(plan.active, tokens)
    plan.figures |= {"flops": flops, "parameters": parameters, "tokens": tokens}
    formula = f"6 · {format_count(plan.active)} · {format_count(tokens)}"
    plan.lines.append(("FLOPs", f"{formula} = {format_flops(flops)} ({flops:.3g})"))
    state, of = adamw_bytes_rule(parameters), ""
    if devices is None:
        plan.lines.append(("time", "--on 8xH100, for example, adds time, dollars and energy"))
    else:
        seconds = seconds_rule(flops, devices.peak, mfu=mfu)
        plan.lines.append(("rate", f"{devices} × MFU {mfu}"))
        plan.lines.append(("time", f"{_days(seconds)}, {format_count(devices.n * seconds / 3600)} device hours"))
        plan._spend(seconds)
        _add_failures(plan, devices, seconds, mtbf_hours, restart_minutes)
        of = f" of {format_bytes(devices.n * devices.device.advertised_bytes)}"
    formula = f"16 · {format_count(parameters)} = {format_bytes(state)}"
    plan.lines.append(("memory", f"{formula}{of}, without activations (AdamW)"))
    plan.figures["state_bytes"] = state
    return plan


def affordable_by_rule(
    devices: RuleDevices,
    seconds: float,
    *,
    parameters: float | None = None,
    tokens: float | None = None,
    mfu: float = USUAL_MFU,
) -> RulePlan:
    """The training that devices can do in a time: tokens for a number of parameters, parameters for a number of tokens,
    or, of neither, the compute-optimal model."""
    flops = devices.peak * mfu * seconds
    if parameters is not None:
        tokens = flops / training_flops_rule(parameters, 1)
        ratio = f"{format_count(tokens / parameters)} per parameter, 20 is compute-optimal"
        found = "tokens", f"FLOPs / (6 · {format_count(parameters)}) = {format_count(tokens)} tokens: {ratio}"
    elif tokens is not None:
        parameters = flops / training_flops_rule(1, tokens)
        formula = f"FLOPs / (6 · {format_count(tokens)}) = {format_count(parameters)} parameters"
        found = "model", f"{formula}: {format_count(tokens / parameters)} tokens per parameter"
    else:
        # 6·N·T with T = 20·N.
        parameters = math.sqrt(flops / training_flops_rule(1, compute_optimal_tokens_rule(1)))
        tokens = compute_optimal_tokens_rule(parameters)
        formula = f"√(FLOPs / 120) = {format_count(parameters)} parameters on 20 · N = {format_count(tokens)} tokens"
        found = "model", f"{formula}, compute-optimal"
    plan = RulePlan(devices, parameters, parameters)
    bought = f"{devices} × MFU {mfu} × {_days(seconds)} = {format_flops(flops)} ({flops:.3g})"
    plan.lines += [("FLOPs", bought), found]
    plan.figures |= {"flops": flops, "parameters": parameters, "tokens": tokens}
    plan._spend(seconds)
    return plan


def utilisation_by_rule(
    devices: RuleDevices, parameters: float, tokens_per_second: float, *, tokens: float | None = None
) -> RulePlan:
    """The model-FLOPs utilisation of a measured rate, and the time for so many tokens at it."""
    rate = tokens_per_second
    mfu = training_flops_rule(parameters, rate) / devices.peak
    above = ", which is impossible: check the numbers and --format" if mfu > 1 else ""
    formula = f"6 · {format_count(parameters)} · {format_count(rate)}/s / ({devices})"
    plan = RulePlan(devices, parameters, parameters)
    plan.lines.append(("MFU", f"{formula} = {format_share(mfu)}{above}"))
    plan.figures |= {"mfu": mfu, "parameters": parameters, "tokens_per_second": rate}
    if tokens is not None:
        seconds = tokens / rate
        plan.lines.append(("time", f"{format_count(tokens)} / {format_count(rate)}/s = {_days(seconds)}"))
        plan.figures["tokens"] = tokens
        plan._spend(seconds)
    return plan


def _add_failures(
    plan: RulePlan, devices: RuleDevices, seconds: float, mtbf_hours: float | None, restart_minutes: float | None
) -> None:
    """Add the same run with failures and checkpoints at the best interval."""
    written = CHECKPOINT_BYTES_PER_PARAMETER * plan.parameters
    model = failure_model(
        n_devices=devices.n,
        copied_bytes=written / devices.n,
        written_bytes=written,
        writing_nodes=devices.n_nodes,
        host_bandwidth=devices.device.host_bandwidth,
        mtbf_hours=mtbf_hours,
        restart_minutes=RESTART_MINUTES if restart_minutes is None else restart_minutes,
    )
    failures = failures_of_run(model, seconds, useful_dollars=plan.figures["dollars"])
    given = mtbf_hours is not None
    if failures_are_worth_saying(seconds, devices.n, given=given):
        plan.lines += failure_rows(failures, given=given)
    plan.figures["failures"] = failures


def _days(seconds: float) -> str:
    return f"{seconds / 86400:,.2f} days" if seconds > 86400 else format_seconds(seconds)
