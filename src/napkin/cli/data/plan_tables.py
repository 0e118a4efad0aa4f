"""The tables of `napkin data plan` and `napkin data reconcile`."""

from collections.abc import Callable

from napkin.cli.common.terminal import print_table, say
from napkin.curation.engine.corpus_plan import CorpusPlan, Estimate, Flow, ReconciledRow, Reconciliation
from napkin.units import format_bytes, format_count, format_seconds, format_share


def print_plan(plan: CorpusPlan) -> None:
    """What is expected at each place of the pipeline, and what it takes."""
    rows = [_flow_row("read", plan.read, plan.read_seconds)]
    for stage in plan.stages:
        rows.append(_flow_row(stage.name, stage.remained, stage.seconds))
        rows += [[f"  {rule}", f"-{format_count(n)}", "", "", ""] for rule, n in _largest(stage.dropped)]
    rows.append(["written", "", format_bytes(plan.corpus_bytes), "", format_seconds(plan.write_seconds)])
    tokens = "tokens" if plan.tokens_are_counted else "tokens at 4 bytes"
    print_table(["after", "documents", "bytes of text", tokens, "seconds of a core"], rows, align="lrrrr")
    say(
        f"from a sample of {format_share(plan.sampled_share)} of the documents in {format_bytes(plan.input_bytes)}, of "
        f"{plan.sampled_files:,} of {plan.input_files:,} files; in brackets intervals of 90%"
    )
    if any(stage.compares for stage in plan.stages):
        say("stages that compare documents find few duplicates in a sample: a larger --share narrows what follows them")
    cost = "" if plan.dollars is None else f", ${plan.dollars:,.2f}"
    say(f"it takes about {format_seconds(plan.seconds)} with {plan.workers} workers{cost}")


def print_reconciliation(reconciled: Reconciliation) -> None:
    """Plan beside meter, place by place."""
    rows = [_reconciled_row(row) for row in reconciled.rows]
    print_table(["after", "what", "planned", "metered", "meter / plan", "in the interval"], rows, align="llrrrl")
    inside = sum(row.is_inside for row in reconciled.rows)
    say(f"{inside:,} of {len(reconciled.rows):,} figures are in their intervals of 90%")
    if reconciled.stage_seconds:
        rows = [
            [name, format_seconds(planned), format_seconds(metered), f"{metered / planned:.2f}" if planned else "–"]
            for name, planned, metered in reconciled.stage_seconds
        ]
        print_table(["stage", "planned seconds", "metered seconds", "meter / plan"], rows, align="lrrr")


def _flow_row(name: str, flow: Flow, seconds: float) -> list[str]:
    documents = _interval(flow.documents, format_count)
    return [
        name,
        documents,
        _interval(flow.bytes, format_bytes),
        _interval(flow.tokens, format_count),
        format_seconds(seconds),
    ]


def _interval(estimate: Estimate, show: Callable[[int], str]) -> str:
    value = show(round(estimate.value))
    if estimate.low == estimate.high:
        return str(value)
    return f"{value} [{show(round(estimate.low))} – {show(round(estimate.high))}]"


def _largest(dropped: dict[str, float]) -> list[tuple[str, int]]:
    most = sorted(dropped.items(), key=lambda each: -each[1])[:5]
    return [(rule, round(n)) for rule, n in most]


def _reconciled_row(row: ReconciledRow) -> list[str]:
    show = format_bytes if row.what == "bytes" else format_count
    ratio = f"{row.metered / row.planned.value:.3f}" if row.planned.value else "–"
    return [
        row.place,
        row.what,
        _interval(row.planned, show),
        str(show(round(row.metered))),
        ratio,
        "yes" if row.is_inside else "no",
    ]
