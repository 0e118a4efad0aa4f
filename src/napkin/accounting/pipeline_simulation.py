"""When the actions of a pipeline schedule run: start and end of each, and so idle seconds and activations in flight.

An action starts as soon as its rank is free and its input has arrived. A forward waits for the output of the stage
before it, a backward for the gradient of the stage after it (the last stage's for its own forward), and
`backward_weight` for `backward_input` of the same stage. So every action waits for exactly one other, and each is
visited once: a rank runs until its next action lacks its input, and the rank that sends that input wakes it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from napkin.accounting.pipeline_schedules import Kind, PipelineAction, PipelineSchedule, check_index
from napkin.errors import NapkinError

LONGEST_ACTION = 1e12
"""The most seconds of one action: with longer ones the sums of a step might not be finite."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds that one micro-batch takes in one stage; they add up with `+`, block by block with `*`."""

    forward: float = 0.0
    backward_input: float = 0.0
    """Seconds for the gradient of the stage's input."""
    backward_weight: float = 0.0
    """Seconds for the gradients of its parameters."""
    recompute: float = 0.0
    """Seconds for what activation checkpointing computes again, before the gradient of the input."""

    def of(self, kind: Kind) -> float:
        match kind:
            case "forward":
                return self.forward
            case "backward":
                return self.recompute + self.backward_input + self.backward_weight
            case "backward_input":
                return self.recompute + self.backward_input
            case "backward_weight":
                return self.backward_weight

    def __add__(self, other: "StageSeconds") -> "StageSeconds":
        return StageSeconds(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
            self.recompute + other.recompute,
        )

    def __mul__(self, times: float) -> "StageSeconds":
        return StageSeconds(
            self.forward * times, self.backward_input * times, self.backward_weight * times, self.recompute * times
        )


def stage_seconds(
    blocks: Sequence[int],
    block: StageSeconds,
    *,
    embedding: StageSeconds | None = None,
    head: StageSeconds | None = None,
) -> list[StageSeconds]:
    """Seconds of each stage of a model of like blocks.

    Args:
        blocks: how many blocks each stage has; they need not be equal.
        block: seconds of one block; with activation checkpointing, its `recompute` is not 0.
        embedding: what the first stage computes besides.
        head: what the last stage computes besides: last norm, head and loss.

    >>> [each.forward for each in stage_seconds([3, 4, 2], StageSeconds(1.0), head=StageSeconds(1.5))]
    [3.0, 4.0, 3.5]
    """
    stages = [block * number for number in blocks]
    if stages and embedding:
        stages[0] += embedding
    if stages and head:
        stages[-1] += head
    return stages


class TimedAction(NamedTuple):
    """An action with its seconds since the step began."""

    action: PipelineAction
    start: float
    end: float


class InFlight(NamedTuple):
    """Micro-batches whose activations a stage keeps, from one moment until the next."""

    seconds: float
    """Seconds since the step began."""
    whole: int
    """Micro-batches whose forward has begun, and whose gradient of the input has not ended: all of their
    activations."""
    for_weights: int
    """Micro-batches that only their gradients of weights still need: the part that `backward_weight` reads."""


