"""The plan of a program's own step: its ledger, priced on the device."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

import torch

import napkin
from napkin.accounting.ledger import Ledger
from napkin.accounting.microbenchmark import time_operators
from napkin.accounting.pricing import Price, dollars, kilowatt_hours, price, price_with_launches, roofline_seconds
from napkin.accounting.quantities import QuantityRow, with_calls
from napkin.accounting.rules import adamw_bytes_rule
from napkin.errors import NapkinError
from napkin.hardware.ceilings import Ceilings
from napkin.hardware.device_file import find_device
from napkin.planning.step.machine import UNPROBED_FACTOR, CatalogueMachine, Machine, ThisMachine, machine_of
from napkin.planning.step.plan_file import fields_of_price
from napkin.planning.step.site import Site, fits
from napkin.recipe.precision import Precision, PrecisionName
from napkin.runs.accounting_files import PlanFile, PlannedDevice
from napkin.units import format_bytes, format_flops, format_seconds

TIMING_SECONDS = 3.0
"""The most seconds spent on timing operators alone before the first step."""


@dataclass(frozen=True)
class ProgramPlan:
    """FLOPs, bytes and seconds of one step of a program."""

    ledger: Ledger
    price: Price
    site: Site
    format: PrecisionName
    """The number format of most of the step's FLOPs: MFU is relative to the device's peak in it."""
    tokens: int
    """Tokens of the planned step; 0 where they are not known."""
    steps: int | None
    device_type: Literal["cpu", "cuda"]

    @property
    def matmul_peak(self) -> float:
        return self.site.matmul_peak

    @property
    def seconds(self) -> float | None:
        """Seconds of all steps; None where their number is not known."""
        return None if self.steps is None else self.steps * self.price.seconds

    @property
    def mfu(self) -> float:
        return self.ledger.flops / self.price.seconds / self.matmul_peak if self.price.seconds else 0.0

    @property
    def fits(self) -> bool:
        # The memory that the process already uses is part of the step: parameters and loaded state.
        return fits(self.ledger.peak_bytes - self.ledger.trained_bytes, self.site.memory_bytes)

    def headline(self) -> str:
        """One line for a terminal."""
        parts = [
            f"{self.ledger.parameters:,} parameters",
            f"{format_flops(self.ledger.flops)} and {format_seconds(self.price.seconds)} per step",
            f"peak {format_bytes(self.ledger.peak_bytes)}",
        ]
        if self.seconds is not None:
            parts.append(f"{self.steps:,} steps in {format_seconds(self.seconds)}")
        if self.seconds is not None and self.site.usd_per_hour is not None:
            parts.append(f"${dollars(self.seconds, self.site.usd_per_hour):,.2f}")
        verdict = "" if self.fits else f"; it does not fit into {format_bytes(self.site.memory_bytes)}"
        return f"napkin: planned on {self.site.name}: {', '.join(parts)}{verdict}"


def plan_step(
    ledger: Ledger,
    *,
    device_type: Literal["cpu", "cuda"],
    on: str | None,
    n_devices: int,
    tokens: int,
    steps: int | None,
    usd_per_hour: float | None,
    watts: float | None,
) -> ProgramPlan:
    """Price a counted step: on this machine's CPU each operator timed alone, on a device of the catalogue by its
    rooflines. Raises NapkinError for a device that the catalogue does not have."""
    precision = Precision(_format_of(ledger), device_type)
    machine = _machine(device_type, on, n_devices)
    ceilings = machine.ceilings(precision)
    if isinstance(machine, CatalogueMachine):
        priced = price_with_launches(ledger, ceilings, factor=machine.efficiency.factor)
    else:
        priced = _timed(ledger, ceilings, device_type, machine.memory_bytes)
    site = machine.site(precision, ceilings)
    given: dict[str, float] = {}
    if usd_per_hour is not None:
        given["usd_per_hour"] = usd_per_hour
    if watts is not None:
        given["watts"] = watts
    return ProgramPlan(ledger, priced, _with(site, given), precision.name, tokens, steps, device_type)


def plan_file_of_program(plan: ProgramPlan) -> PlanFile:
    """The plan as a run's plan.json."""
    priced, site, all_seconds = plan.price, plan.site, plan.seconds or 0.0
    steps = plan.steps or 0
    table = [
        QuantityRow("parameters", "count", None, plan.ledger.parameters),
        QuantityRow("FLOPs per step", "FLOP", None, plan.ledger.flops, note=flops_note(plan.ledger, n_sizes=1)),
        QuantityRow("peak bytes", "bytes", adamw_bytes_rule(plan.ledger.parameters), plan.ledger.peak_bytes),
        QuantityRow("seconds per step", "seconds", None, priced.seconds),
        QuantityRow("MFU", "share", None, plan.mfu),
    ]
    return PlanFile(
        napkin=napkin.__version__,
        versions={"torch": str(torch.__version__)},
        created=datetime.now(UTC).replace(microsecond=0),
        device=PlannedDevice(
            name=site.name,
            kind=plan.device_type,
            matmul_peak=site.matmul_peak,
            format=plan.format,
            precision=plan.format,
            memory_bytes=site.memory_bytes,
        ),
        steps=steps,
        tokens_per_step=plan.tokens,
        fits=plan.fits,
        seconds=all_seconds,
        peak_by_category={str(name): size for name, size in plan.ledger.peak_by_category.items()},
        flops_by_phase=dict(plan.ledger.flops_by("phase")),
        dollars=dollars(all_seconds, site.usd_per_hour) if site.usd_per_hour is not None else None,
        kilowatt_hours=kilowatt_hours(all_seconds, site.watts) if site.watts is not None else None,
        **fields_of_price(priced),
        unknown_operators=plan.ledger.unknown_operators,
        table=tuple(table),
    )


def flops_note(ledger: Ledger | None, *, n_sizes: int) -> str:
    """A note on which FLOPs a table includes, and which are missing."""
    parts = ["rule 6·N·T leaves attention out"]
    if ledger is not None and ledger.elementwise_flops:
        parts.append(f"elementwise work is apart: {format_flops(ledger.elementwise_flops)}")
    if ledger is not None and ledger.unknown_operators:
        parts.append(f"not counted: {with_calls(ledger.unknown_operators)}: register_operator")
    if ledger is not None and ledger.assumption:
        parts.append(ledger.assumption)
    if n_sizes > 1:
        parts.append(f"of one of {n_sizes:,} sizes of batches")
    return "; ".join(parts)


def _format_of(ledger: Ledger) -> PrecisionName:
    formats: Mapping[str, int] = ledger.flops_by("format")
    named = next((name for name in formats if formats[name]), "fp32")
    return named if named in ("bf16", "fp16") else "fp32"  # pyright: ignore[reportReturnType]


def _machine(device_type: Literal["cpu", "cuda"], on: str | None, n_devices: int) -> Machine:
    if on is not None:
        return machine_of(on, device=device_type)
    if device_type == "cuda":
        try:
            return CatalogueMachine(find_device(torch.cuda.get_device_name()), n_devices)
        except NapkinError:
            pass  # measured, as any other machine
    return ThisMachine(device=device_type)


def _timed(ledger: Ledger, ceilings: Ceilings, device_type: str, memory_bytes: int) -> Price:
    timed = time_operators(
        ledger,
        lambda row: roofline_seconds(row, ceilings),
        device_type=device_type,
        max_bytes=memory_bytes // 4,
        max_seconds=TIMING_SECONDS,
    )
    return price(ledger, ceilings, timed, factor=UNPROBED_FACTOR)


def _with(site: Site, given: Mapping[str, float]) -> Site:
    return replace(site, **given) if given else site
