"""The output of `napkin plan`, and `napkin train` before the first step: the plan, the rules of thumb, memory options;
of layouts the ranking of a search, and the ranks and seconds of one.
"""

from collections.abc import Sequence
from typing import Literal

from napkin.accounting.microbenchmark import EVEN_ROUTING
from napkin.accounting.pricing import Spent
from napkin.accounting.quantities import format_figure
from napkin.accounting.rules import rules_table
from napkin.cli.common.terminal import print_rich, print_table, print_verbatim, say
from napkin.errors import NapkinError
from napkin.hardware.calibration_cache import calibration_of_this_machine
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.cluster import find_cluster
from napkin.planning.fit import Tried
from napkin.planning.layouts.layout_plan import LayoutPlan
from napkin.planning.layouts.search import (
    SearchResult,
    layout_name,
    recipe_tables,
    why_slower,
    why_too_large,
)
from napkin.planning.layouts.stages import stages_of_ranks
from napkin.planning.rules import sizes_of
from napkin.planning.step.failure_cost import failure_lines, failures_are_worth_saying
from napkin.planning.step.kernel_choice import describe_compile
from napkin.planning.step.machine import Progress
from napkin.planning.step.memory_savings import MemoryOption, describe, memory_options
from napkin.planning.step.plan_file import planned_failures
from napkin.planning.step.run_plan import Plan
from napkin.planning.step.site import memory_of
from napkin.recipe.precision import NARROW
from napkin.report.headline import reconcile_table
from napkin.units import (
    format_bytes,
    format_count,
    format_flops,
    format_rate,
    format_seconds,
    format_share,
)

MOST_ROWS = 16
MANY_REFUSED = 3


def print_search(found: SearchResult, chosen_batch: str | None) -> None:
    """Print the best layouts, why the others lose, and the tables of a recipe for the best."""
    best, site = found.plans[0], found.plans[0].site
    peak = f"{format_rate(site.matmul_peak)} each by the datasheet, {format_bytes(site.memory_bytes)} for tensors"
    say(f"layouts of {site.name}: {peak}")
    say(f"{found.considered:,} layouts divide the recipe, {found.evaluated:,} of them were worked out")
    if chosen_batch:
        say(chosen_batch)
    per_hour = site.usd_per_hour
    rows = [
        (
            str(number),
            str(plan.layout),
            f"{plan.choice.micro_batch_size:,}",
            format_bytes(plan.peak_bytes),
            format_seconds(plan.seconds),
            format_share(plan.mfu),
            format_count(plan.tokens_per_second),
            "" if per_hour is None else format_count(plan.tokens_per_second * 3600 / per_hour),
        )
        for number, plan in enumerate(found.plans, start=1)
    ]
    headings = ("", "layout", "micro-batch", "peak", "per step", "MFU", "tokens/s", "tokens per dollar")
    print_table(headings, rows, align="llrrrrrr", droppable=("tokens per dollar", "tokens/s", "micro-batch"))
    say(f"1: {layout_name(best)}")
    for number, plan in enumerate(found.plans[1:], start=2):
        say(f"{number}: {layout_name(plan)}: {why_slower(plan, best)}")
    for plan in found.too_large:
        say(f"{layout_name(plan)}: {why_too_large(plan)}")
    for reason, number in found.refused.most_common(MANY_REFUSED):
        say(f"left out, {number:,} layouts: {reason}", style="dim")
    _layout_output_print_seconds(best)
    print_routing(best.expert_seconds, best.seconds)
    _print_counted(best)
    say(_in_all(best))
    say("the best, for a recipe:")
    print_verbatim(recipe_tables(best))


def print_layout_plan(plan: LayoutPlan) -> None:
    """Print bytes of each rank of the pipeline, and the seconds of a step by what they are for."""
    site = plan.site
    trained = "" if plan.stack == "napkin" else f" with {plan.stack}"
    _say_that_it_does_not_fit(plan)
    say(f"plan for {site.name}{trained}: {layout_name(plan)}, {plan.micro_batches:,} micro-batches per step")
    names, last = list(plan.ranks[0].by_use), len(plan.ranks) - 1
    blocks = _blocks_of_ranks(plan)
    # Of many ranks, a few at equal distances, with the first and the last among them.
    shown = sorted({round(row * last / (MOST_ROWS - 1)) for row in range(MOST_ROWS)})
    print_table(
        ("pipeline rank", "blocks", *names, "peak"),
        [
            (str(rank), blocks[rank], *map(format_bytes, (*plan.ranks[rank].by_use.values(), plan.ranks[rank].total)))
            for rank in shown
        ],
        align="rl" + "r" * (len(names) + 1),
    )
    _layout_output_print_seconds(plan)
    low, high = plan.interval
    say(
        f"MFU {format_share(plan.mfu)}{_of_peak(plan)}, {format_count(plan.tokens_per_second)} tokens per second; in "
        "nine cases of ten "
        f"{format_seconds(low)} to {format_seconds(high)} per step"
    )
    print_routing(plan.expert_seconds, plan.seconds)
    _print_counted(plan)
    if plan.fits:
        say(f"it fits, {format_bytes(plan.peak_bytes)} of {format_bytes(site.memory_bytes)}; {_in_all(plan)}")