@dataclass(frozen=True)
class PipelineTimeline:
    """One simulated step, from the start of its first action to the end of its last; seconds throughout."""

    schedule: PipelineSchedule
    ranks: tuple[tuple[TimedAction, ...], ...]
    """The actions of each rank, in order."""
    sending_seconds: tuple[float, ...]
    """Seconds in which each rank waits for its own sends; 0 if sends overlap with computation."""

    @property
    def seconds(self) -> float:
        """Seconds of the step: the makespan."""
        return max((timed[-1].end for timed in self.ranks if timed), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds in which each rank computes."""
        return tuple(math.fsum(each.end - each.start for each in timed) for timed in self.ranks)

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Seconds in which each rank neither computes nor waits for its own sends: its bubbles."""
        each_rank = zip(self.busy_seconds, self.sending_seconds, strict=True)
        return tuple(max(0.0, self.seconds - busy - sending) for busy, sending in each_rank)

    @property
    def bubble_fraction(self) -> float:
        """Idle seconds of all ranks over the seconds in which they compute, as Narayanan et al. 2021 define it.

        With equal stages and no communication it is (p - 1) / m for gpipe and 1f1b on p ranks with m micro-batches.
        """
        busy = math.fsum(self.busy_seconds)
        return math.fsum(self.idle_seconds) / busy if busy else 0.0

    def in_flight(self, stage: int) -> list[InFlight]:
        """The micro-batches whose activations a stage keeps, after each change; a forward counts from its start.

        Raises NapkinError if there is no such stage.
        """
        check_index("stage", stage, self.schedule.stages)
        counts = InFlight(0.0, 0, 0)
        changes: list[InFlight] = []
        for action, start, end in self.ranks[self.schedule.rank_of_stage[stage]]:
            if action.stage == stage:
                whole, for_weights = _CHANGES[action.kind]
                seconds = start if action.kind == "forward" else end
                counts = InFlight(seconds, counts.whole + whole, counts.for_weights + for_weights)
                changes.append(counts)
        return changes

    def most_in_flight(self, stage: int, *, after_backward_input: bool = True) -> int:
        """The largest number of micro-batches whose activations a stage keeps at once.

        `after_backward_input=True` counts a micro-batch until the gradients of its weights are computed, False until
        the gradient of its input is: what is kept lies between the two, as part of the activations can be freed then.
        Raises NapkinError if there is no such stage.
        """
        counts = (each.whole + after_backward_input * each.for_weights for each in self.in_flight(stage))
        return max(counts, default=0)

    def peak_activation_bytes(
        self, rank: int, kept: Sequence[float], kept_for_weights: Sequence[float] | None = None
    ) -> float:
        """The most bytes of activations that a rank keeps at once, over all of its stages.

        Args:
            rank: the rank, from 0.
            kept: of each stage of the pipeline, bytes that one micro-batch's forward keeps.
            kept_for_weights: of each stage, those of them that remain from `backward_input` to `backward_weight`; all
                of them by default.

        Raises:
            NapkinError: if there is no such rank, or not one number for each stage.
        """
        check_index("rank", rank, self.schedule.ranks)
        kept_for_weights = kept if kept_for_weights is None else kept_for_weights
        for numbers in (kept, kept_for_weights):
            _check_one_per_stage("bytes", numbers, self.schedule)
        now = peak = 0.0
        for action, _, _ in self.ranks[rank]:
            whole, for_weights = _CHANGES[action.kind]
            now += whole * kept[action.stage] + for_weights * kept_for_weights[action.stage]
            peak = max(peak, now)
        return peak


# How an action changes the numbers of micro-batches in flight: whole, and kept for the gradients of weights alone.
_CHANGES: dict[Kind, tuple[int, int]] = {
    "forward": (1, 0),
    "backward": (-1, 0),
    "backward_input": (-1, 1),
    "backward_weight": (0, -1),
}


def simulate_pipeline(
    schedule: PipelineSchedule,
    seconds: Sequence[StageSeconds],
    *,
    send_seconds: float | Sequence[float] = 0.0,
    overlap: bool = True,
) -> PipelineTimeline:
    """Start and end of each action of a step, in time proportional to the number of actions.

    Sends from one rank to another follow each other, as do the messages between two NCCL ranks; stages on the same
    rank send nothing. The optimizer's update and the reduction of gradients are not part of the schedule.

    Args:
        schedule: of `pipeline_schedule`, or a table of your own.
        seconds: of each stage, for one micro-batch.
        send_seconds: of an activation, or of its gradient, between two stages that follow each other: one number, or
            one for each pair (stage 0 to 1, 1 to 2, ...).
        overlap: whether a rank computes while it sends.

    Raises:
        NapkinError: if there is not one number for each stage or pair, a number is not in 0 to 1e12, an action
            is missing, repeated or on a rank that does not hold its stage, or the order of actions lets ranks wait
            for each other for good (a deadlock).
    """
    _check_one_per_stage("seconds", seconds, schedule)
    sends = _one_per_pair(send_seconds, schedule)
    durations: list[dict[Kind, float]] = [{kind: each.of(kind) for kind in _CHANGES} for each in seconds]
    for stage, each in enumerate(seconds):
        for name, value in vars(each).items():
            _check_seconds(f"{name} in stage {stage}", value)
    for pair, value in enumerate(sends):
        _check_seconds(f"a send between stages {pair} and {pair + 1}", value)
    _check_table(schedule)
    return _Simulation(schedule, durations, sends, overlap).run()


Input = tuple[int, Kind, int]
"""The input of that action; both kinds of backward passes have the same one, that of "backward"."""


class _Simulation:
    def __init__(
        self, schedule: PipelineSchedule, durations: list[dict[Kind, float]], sends: list[float], overlap: bool
    ) -> None:
        self.schedule = schedule
        self.durations = durations
        self.sends = sends
        self.overlap = overlap
        self.timed: list[list[TimedAction]] = [[] for _ in schedule.actions]
        self.free_from = [0.0] * schedule.ranks
        self.sending = [0.0] * schedule.ranks
        self.link_free_from: dict[tuple[int, int], float] = {}
        self.arrived: dict[Input, float] = {(0, "forward", each): 0.0 for each in range(schedule.micro_batches)}
        self.waiting: dict[Input, int] = {}
        self.woken = list(range(schedule.ranks))

    def run(self) -> PipelineTimeline:
        while self.woken:
            self._run_rank(self.woken.pop())
        if self.waiting:
            raise NapkinError(_deadlock(self.waiting, self.schedule))
        return PipelineTimeline(self.schedule, tuple(map(tuple, self.timed)), tuple(self.sending))

    def _run_rank(self, rank: int) -> None:
        """Run a rank until its next action lacks its input."""
        timed, actions = self.timed[rank], self.schedule.actions[rank]
        while len(timed) < len(actions):
            action = actions[len(timed)]
            needed = (action.stage, "backward", action.micro_batch) if action.kind == "backward_input" else action
            arrival = self.arrived.get(needed)
            if arrival is None:
                self.waiting[needed] = rank
                return
            start = max(self.free_from[rank], arrival)
            end = start + self.durations[action.stage][action.kind]
            timed.append(TimedAction(action, start, end))
            self.free_from[rank] = end
            self._hand_on(action, rank, end)

    def _hand_on(self, action: PipelineAction, rank: int, end: float) -> None:
        """Give what the action made to the actions that need it."""
        stage, kind, micro_batch = action
        if kind == "forward":
            if stage + 1 < self.schedule.stages:
                self._arrive((stage + 1, "forward", micro_batch), self._send(rank, stage + 1, self.sends[stage], end))
            else:
                self._arrive((stage, "backward", micro_batch), end)
        elif kind != "backward_weight":
            if kind == "backward_input":
                self._arrive((stage, "backward_weight", micro_batch), end)
            if stage:
                sent = self._send(rank, stage - 1, self.sends[stage - 1], end)
                self._arrive((stage - 1, "backward", micro_batch), sent)

    def _send(self, rank: int, to_stage: int, seconds: float, ready: float) -> float:
        """Return the second at which a message arrives that is ready to be sent."""
        to_rank = self.schedule.rank_of_stage[to_stage]
        if to_rank == rank:
            return ready
        link = (rank, to_rank)
        arrival = max(ready, self.link_free_from.get(link, 0.0)) + seconds
        self.link_free_from[link] = arrival
        if not self.overlap:
            self.sending[rank] += arrival - ready
            self.free_from[rank] = arrival
        return arrival

    def _arrive(self, needed: Input, seconds: float) -> None:
        self.arrived[needed] = seconds
        if needed in self.waiting:
            self.woken.append(self.waiting.pop(needed))


def _deadlock(waiting: dict[Input, int], schedule: PipelineSchedule) -> str:
    (stage, kind, micro_batch), rank = min(waiting.items(), key=lambda item: item[1])
    whose = {"forward": stage - 1, "backward": min(stage + 1, schedule.stages - 1), "backward_weight": stage}[kind]
    return (
        f"schedule {schedule.name!r} deadlocks: rank {rank} cannot run {kind} of micro-batch {micro_batch} in stage "
        f"{stage} before stage {whose} is done with it, which never happens: change the order of actions"
    )


def _check_table(schedule: PipelineSchedule) -> None:
    """Each micro-batch passes each stage once forward and once backward, on the rank that holds it."""
    stages, micro_batches = schedule.stages, schedule.micro_batches
    passes = bytearray(stages * micro_batches)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            stage, kind, micro_batch = action
            if kind not in _BITS:
                raise NapkinError(f"{kind!r} is not a kind of action: use one of {', '.join(_BITS)}")
            if not (0 <= stage < stages and 0 <= micro_batch < micro_batches):
                raise NapkinError(
                    f"{_described(action)} is not in a pipeline of {stages} stages and {micro_batches} micro-batches: "
                    "stages and micro-batches count from 0"
                )
            if schedule.rank_of_stage[stage] != rank:
                raise NapkinError(
                    f"{_described(action)} is listed for rank {rank}, but rank {schedule.rank_of_stage[stage]} holds "
                    "the stage: move the action or the stage"
                )
            place = stage * micro_batches + micro_batch
            if passes[place] & _BITS[kind]:
                raise NapkinError(f"{_described(action)} is listed twice for rank {rank}: list it once")
            passes[place] |= _BITS[kind]
    for place, bits in enumerate(passes):
        if bits not in _COMPLETE:
            stage, micro_batch = divmod(place, micro_batches)
            raise NapkinError(
                f"micro-batch {micro_batch} does not pass stage {stage} once forward and once backward: list one "
                "forward and either one backward, or one backward_input and one backward_weight"
            )


_BITS: dict[Kind, int] = {"forward": 1, "backward": 2, "backward_input": 4, "backward_weight": 8}
_COMPLETE = (1 + 2, 1 + 4 + 8)


def _described(action: PipelineAction) -> str:
    return f"{action.kind} of micro-batch {action.micro_batch} in stage {action.stage}"


def _check_one_per_stage(what: str, numbers: Sequence[object], schedule: PipelineSchedule) -> None:
    if len(numbers) != schedule.stages:
        raise NapkinError(
            f"{what} of {len(numbers)} stages are given for a pipeline of {schedule.stages}: give one for each stage"
        )


def _one_per_pair(send_seconds: float | Sequence[float], schedule: PipelineSchedule) -> list[float]:
    pairs = max(0, schedule.stages - 1)
    if not isinstance(send_seconds, Sequence):
        return [float(send_seconds)] * pairs
    if len(send_seconds) != pairs:
        raise NapkinError(
            f"seconds of sends between {len(send_seconds)} pairs of stages are given for a pipeline of {pairs}: give "
            "one for each pair, or one number for all"
        )
    return [float(each) for each in send_seconds]


def _check_seconds(what: str, seconds: float) -> None:
    if not 0 <= seconds <= LONGEST_ACTION:
        raise NapkinError(f"{what} takes {seconds} seconds: use 0 to {LONGEST_ACTION:g}")
