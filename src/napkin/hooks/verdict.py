"""The verdict on a watched loop, in sentences: what it waits for, how it compares with its plan, and why."""

from napkin.accounting.ledger import Ledger
from napkin.hooks.loop_figures import LoopFigures
from napkin.units import format_bytes, format_flops, format_share

FEWEST_STEPS = 3
"""Timed steps that a sentence about seconds needs."""
NOTABLE = 0.05
"""A part of the loop's time from which on it is named."""
UNLIKE_PLAN = 0.1
"""Slower or faster than planned by this much is said; within the plan's own factor, it is said to be."""
PEAK_UNLIKE_PLAN = 0.05


def verdict(loop: LoopFigures) -> list[str]:
    """Sentences, the one with the most seconds first; none before three steps were timed."""
    busy = loop.conditions.describe() if loop.conditions is not None and loop.conditions.busy else ""
    timed = sum(map(len, loop.step_seconds.values()))
    if timed < FEWEST_STEPS:
        return _missing_ranks(loop)
    causes = sorted([*_waiting(loop), *_between(loop), *_slower(loop), *_ranks(loop)], key=lambda each: -each[0])
    said = [*_missing_ranks(loop), *(sentence for _, sentence in causes)]
    if busy:
        said.insert(0, f"runs on a busy machine: {busy}; seconds beside the plan are those without them")
    said += _work(loop)
    if not said and loop.plan is not None:
        said.append("as planned: seconds, FLOPs and peak bytes are within 10%, and it does not wait for data")
    return said


def _waiting(loop: LoopFigures) -> list[tuple[float, str]]:
    share = loop.waiting_share
    if share is None or share < NOTABLE:
        return []
    if loop.n_workers == 0:
        why = "the batches are made in the training process: give the data loader workers (num_workers=2 or more)"
    elif loop.n_workers:
        why = f"{loop.n_workers} workers make batches too slowly: more workers, or less work per batch"
    else:
        why = "batches are made more slowly than steps take them: make them in other processes, ahead of the step"
    return [(loop.spent.data, f"waits for data {format_share(share)} of the time: {why}")]


def _between(loop: LoopFigures) -> list[tuple[float, str]]:
    whole = loop.seconds - loop.spent.recorded
    return [
        (seconds, f"spends {format_share(seconds / whole)} of the time in {name}, outside of steps")
        for name, seconds in loop.spent.other.items()
        if whole > 0 and seconds / whole >= NOTABLE
    ]


def _missing_ranks(loop: LoopFigures) -> list[str]:
    if not loop.ranks.missing:
        return []
    names, many = ", ".join(map(str, loop.ranks.missing)), len(loop.ranks.missing) > 1
    who, whose = (f"ranks {names}", "their") if many else (f"rank {names}", "its")
    return [f"{who} did not report at the end of the loop: {whose} bytes are missing"]


def _ranks(loop: LoopFigures) -> list[tuple[float, str]]:
    """A sentence on how long rank 0's step waits for others."""
    own = next((each for each in loop.rank_seconds if each.rank == 0), None)
    if own is None or not own.seconds or own.exposed_seconds < NOTABLE * own.seconds:
        return []
    of_others = format_share(own.waiting_seconds / own.exposed_seconds)
    who = f": rank {loop.straggler} is the straggler" if loop.straggler is not None else ""
    said = (
        f"waits for collectives {format_share(own.exposed_seconds / own.seconds)} of a step, "
        f"{of_others} of it until the last rank had entered{who}"
    )
    return [(own.exposed_seconds * loop.steps, said)]


def _slower(loop: LoopFigures) -> list[tuple[float, str]]:
    plan, seconds = loop.plan, loop.seconds_alone or loop.seconds_per_step
    if plan is None or seconds is None or not plan.price.seconds:
        return []
    ratio = seconds / plan.price.seconds
    if abs(ratio - 1) < UNLIKE_PLAN:
        return []
    excess = (seconds - plan.price.seconds) * loop.steps
    within = (
        "" if max(ratio, 1 / ratio) > plan.price.factor else f", within the plan's factor of {plan.price.factor:.2f}"
    )
    if ratio < 1:
        return [(0.0, f"faster than planned by {format_share(1 - ratio)}{within}")]
    why = _reasons(loop)
    how = f"slower than planned by {format_share(ratio - 1)}" if ratio < 2 else f"{ratio:.3g} times the planned seconds"
    return [(excess, f"{how}{within}{': ' if why else ''}{why}")]


def _reasons(loop: LoopFigures) -> str:
    """Name the parts of the step's ledger that take time and need not, by the plan's own seconds."""
    plan, measured = loop.plan, loop.measurement
    assert plan is not None
    ledger = measured.ledger if measured is not None else plan.ledger
    reasons = []
    if measured is not None and measured.ledger.flops > 1.01 * plan.ledger.flops:
        reasons.append(
            f"it computes {format_flops(measured.ledger.flops)} in place of {format_flops(plan.ledger.flops)}"
        )
    share = unfused_attention_share(ledger, {site: spent.seconds for site, spent in plan.price.by_call_site.items()})
    if share >= NOTABLE:
        reasons.append(f"attention runs unfused ({format_share(share)} of the planned seconds)")
    if plan.price.conditions is not None and plan.price.disturbed:
        reasons.append(f"other processes: {plan.price.conditions.describe()} while it was planned")
    if not reasons:
        bound = plan.price.byte_bound_share
        if bound > 0.5:
            reasons.append(
                f"{format_share(bound)} of the planned seconds move bytes: fusing them (torch.compile) saves most"
            )
        else:
            reasons.append("what is between its operators (Python, launches) is not in the plan")
    return "; ".join(reasons)


def unfused_attention_share(ledger: Ledger, seconds: dict[tuple[str, str, str], float]) -> float:
    """The part of the planned seconds in scores, masks, softmax and products of attention that no kernel fuses."""
    fused = {row.module for row in ledger.rows if row.is_fused_attention}
    sites = {
        (row.operator, row.module, row.phase)
        for row in ledger.rows
        if row.component == "attention scores" and not row.is_fused_attention and row.module not in fused
    }
    products = any(row.of_activations and not row.is_fused_attention for row in ledger.rows)
    whole = sum(seconds.values())
    return sum(seconds.get(site, 0.0) for site in sites) / whole if products and whole else 0.0


def _work(loop: LoopFigures) -> list[str]:
    plan, measured = loop.plan, loop.measurement
    if measured is None:
        return []
    said = []
    ledger = measured.ledger
    if plan is not None and loop.typical_size in loop.recorded:
        if ledger.flops != plan.ledger.flops:
            more = format_share(abs(ledger.flops / plan.ledger.flops - 1)) if plan.ledger.flops else "all of them"
            said.append(f"computes {more} {'more' if ledger.flops > plan.ledger.flops else 'fewer'} FLOPs than counted")
        ratio = measured.peak_bytes / plan.ledger.peak_bytes if plan.ledger.peak_bytes else 1.0
        if abs(ratio - 1) > PEAK_UNLIKE_PLAN:
            planned, metered = format_bytes(plan.ledger.peak_bytes), format_bytes(measured.peak_bytes)
            said.append(f"peak {metered}, where {planned} were counted")
    again = ledger.hardware_flops - ledger.flops
    if again > NOTABLE * ledger.hardware_flops:
        said.append(f"recomputes {format_share(again / ledger.hardware_flops)} of what it computes, to save memory")
    if ledger.unknown_operators:
        names = ", ".join(ledger.unknown_operators)
        said.append(f"FLOPs of these operators are not known, and not in the count: {names}: register_operator")
    return said
