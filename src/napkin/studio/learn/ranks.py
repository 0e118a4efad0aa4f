"""Waiting among several devices: the bubbles of a pipeline, and the steps of a collective on a ring."""

from typing import Annotated, Any, Literal

import msgspec

from napkin.accounting.pipeline_schedules import SCHEDULES, pipeline_schedule
from napkin.accounting.pipeline_simulation import StageSeconds, simulate_pipeline
from napkin.accounting.rules import all_reduce_seconds_rule
from napkin.accounting.step_rules import bubble_rule
from napkin.errors import NapkinError
from napkin.hardware.ceilings import efficiency_of
from napkin.hardware.cluster import find_cluster, interconnect_of
from napkin.studio.learn.idea import Idea


class PipelineRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A pipeline of equal stages; seconds are parts of a micro-batch's forward pass through a rank."""

    schedule: str = "1f1b"
    ranks: Annotated[int, msgspec.Meta(ge=1, le=16)] = 4
    micro_batches: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8
    stages_per_rank: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    backward: Annotated[float, msgspec.Meta(ge=0.5, le=4)] = 2.0
    """Seconds of a backward pass over those of a forward pass."""
    send: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Seconds of a send between ranks over those of a rank's forward pass."""


def pipeline_answer(asked: PipelineRequest) -> dict[str, Any]:
    """The timeline of a step by ranks, its bubble, and the micro-batches in flight, beside those of the other
    schedules.

    Raises NapkinError where the schedule has no order for these numbers.
    """
    chosen = _simulated(asked, asked.schedule)
    timeline = chosen["timeline"]
    actions = [
        [[action.stage, action.kind, action.micro_batch, start, end] for action, start, end in timed]
        for timed in timeline.ranks
    ]
    others = []
    for name in SCHEDULES:
        try:
            others.append({"name": name, **_figures(_simulated(asked, name))})
        except NapkinError as error:
            others.append({"name": name, "error": str(error).splitlines()[0]})
    return {
        "actions": actions,
        "idle": timeline.idle_seconds,
        **_figures(chosen),
        "rule": None
        if asked.schedule.startswith("zb")
        else bubble_rule(asked.ranks, asked.micro_batches, chosen["stages_per_rank"]),
        "schedules": others,
    }


def _simulated(asked: PipelineRequest, name: str) -> dict[str, Any]:
    """A step by one schedule, whose ranks hold as many stages as it can have."""
    allowed = SCHEDULES[name].stages_per_rank if name in SCHEDULES else None
    per_rank = allowed or asked.stages_per_rank
    schedule = pipeline_schedule(name, asked.ranks, asked.micro_batches, stages_per_rank=per_rank)
    half = asked.backward / 2 / per_rank
    stage = StageSeconds(forward=1 / per_rank, backward_input=half, backward_weight=half)
    return {
        "timeline": simulate_pipeline(schedule, [stage] * schedule.stages, send_seconds=asked.send),
        "stages_per_rank": per_rank,
    }


def _figures(simulated: dict[str, Any]) -> dict[str, Any]:
    timeline, per_rank = simulated["timeline"], simulated["stages_per_rank"]
    # A stage keeps the activations of its share of a rank's blocks.
    kept = [1 / per_rank] * timeline.schedule.stages
    return {
        "seconds": timeline.seconds,
        "bubble": timeline.bubble_fraction,
        "in_flight": max(timeline.peak_activation_bytes(rank, kept) for rank in range(timeline.schedule.ranks)),
        "stages_per_rank": per_rank,
    }


PIPELINES = Idea(
    name="pipelines",
    title="Pipeline bubbles",
    summary="A step of a pipeline rank by rank: GPipe, 1F1B, interleaved, zero bubble, and the idle time of each.",
    text=(
        "Each rank holds some of the blocks, and micro-batches pass through the ranks one after another. At the "
        "beginning the last rank has nothing to compute yet, at the end the first has nothing left: this idle time is "
        "the bubble. More micro-batches make it a smaller part of the step.",
        "The order decides the rest. GPipe runs all forward passes first and so keeps the activations of all "
        "micro-batches; 1F1B begins backward passes as early as it can and keeps those of as many as there are ranks. "
        "Interleaving gives a rank several thin stages, and zero-bubble schedules fill gaps with the gradients of "
        "weights, which no other rank waits for.",
    ),
    formula="bubble = idle time / computing time = (p − 1) / (v · m)\n"
    "p ranks, m micro-batches, v stages per rank; for equal stages, sends that take no time, GPipe, 1F1B, interleaved",
    command="napkin plan --preset llama-3.2-1b --model.context-length 8192 --on 4xH100 --parallelism.pipeline 4 "
    "--training.batch-size 16 --training.micro-batch-size 1",
    files=("accounting/pipeline_schedules.py", "accounting/pipeline_simulation.py"),
    request=PipelineRequest,
    answer=pipeline_answer,
)


class RingRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A collective among devices."""

    operation: Literal["all_reduce", "reduce_scatter", "all_gather"] = "all_reduce"
    ranks: Annotated[int, msgspec.Meta(ge=2, le=8)] = 4
    bytes: Annotated[float, msgspec.Meta(ge=1, le=1e13)] = 1e9
    """Bytes of the whole tensor."""
    device: str = "H100-SXM-80GB"
    devices: Annotated[int, msgspec.Meta(ge=2, le=4096)] = 8
    """Number of devices of the collective whose seconds are wanted."""


def ring_answer(asked: RingRequest) -> dict[str, Any]:
    """Which parts each rank holds after each step, the bytes over each link, and seconds by rule and by the
    interconnect of a device."""
    cluster = find_cluster(f"{asked.devices}x{asked.device}")
    interconnect = interconnect_of(cluster.device, cluster.node, efficiency_of(cluster.device))
    group = seconds = rule = None
    if interconnect is not None:
        group = interconnect.group(asked.devices)
        seconds = interconnect.seconds(asked.operation, asked.bytes, group)
        bandwidth = interconnect.ring_bandwidth(group)
        passes = 2 if asked.operation == "all_reduce" else 1
        rule = passes / 2 * all_reduce_seconds_rule(asked.bytes, asked.devices, bandwidth)
    steps = ring_steps(asked.operation, asked.ranks)
    return {
        "steps": steps,
        "bytes_per_step": asked.bytes / asked.ranks,
        "bytes_per_link": (len(steps) - 1) * asked.bytes / asked.ranks,
        "seconds": seconds,
        "rule": rule,
        "bandwidth": None if interconnect is None or group is None else interconnect.ring_bandwidth(group),
        "nodes": None if group is None else group.nodes,
    }


def ring_steps(operation: str, ranks: int) -> list[dict[str, Any]]:
    """What each rank holds of each part of a tensor before the first step and after each of them.

    `held[rank][part]` are the ranks whose numbers are in the sum that a rank has of a part, an empty list where it has
    none; `sent` are the (sender, part) of the step, and `adds` whether the receiver adds what comes to what it has. A
    rank sends to the next one, all at the same time (Patarasuk &
    Yuan 2009, "Bandwidth optimal all-reduce algorithms").
    """
    reduces, gathers = operation != "all_gather", operation != "reduce_scatter"
    everyone = list(range(ranks))
    held = [[[rank] if reduces or part == (rank + 1) % ranks else [] for part in everyone] for rank in everyone]
    steps: list[dict[str, Any]] = [{"held": _copied(held), "sent": [], "adds": False}]
    for step in range((ranks - 1) * (reduces + gathers)):
        adds = reduces and step < ranks - 1
        # A rank passes on the part that came to it in the step before.
        first = 0 if adds else 1
        turn = step if adds or not reduces else step - (ranks - 1)
        sent = [(rank, (rank + first - turn) % ranks) for rank in everyone]
        moved = [(rank, part, held[rank][part]) for rank, part in sent]
        for rank, part, numbers in moved:
            to = (rank + 1) % ranks
            held[to][part] = sorted({*held[to][part], *numbers}) if adds else numbers
        steps.append({"held": _copied(held), "sent": sent, "adds": adds})
    return steps


def _copied(held: list[list[list[int]]]) -> list[list[list[int]]]:
    return [[list(numbers) for numbers in of_rank] for of_rank in held]


RINGS = Idea(
    name="collectives",
    title="Collectives on a ring",
    summary="An all-reduce step by step: which part each rank holds, the bytes over each link, the seconds.",
    text=(
        "After the backward pass each of n ranks has gradients of its own, and all need the sum. On a ring, the tensor "
        "is cut into n parts, and in each step every rank sends one part to its neighbour. After n − 1 steps each rank "
        "has one part summed over all (a reduce-scatter); after n − 1 further steps all have all of them (an "
        "all-gather).",
        "Every link is busy in every step, and each carries less than twice the tensor however many ranks there are. "
        "What grows with the ranks is the number of steps, and so the latency: small tensors wait for hops, large ones "
        "for bytes.",
    ),
    formula="all-reduce: 2·(n − 1) steps of B/n bytes over each link\nseconds ≥ 2·(n − 1)/n · B / bandwidth\n"
    "reduce-scatter and all-gather: half of it",
    command="napkin bench collective all-reduce",
    files=("hardware/cluster.py", "accounting/rules.py", "accounting/collectives.py"),
    request=RingRequest,
    answer=ring_answer,
)
