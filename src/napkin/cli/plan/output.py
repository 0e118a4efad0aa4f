"""What `napkin plan` prints, and `napkin train` before the first step: the plan, the rules of thumb, memory options."""

from typing import Literal

from napkin.accounting.pricing import Spent
from napkin.accounting.quantities import Unit, format_figure
from napkin.accounting.rules import RuleRow, rules_table
from napkin.cli.common.terminal import print_rich, print_table, say
from napkin.cli.plan.layout_output import print_routing
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.cluster import find_cluster
from napkin.planning.rules.sizes import sizes_of
from napkin.planning.step.failure_cost import failure_lines, failures_are_worth_saying
from napkin.planning.step.failure_plan import planned_failures
from napkin.planning.step.kernel_choice import describe_compile
from napkin.planning.step.machine import Progress
from napkin.planning.step.memory_savings import MemoryOption, describe, memory_options
from napkin.planning.step.run_plan import Plan
from napkin.report.bars import reconcile_table
from napkin.units import (
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    format_share,
)

LARGEST = 8


def print_plan(plan: Plan, *, by: Literal["operator", "module", "phase"] | None = None) -> None:
    """Print the plan's table, its seconds (split as `by` says) and whether the run fits."""
    site, precision = plan.site, plan.resolved.precision
    peak = f"{precision.products} matrix products at most {format_rate(site.matmul_peak)}"
    if site.measured:
        measured = "measured on a busy machine, and may be more" if site.disturbed else "measured"
        say(f"plan for {site.name}: {peak}, {measured}; {format_bytes(site.memory_bytes)} free")
    else:
        memory = format_bytes(site.memory_bytes)
        say(f"plan for {site.name}: {peak} per device, by the datasheet; {memory} per device for tensors")
    if site.measured and precision.emulates_bf16:
        say("bf16 is emulated on this machine, and slower than fp32: use it only to see its effect on the loss")
    if site.n_devices > 1:
        tokens = plan.tokens_per_step // site.n_devices
        say(f"each device has {_held(plan)} and {tokens:,} of the {plan.tokens_per_step:,} tokens per step")
        say("the table is per device")
    print_table((), [(usage.what, usage.format) for usage in precision.usage()], style="dim")
    print_rich(reconcile_table(plan.table()))
    by_category = sorted(plan.ledger.peak_by_category.items(), key=lambda item: -item[1])
    say("memory at the peak: " + ", ".join(f"{category} {format_bytes(size)}" for category, size in by_category))
    say(describe_compile(plan))
    if by:
        _print_seconds(getattr(plan.price, f"by_{by}"), plan.price.seconds, by)
        if (computing := plan.computing) is not None and computing.counted is not None:
            say(
                f"rank 0's counted operators, {format_seconds(computing.counted)} in all, times "
                f"{computing.sum / computing.counted:.3f}: scaled to the layout's busiest rank by the sum of parts",
                style="dim",
            )
    if site.n_devices > 1:
        say(_communication(plan))
        print_routing(plan.expert_seconds, plan.seconds_per_step)
    print_unknown_operators(plan.ledger.unknown_operators)
    print_unknown_scratch(plan.ledger.unknown_scratch)
    if plan.price.disturbed and plan.price.conditions is not None:
        say(
            f"measured on a busy machine: at most these seconds, without other processes "
            f"({plan.price.conditions.describe()})"
        )
    if site.disturbed:
        say(
            "this machine's peaks were measured while it was busy: napkin measures them again when it starts on a "
            "quiet machine, or at once with `napkin calibrate`"
        )
    if plan.epochs is not None:
        in_all = format_count(plan.steps * plan.tokens_per_step)
        say(f"{in_all} tokens in all: {plan.epochs:,.3g} epochs of the training text")
    for file in plan.mixture:
        say(f"{file.path}: {file.share:.1%} of the windows; each document is read {file.epochs:,.3g} times")
    _print_failures(plan)
    if plan.fits:
        at_most = " at most" if plan.disturbed else ""
        alone = ", without other processes" if plan.price.disturbed else ""
        say(f"it fits, and takes about {format_seconds(plan.seconds)}{at_most}{alone}")


def _held(plan: Plan) -> str:
    layout = plan.resolved.layout
    if not layout.splits_only_batches:
        return f"its part of the model ({layout})"
    return f"1/{plan.site.n_devices} of the model's parameters" if layout.strategy == "fsdp" else "the whole model"


def _print_failures(plan: Plan) -> None:
    n_devices, given = plan.site.n_devices, plan.site.mtbf_hours is not None
    if failures_are_worth_saying(plan.seconds, n_devices, given=given):
        for line in failure_lines(planned_failures(plan), given=given):
            say(line)