def _say_that_it_does_not_fit(plan: Plan | LayoutPlan) -> None:
    """Print first that a step needs more than the devices have; the error that ends the command names what would."""
    if not plan.fits:
        memory = memory_of(plan.site.device_name, plan.site.memory_bytes)
        say(f"it does not fit: a step needs {format_bytes(plan.peak_bytes)}, {memory}: the last line says what would")


def _of_peak(plan: LayoutPlan) -> str:
    """Name the peak that an MFU is of, where products are in another format."""
    precision = plan.resolved.precision
    return f" of the peak in {precision.products}" if precision.name in NARROW else ""


def print_routing(expert_seconds: float, seconds: float) -> None:
    """Print what a plan assumes of routed tokens, of which `expert_seconds` of a step depend on."""
    if expert_seconds:
        say(
            f"assumed: {EVEN_ROUTING}, and so among the ranks that divide them; if one rank gets twice as many, it "
            f"computes twice as many FLOPs in experts, and a step takes {format_seconds(expert_seconds)} longer "
            f"({expert_seconds / seconds:+.1%})"
        )


def _print_counted(plan: LayoutPlan) -> None:
    bytes_of = plan.bytes_of_largest
    if bytes_of.counted is not None and bytes_of.count_over_sum is not None:
        place = f"rank {plan.largest_rank} of the pipeline" if plan.layout.pipeline > 1 else "a rank"
        say(
            f"counted on fake tensors, operator by operator: {place} peaks at {format_bytes(bytes_of.counted)} "
            f"({bytes_of.count_over_sum:+.1%} beside the sum of its parts)"
        )


def refuse_too_large(plan: LayoutPlan) -> None:
    """Raise NapkinError for a layout that does not fit."""
    if not plan.fits:
        raise NapkinError(
            f"{plan.layout} needs {format_bytes(plan.peak_bytes)} per device, "
            f"{memory_of(plan.site.device_name, plan.site.memory_bytes)}: --layout auto finds layouts that fit"
        )


def _blocks_of_ranks(plan: LayoutPlan) -> list[str]:
    contents = [stage.content for stage in plan.stages]
    labels: list[str] = []
    for numbers in stages_of_ranks(plan.layout):
        stages = [contents[stage] for stage in numbers]
        number = sum(stage.n_blocks for stage in stages)
        ends = ["embedding"] * any(stage.first for stage in stages) + ["head"] * any(stage.last for stage in stages)
        labels.append(", ".join([str(number), *ends]))
    return labels


def _layout_output_print_seconds(plan: LayoutPlan) -> None:
    rows: list[Sequence[str]] = [
        (kind.replace("_", ", "), format_seconds(seconds), format_share(seconds / plan.seconds), "")
        for kind, seconds in plan.by_kind.items()
    ]
    hidden = {f"{sender} exposed": seconds for sender, seconds in plan.hidden.items()}
    rows = [(*row[:3], format_seconds(hidden.pop(row[0])) if row[0] in hidden else "") for row in rows]
    rows += [(kind, "none", "", format_seconds(seconds)) for kind, seconds in hidden.items()]
    rows.append(("step", format_seconds(plan.seconds), "", ""))
    print_table(("busiest rank", "seconds per step", "of the step", "hidden"), rows)


def _in_all(plan: LayoutPlan) -> str:
    recipe = plan.resolved.recipe
    steps = recipe.training.steps
    price = "" if plan.dollars is None else f", ${plan.dollars:,.0f}"
    tokens = format_count(steps * recipe.tokens_per_step)
    return f"all {steps:,} steps, {tokens} tokens: {format_seconds(steps * plan.seconds)}{price}"


