"""The step of several ranks: the seconds that each computes, and those that it waits for.

Ranks of this machine were measured: each of their operators, and their collectives. Those of a datasheet's devices are
planned part by part, as `plan_layout` does.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from napkin.accounting.ledger import Ledger, Row
from napkin.accounting.pipeline_simulation import PipelineTimeline, StageSeconds, simulate_pipeline
from napkin.accounting.pricing import Price, Spent
from napkin.accounting.rank_seconds import Communication
from napkin.planning.layouts.layout_plan import LayoutPlan
from napkin.planning.layouts.memory import schedule_of, stages_of_ranks
from napkin.planning.step.run_plan import Plan
from napkin.planning.step.site import Site
from napkin.recipe.resolved import ResolvedRecipe

PriceAll = Callable[[Sequence[Ledger]], list[Price]]


def planned_layout(
    resolved: ResolvedRecipe, ledgers: Mapping[int, Ledger], price: Price, site: Site, layout: LayoutPlan
) -> Plan:
    """The plan of a datasheet's devices: bytes and FLOPs of the counted ranks, the seconds of the layout's plan.

    `price` has the seconds of rank 0's operators; they are scaled to what the busiest rank computes, which
    `Plan.computing` explains.
    """
    exposed = sum(seconds for kind, seconds in layout.by_kind.items() if kind.endswith("exposed"))
    bubble = layout.by_kind.get("bubble", 0.0)
    computing = layout.seconds - exposed - bubble
    return Plan(
        resolved,
        ledgers[0],
        dataclasses.replace(_scaled(price, computing / price.seconds), factor=layout.factor),
        site,
        ranks=ledgers if len(ledgers) > 1 else {},
        layout=dataclasses.replace(layout, counted_bytes=max(ledger.peak_bytes for ledger in ledgers.values())),
        communication=Communication.of(ledgers[0]),
        communication_seconds=exposed + sum(layout.hidden.values()),
        exposed_seconds=exposed,
        bubble_seconds=bubble,
        operator_seconds=price.seconds,
    )


def planned_ranks(resolved: ResolvedRecipe, ledgers: Mapping[int, Ledger], price: PriceAll, site: Site) -> Plan:
    """The plan of ranks whose operators can be timed, among which rank 0 waits for collectives and for other stages."""
    parts = [_stages(resolved, rank, ledger) for rank, ledger in ledgers.items()]
    prices = iter(price([*ledgers.values(), *(part for stages in parts for part in stages)]))
    whole = [next(prices) for _ in ledgers]
    planned = Plan(
        resolved,
        ledgers[0],
        whole[0],
        site,
        ranks=ledgers if len(ledgers) > 1 else {},
        communication=Communication.of(ledgers[0]),
    )
    if site.interconnect is None:
        return planned
    communication = planned.communication
    if len(ledgers) > 1:
        # Messages between stages are part of the simulated pipeline.
        communication = communication.without("send")
    planned = dataclasses.replace(
        planned,
        communication_seconds=planned.communication.seconds(site.interconnect),
        exposed_seconds=communication.exposed_seconds(
            site.interconnect,
            forward_seconds=_seconds_in(whole[0], "forward"),
            backward_seconds=_seconds_in(whole[0], "backward") + _seconds_in(whole[0], "recompute"),
        ),
    )
    if len(ledgers) == 1:
        return planned
    stages = [[next(prices) for _ in each] for each in parts]
    timeline = _simulated(planned, stages)
    # The ranks agree on the norm of all gradients: none updates before the last one can, nor begins the next step.
    last = max(_seconds_in(each, "optimizer") for each in whole) - _seconds_in(whole[0], "optimizer")
    return dataclasses.replace(planned, bubble_seconds=timeline.idle_seconds[0] + last)


def _simulated(planned: Plan, prices: Sequence[Sequence[Price]]) -> PipelineTimeline:
    """The pipeline of a step whose ranks have stages of those prices."""
    layout, training = planned.resolved.layout, planned.resolved.per_device.training
    micro_batches = training.batch_size // training.resolved_micro_batch_size
    seconds = {
        stage: _stage_seconds(price, micro_batches)
        for held, of_rank in zip(stages_of_ranks(layout), prices, strict=True)
        for stage, price in zip(held, of_rank, strict=True)
    }
    schedule = schedule_of(layout.schedule, layout.pipeline, layout.stages_per_rank, micro_batches)
    sends = planned.communication.only("send")
    interconnect = planned.site.interconnect
    sending = 0.0 if interconnect is None or not sends.times else sends.seconds(interconnect) / sends.times
    return simulate_pipeline(schedule, [seconds[stage] for stage in sorted(seconds)], send_seconds=sending)


def _stages(resolved: ResolvedRecipe, rank: int, ledger: Ledger) -> list[Ledger]:
    """The rows of each stage that a rank of a pipeline has, in the order of its stages; none without a pipeline."""
    layout = resolved.layout
    if layout.pipeline == 1:
        return []
    held = stages_of_ranks(layout)[layout.coordinates(rank)["pipeline"]]
    blocks = layout.blocks_of_stages(resolved.recipe.model.n_layers)
    rows: dict[int, list[Row]] = {stage: [] for stage in held}
    for row in ledger.rows:
        if row.phase != "optimizer":
            rows[_stage_of(row, held, blocks)].append(row)
    return [dataclasses.replace(ledger, rows=tuple(rows[stage])) for stage in held]


def _stage_of(row: Row, held: Sequence[int], blocks: Sequence[range]) -> int:
    """The stage that computes a row: that of its block, or the first or last for what lies outside of blocks."""
    name, _, rest = row.module.partition(".")
    if name == "blocks":
        number = int(rest.partition(".")[0])
        return next(stage for stage in held if number in blocks[stage])
    return held[0] if name in ("embedding", "positions") else held[-1]


def _stage_seconds(price: Price, micro_batches: int) -> StageSeconds:
    """Seconds of one micro-batch. Where a schedule splits the backward pass, each half takes as long."""
    forward, backward, again = (_seconds_in(price, phase) for phase in ("forward", "backward", "recompute"))
    return StageSeconds(
        forward / micro_batches, backward / 2 / micro_batches, backward / 2 / micro_batches, again / micro_batches
    )


def _seconds_in(price: Price, phase: str) -> float:
    spent = price.by_phase.get(phase)
    return 0.0 if spent is None else spent.seconds


def _scaled(price: Price, factor: float) -> Price:
    def scaled(parts: Mapping[Any, Spent]) -> dict[Any, Spent]:
        return {name: Spent(factor * each.seconds, factor * each.byte_bound_seconds) for name, each in parts.items()}

    return dataclasses.replace(
        price,
        seconds=factor * price.seconds,
        byte_bound_seconds=factor * price.byte_bound_seconds,
        by_operator=scaled(price.by_operator),
        by_module=scaled(price.by_module),
        by_phase=scaled(price.by_phase),
        by_call_site=scaled(price.by_call_site),
    )