def _communication(plan: Plan) -> str:
    sent = f"communication: {format_bytes(plan.communication.bytes)} sent per device and step"
    if plan.site.interconnect is None:
        return f"{sent}, over links of unknown bandwidth"
    exposed = format_seconds(plan.exposed_seconds) if plan.exposed_seconds else "none"
    bubble = f"; the pipeline's bubble: {format_seconds(plan.bubble_seconds)}" if plan.bubble_seconds else ""
    return f"{sent}, {format_seconds(plan.communication_seconds)}; exposed: {exposed}{bubble}"


def print_unknown_operators(unknown_operators: dict[str, int]) -> None:
    """Print a line per operator whose FLOPs are not counted."""
    for operator, calls in unknown_operators.items():
        say(f"operator {operator} is not in napkin's tables: the FLOPs of {calls} calls are missing above")


def print_unknown_scratch(unknown_scratch: dict[str, int]) -> None:
    """Print which operators take scratch of unknown size."""
    if unknown_scratch:
        names = ", ".join(f"{name} ({calls:,} ×)" for name, calls in unknown_scratch.items())
        say(
            f"missing from the peak, or not known exactly: what a kernel takes while it runs {names}",
            style="dim",
        )


def print_rules(plan: Plan, *, decode_batch_size: int = 64) -> None:
    """Print the rules of thumb beside the count of the same quantities, of one device."""
    site = plan.site
    rows = rules_table(
        plan.ledger,
        sizes_of(plan.resolved.per_device),
        memory_bytes=site.memory_bytes,
        flops_per_second=site.n_devices * site.matmul_peak,
        bytes_per_second=site.bytes_per_second,
        training_tokens=plan.steps * plan.tokens_per_step,
        decode_batch_size=decode_batch_size,
    )
    cells = [
        (row.quantity, row.formula, _figure(row.rule, row.unit), _figure(row.count, row.unit), _error(row))
        for row in rows
    ]
    print_table(("rule", "formula", "by rule", "by count", "error"), cells, align="llrrr")
    for row in rows:
        if row.note:
            say(f"{row.quantity}: {row.note}", style="dim")


def _figure(value: float | None, unit: Unit) -> str:
    return format_count(value) if value is not None and unit == "count" else format_figure(value, unit)


def _error(row: RuleRow) -> str:
    if row.error is None:
        return ""
    return f"{row.error:+.1%}" if abs(row.error) < 10 else f"{format_count(1 + row.error)} ×"


def _print_seconds(spent: dict[str, Spent], total: float, by: str) -> None:
    largest, rest = list(spent.items())[:LARGEST], list(spent.values())[LARGEST:]
    if rest:
        others = Spent(sum(each.seconds for each in rest), sum(each.byte_bound_seconds for each in rest))
        largest.append((f"{len(rest)} others", others))
    rows = [
        (
            name or "(outside of modules)",
            format_seconds(each.seconds),
            format_share(each.seconds / total),
            format_share(each.byte_bound_seconds / each.seconds if each.seconds else 0.0),
        )
        for name, each in largest
    ]
    print_table((by, "seconds per step", "of the step", "bandwidth-bound"), rows)


def find_memory_options(plan: Plan, on: str | None, progress: Progress) -> list[MemoryOption]:
    """The memory options of a plan for this machine or, with `on`, for devices of the catalogue."""
    if on is None:
        ceilings = calibration_of_this_machine(plan.resolved.precision.device_type)
        return memory_options(plan, ceilings, progress=progress)
    device = find_cluster(on).device
    return memory_options(plan, CatalogueCeilings(device), host_bandwidth=device.host_bandwidth, progress=progress)


def print_memory_options(plan: Plan, found: list[MemoryOption]) -> None:
    """Print peak, FLOPs and seconds of the step with each memory option."""
    ledger, seconds = plan.ledger, plan.seconds_per_step
    base = (format_bytes(ledger.peak_bytes), "", format_flops(ledger.hardware_flops), format_seconds(seconds))
    rows = [
        ("(the plan)", *base),
        *(
            (
                describe(option.fields),
                format_bytes(option.peak_bytes),
                f"{1 - option.peak_bytes / ledger.peak_bytes:.1%}",
                f"{option.hardware_flops / ledger.hardware_flops - 1:+.1%}",
                f"{option.seconds / seconds - 1:+.1%}",
            )
            for option in found
        ),
    ]
    print_table(("with training.", "peak", "saves", "FLOPs", "seconds per step"), rows)
    say("bytes and FLOPs by count, with recomputation; seconds by rooflines; each option is applied alone", style="dim")