def print_tried(tried: list[Tried]) -> None:
    """Print what each number of devices takes; the answer is the last of `tried`."""
    rows = [
        (
            f"{each.n_devices:,}",
            str(each.plan.layout),
            format_share(each.plan.mfu),
            format_seconds(each.seconds),
            "" if each.dollars is None else f"${each.dollars:,.0f}",
        )
        for each in sorted(tried, key=lambda each: each.n_devices)
    ]
    print_table(("devices", "best layout", "MFU", "all steps", "dollars"), rows, align="rlrrr", droppable=("MFU",))
    answer = tried[-1]
    price = "" if answer.dollars is None else f" for ${answer.dollars:,.0f}"
    say(f"{answer.n_devices:,} devices, {layout_name(answer.plan)}: {format_seconds(answer.seconds)}{price}")


LARGEST = 8


def print_plan(plan: Plan, *, by: Literal["operator", "module", "phase"] | None = None) -> None:
    """Print the plan's table, its seconds (split as `by` says) and whether the run fits."""
    site, precision = plan.site, plan.resolved.precision
    peak = f"{precision.products} matrix products at most {format_rate(site.matmul_peak)}"
    _say_that_it_does_not_fit(plan)
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
        layout, part = plan.resolved.layout, "the whole model"
        if not layout.splits_only_batches:
            part = f"its part of the model ({layout})"
        elif layout.strategy == "fsdp":
            part = f"1/{site.n_devices} of the model's parameters"
        say(f"each device has {part} and {tokens:,} of the {plan.tokens_per_step:,} tokens per step")
        say("the table is per device")
    print_table((), [(usage.what, usage.format) for usage in precision.usage()], style="dim")
    print_rich(reconcile_table(plan.table()))
    by_category = sorted(plan.memory.peak_by_category.items(), key=lambda item: -item[1])
    say("memory at the peak: " + ", ".join(f"{category} {format_bytes(size)}" for category, size in by_category))
    say(describe_compile(plan))
    if plan.deterministic is not None:
        say(plan.deterministic.describe())
    if by:
        _print_seconds(getattr(plan.price, f"by_{by}"), plan.price.seconds, by)
        if (computing := plan.computing) is not None and computing.counted is not None:
            say(
                f"rank 0's counted operators, {format_seconds(computing.counted)} in all, times "
                f"{computing.sum / computing.counted:.3f}: scaled to the layout's busiest rank by the sum of parts",
                style="dim",
            )
    if site.n_devices > 1:
        sent = f"communication: {format_bytes(plan.communication.bytes)} sent per device and step"
        if site.interconnect is None:
            say(f"{sent}, over links of unknown bandwidth")
        else:
            exposed = format_seconds(plan.exposed_seconds) if plan.exposed_seconds else "none"
            bubble = f"; the pipeline's bubble: {format_seconds(plan.bubble_seconds)}" if plan.bubble_seconds else ""
            say(f"{sent}, {format_seconds(plan.communication_seconds)}; exposed: {exposed}{bubble}")
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
    given = site.mtbf_hours is not None
    if failures_are_worth_saying(plan.seconds, site.n_devices, given=given):
        for line in failure_lines(planned_failures(plan), given=given):
            say(line)
    if plan.fits:
        at_most = " at most" if plan.disturbed else ""
        alone = ", without other processes" if plan.price.disturbed else ""
        say(f"it fits, and takes about {format_seconds(plan.seconds)}{at_most}{alone}")


def print_unknown_operators(unknown_operators: dict[str, int]) -> None:
    """Print a line per operator whose FLOPs are not counted."""
    for operator, calls in unknown_operators.items():
        say(f"operator {operator} is not in napkin's tables: the FLOPs of {calls} calls are missing above")


def print_unknown_scratch(unknown_scratch: dict[str, int]) -> None:
    """Print which operators take scratch of unknown size."""
    if unknown_scratch:
        names = ", ".join(f"{name} ({calls:,} ×)" for name, calls in unknown_scratch.items())
        say(
            f"missing from the peak, or not known exactly: the scratch memory of {names}",
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
    cells = []
    for row in rows:
        by_rule, by_count = (
            format_count(value) if value is not None and row.unit == "count" else format_figure(value, row.unit)
            for value in (row.rule, row.count)
        )
        error = "" if row.error is None else f"{format_count(1 + row.error)} ×"
        if row.error is not None and abs(row.error) < 10:
            error = f"{row.error:+.1%}"
        cells.append((row.quantity, row.formula, by_rule, by_count, error))
    print_table(("rule", "formula", "by rule", "by count", "error"), cells, align="llrrr")
    for row in rows:
        if row.note:
            say(f"{row.quantity}: {row.note}", style="dim")


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
