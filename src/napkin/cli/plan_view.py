"""A plan as people see it."""

from typing import Literal

from rich.table import Table

from napkin.accounting.price import Spent
from napkin.accounting.quantity_row import Unit
from napkin.accounting.rules_table import RuleRow, rules_table
from napkin.cli.terminal import out, say
from napkin.planning.compile_choice import describe_compile
from napkin.planning.rule_sizes import sizes_of
from napkin.planning.run_plan import Plan
from napkin.recipe.precision import Precision
from napkin.report.table import format_figure, format_share, reconcile_table
from napkin.units import format_bytes, format_count, format_rate, format_seconds

LARGEST = 8


def describe_plan(plan: Plan, *, by: Literal["operator", "module", "phase"] | None = None) -> None:
    """Print the plan's table, where its seconds go (where `by` says how to split them) and its verdict."""
    site, precision = plan.site, plan.resolved.precision
    peak = f"{precision.products} matrix products at most {format_rate(site.matmul_peak)}"
    if site.measured:
        say(f"plan for {site.name}: {peak}, measured; {format_bytes(site.memory_bytes)} free")
    else:
        say(f"plan for {site.name}: {peak} each, by the datasheet; {format_bytes(site.memory_bytes)} each for tensors")
    if site.measured and precision.emulates_bf16:
        say("bf16 is emulated here, and slower than fp32: good for a look at what it does to a loss")
    if site.n_devices > 1:
        tokens = plan.tokens_per_step // site.n_devices
        has = f"1/{site.n_devices} of the model's parameters" if plan.resolved.strategy == "fsdp" else "the whole model"
        say(f"each has {has} and {tokens:,} of a step's {plan.tokens_per_step:,} tokens; the table is of one")
    out.print(_formats_table(precision))
    out.print(reconcile_table(plan.table()))
    alive = ", ".join(
        f"{category} {format_bytes(size)}"
        for category, size in sorted(plan.ledger.peak_by_category.items(), key=lambda item: -item[1])
    )
    say(f"alive at the peak: {alive}")
    say(describe_compile(plan))
    if by:
        out.print(_seconds_table(getattr(plan.price, f"by_{by}"), plan.price.seconds, by))
    if site.n_devices > 1:
        say(_communication(plan))
    for operator, calls in plan.ledger.unknown_operators.items():
        say(f"operator {operator} is not in napkin's tables: the FLOPs of {calls} calls are missing above")
    if site.disturbed:
        say("other programs held this machine while it was measured: `napkin calibrate` measures it again")
    if plan.fits:
        say(f"it fits, and takes about {format_seconds(plan.seconds)}")


def _communication(plan: Plan) -> str:
    sent = format_bytes(plan.communication.bytes)
    if plan.site.link_bandwidth is None:
        return f"communication: {sent} sent per device and step, over links of unknown bandwidth"
    exposed = format_seconds(plan.exposed_seconds) if plan.exposed_seconds else "nothing"
    took = format_seconds(plan.communication_seconds)
    return f"communication: {sent} sent per device and step in {took}, {exposed} of it exposed"


def _formats_table(precision: Precision) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, style="dim")
    for usage in precision.usage():
        table.add_row(usage.what, usage.format)
    return table


def describe_rules(plan: Plan) -> None:
    """Print the rules of thumb beside the count of the same things; of one device."""
    site = plan.site
    rows = rules_table(
        plan.ledger,
        sizes_of(plan.resolved.per_device),
        memory_bytes=site.memory_bytes,
        flops_per_second=site.n_devices * site.matmul_peak,
        bytes_per_second=site.bytes_per_second,
        training_tokens=plan.steps * plan.tokens_per_step,
    )
    table = Table("rule", "formula", "by rule", "by count", "off", box=None, header_style="bold")
    for column in table.columns[2:]:
        column.justify = "right"
        column.no_wrap = True
    for row in rows:
        table.add_row(row.quantity, row.formula, _figure(row.rule, row.unit), _figure(row.count, row.unit), _off(row))
    out.print(table)
    for row in rows:
        if row.note:
            say(f"{row.quantity}: {row.note}", style="dim")


def _figure(value: float | None, unit: Unit) -> str:
    return format_count(value) if value is not None and unit == "count" else format_figure(value, unit)


def _off(row: RuleRow) -> str:
    if row.error is None:
        return ""
    return f"{row.error:+.1%}" if abs(row.error) < 10 else f"{format_count(1 + row.error)} ×"


def _seconds_table(spent: dict[str, Spent], total: float, by: str) -> Table:
    table = Table(by, "seconds per step", "share", "bound by bytes", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    table.columns[0].overflow = "fold"
    largest, rest = list(spent.items())[:LARGEST], list(spent.values())[LARGEST:]
    if rest:
        others = Spent(sum(each.seconds for each in rest), sum(each.byte_bound_seconds for each in rest))
        largest.append((f"{len(rest)} others", others))
    for name, each in largest:
        bound = each.byte_bound_seconds / each.seconds if each.seconds else 0.0
        table.add_row(
            name or "(outside of modules)",
            format_seconds(each.seconds),
            format_share(each.seconds / total),
            format_share(bound),
        )
    return table
