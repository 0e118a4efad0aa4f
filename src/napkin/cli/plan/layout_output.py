"""What plans of layouts print: the ranking of a search, the ranks and seconds of one layout."""

from collections import Counter
from collections.abc import Sequence

from napkin.accounting.microbenchmark import EVEN_ROUTING
from napkin.cli.common.terminal import print_table, print_verbatim, say
from napkin.errors import NapkinError
from napkin.planning.fit import Tried
from napkin.planning.layouts.layout_plan import LayoutPlan
from napkin.planning.layouts.memory import RankBytes, stages_of_ranks
from napkin.planning.layouts.search import (
    SearchResult,
    layout_name,
    recipe_tables,
    why_slower,
    why_too_large,
)
from napkin.planning.step.site import memory_of
from napkin.units import format_bytes, format_count, format_rate, format_seconds, format_share

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
    print_table(
        ("", "layout", "micro-batch", "peak", "per step", "MFU", "tokens/s", "tokens per dollar"),
        [
            (str(number), str(plan.layout), f"{plan.choice.micro_batch_size:,}", *_figures(plan))
            for number, plan in enumerate(found.plans, start=1)
        ],
        align="llrrrrrr",
        droppable=("tokens per dollar", "tokens/s", "micro-batch"),
    )
    say(f"1: {layout_name(best)}")
    for number, plan in enumerate(found.plans[1:], start=2):
        say(f"{number}: {layout_name(plan)}: {why_slower(plan, best)}")
    for plan in found.too_large:
        say(f"{layout_name(plan)}: {why_too_large(plan)}")
    _print_refused(found.refused)
    _print_seconds(best)
    print_routing(best.expert_seconds, best.seconds)
    _print_counted(best)
    say(_in_all(best))
    say("the best, for a recipe:")
    print_verbatim(recipe_tables(best))


def _figures(plan: LayoutPlan) -> tuple[str, ...]:
    per_hour = plan.site.usd_per_hour
    per_dollar = "" if per_hour is None else format_count(plan.tokens_per_second * 3600 / per_hour)
    return (
        format_bytes(plan.peak_bytes),
        format_seconds(plan.seconds),
        format_share(plan.mfu),
        format_count(plan.tokens_per_second),
        per_dollar,
    )


def _print_refused(refused: Counter[str]) -> None:
    for reason, number in refused.most_common(MANY_REFUSED):
        say(f"left out, {number:,} layouts: {reason}", style="dim")


def print_layout_plan(plan: LayoutPlan) -> None:
    """Print bytes of each rank of the pipeline, and the seconds of a step by what they are for."""
    site = plan.site
    say(f"plan for {site.name}: {layout_name(plan)}, {plan.micro_batches:,} micro-batches per step")
    names = list(plan.ranks[0].by_use)
    blocks = _blocks_of_ranks(plan)
    shown = _rows_shown(len(plan.ranks))
    print_table(
        ("pipeline rank", "blocks", *names, "peak"),
        [(str(rank), blocks[rank], *map(format_bytes, bytes_of(plan.ranks[rank]))) for rank in shown],
        align="rl" + "r" * (len(names) + 1),
    )
    _print_seconds(plan)
    low, high = plan.interval
    say(
        f"MFU {format_share(plan.mfu)}, {format_count(plan.tokens_per_second)} tokens per second; in nine cases of ten "
        f"{format_seconds(low)} to {format_seconds(high)} per step"
    )
    print_routing(plan.expert_seconds, plan.seconds)
    _print_counted(plan)
    if plan.fits:
        say(f"it fits, {format_bytes(plan.peak_bytes)} of {format_bytes(site.memory_bytes)}; {_in_all(plan)}")


def print_routing(expert_seconds: float, seconds: float) -> None:
    """Print what a plan assumes of routed tokens, of which `expert_seconds` of a step depend on."""
    if expert_seconds:
        say(
            f"assumed: {EVEN_ROUTING}, and so among the ranks that divide them; if one rank gets twice as many, it "
            f"computes twice as many FLOPs in experts, and a step takes {format_seconds(expert_seconds)} longer "
            f"({expert_seconds / seconds:+.1%})"
        )


def _print_counted(plan: LayoutPlan) -> None:
    found = plan.bytes_of_largest
    if found.counted is not None and found.count_over_sum is not None:
        place = f"rank {plan.largest_rank} of the pipeline" if plan.layout.pipeline > 1 else "a rank"
        say(
            f"counted on fake tensors, operator by operator: {place} peaks at {format_bytes(found.counted)} "
            f"({found.count_over_sum:+.1%} beside the sum of its parts)"
        )


def bytes_of(rank: RankBytes) -> list[float]:
    """Bytes of a rank by what they are for, and their sum."""
    return [*rank.by_use.values(), rank.total]


def refuse_too_large(plan: LayoutPlan) -> None:
    """Raise NapkinError for a layout that does not fit."""
    if not plan.fits:
        raise NapkinError(
            f"{plan.layout} needs {format_bytes(plan.peak_bytes)} per device, "
            f"{memory_of(plan.site.device_name, plan.site.memory_bytes)}: --layout auto finds layouts that fit"
        )


def _rows_shown(ranks: int) -> list[int]:
    if ranks <= MOST_ROWS:
        return list(range(ranks))
    return sorted({round(row * (ranks - 1) / (MOST_ROWS - 1)) for row in range(MOST_ROWS)})


def _blocks_of_ranks(plan: LayoutPlan) -> list[str]:
    contents = [stage.content for stage in plan.stages]
    told: list[str] = []
    for held in stages_of_ranks(plan.layout):
        stages = [contents[stage] for stage in held]
        number = sum(stage.dense + stage.blocks for stage in stages)
        ends = ["embedding"] * any(stage.first for stage in stages) + ["head"] * any(stage.last for stage in stages)
        told.append(", ".join([str(number), *ends]))
    return told


def _print_seconds(plan: LayoutPlan) -> None:
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
