"""The order in which the ranks of a pipeline compute: schedules as tables of actions, one row per rank.

A stage is a part of the model's blocks, in their order; a rank holds one or more stages. A schedule says only the
order of each rank's actions. When they run, and how long a rank is idle between them, is what
`pipeline_simulation.py` finds.

`gpipe`             Huang et al. 2019, "GPipe": all forwards, then all backwards.
`1f1b`              Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using
                    Megatron-LM" (PipeDream-Flush): a rank runs ahead by as many forwards as ranks come after it, then
                    a forward and a backward in turn.
`interleaved-1f1b`  the same paper, section 2.2: several stages per rank, in rounds of micro-batches.
`zb-h1`             Qi et al. 2024, "Zero bubble pipeline parallelism": a backward pass in two, so that the gradients
                    of weights, which no other rank waits for, fill bubbles. Several stages per rank are interleaved.
`zb-v`              the same paper, section 6: two stages per rank, placed as a V, so that the first rank also has
                    the last stage (see also Qi et al. 2024, "Pipeline parallelism with controllable memory").

The orders are those of torch.distributed.pipelining (2.13): ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B,
ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from napkin.errors import NapkinError, suggestion

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
"""`backward` is `backward_input` (gradient of the stage's input) and `backward_weight` (of its parameters) in one."""

MOST_ACTIONS = 3_000_000
"""Actions that a schedule may have; each takes about 100 bytes."""


class PipelineAction(NamedTuple):
    """One action of a rank: one pass of one micro-batch through one of its stages."""

    stage: int
    """Counted from 0, in the order of the forward pass."""
    kind: Kind
    micro_batch: int
    """Counted from 0."""


@dataclass(frozen=True)
class PipelineSchedule:
    """Each rank's actions in order; a table of your own can be simulated too."""

    name: str
    micro_batches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[PipelineAction, ...], ...]
    """The actions of each rank, in order."""

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def stages(self) -> int:
        """Number of stages of all ranks together."""
        return len(self.rank_of_stage)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in the order of the forward pass; NapkinError if there is no such rank."""
        check_index("rank", rank, self.ranks)
        return tuple(stage for stage, holder in enumerate(self.rank_of_stage) if holder == rank)


def pipeline_schedule(name: str, ranks: int, micro_batches: int, *, stages_per_rank: int = 1) -> PipelineSchedule:
    """The order of actions of each rank in one training step.

    Args:
        name: one of `SCHEDULES`: gpipe, 1f1b, interleaved-1f1b, zb-h1, zb-v.
        ranks: devices in the pipeline, each with the same number of stages.
        micro_batches: parts of the batch that pass through the pipeline one after another.
        stages_per_rank: 1 for gpipe and 1f1b, 2 for zb-v, any number for the others.

    Raises:
        NapkinError: if there is no such schedule, or it has no order for these numbers: 1f1b needs as many
            micro-batches as ranks; interleaved-1f1b and zb-h1 need the same number of micro-batches in each round
            (see `micro_batches_per_round`).

    >>> [f"{kind[0]}{micro_batch}" for _, kind, micro_batch in pipeline_schedule("1f1b", 2, 3).actions[0]]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    if name not in SCHEDULES:
        raise NapkinError(f"{name!r} is not a pipeline schedule: {suggestion(name, SCHEDULES)}")
    for what, number in [("ranks", ranks), ("micro-batches", micro_batches), ("stages per rank", stages_per_rank)]:
        if number < 1:
            raise NapkinError(f"a pipeline of {number} {what} is not possible: use at least 1")
    schedule = SCHEDULES[name]
    _check_stages_per_rank(name, schedule, stages_per_rank)
    # A V is laid out for a pipeline that its micro-batches fill.
    laid_out = max(micro_batches, 2 * ranks - 1) if schedule.placement == "v" else micro_batches
    most = 3 * ranks * stages_per_rank * laid_out
    if most > MOST_ACTIONS:
        raise NapkinError(
            f"{name} with {ranks:,} ranks, {stages_per_rank:,} stages per rank and {micro_batches:,} micro-batches is "
            f"laid out in up to {most:,} actions, more than {MOST_ACTIONS:,}: use fewer of them"
        )
    place = v_placement if schedule.placement == "v" else loop_placement
    actions = [schedule.order(rank, ranks, stages_per_rank, micro_batches) for rank in range(ranks)]
    return PipelineSchedule(name, micro_batches, place(ranks, stages_per_rank), tuple(map(tuple, actions)))


def check_index(what: str, index: int, number: int) -> None:
    """Refuse a rank or stage that a pipeline does not have; in Python -1 would be the last one."""
    if not 0 <= index < number:
        raise NapkinError(f"{what} {index} is not in a pipeline of {number} {what}s: use 0 to {number - 1}")


def loop_placement(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage if stages go around the ranks again and again.

    >>> loop_placement(3, 2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(stage % ranks for stage in range(ranks * stages_per_rank))


def v_placement(ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage if stages go to the last rank and back: neighbours at the turn are on one rank.

    >>> v_placement(3, 2)
    (0, 1, 2, 2, 1, 0)
    """
    there = range(ranks)
    return tuple(rank for turn in range(stages_per_rank) for rank in (there if turn % 2 == 0 else reversed(there)))


def micro_batches_per_round(name: str, ranks: int, micro_batches: int) -> int:
    """The number of micro-batches in a row that a rank takes through one of its stages before it turns to its next
    stage.

    Narayanan et al. 2021 have as many as ranks. As in torch, any number is allowed that divides the micro-batches into
    `micro_batches // ranks` equal rounds, or into one round if there are fewer micro-batches than that.

    >>> micro_batches_per_round("zb-h1", 4, 8), micro_batches_per_round("zb-h1", 4, 10)
    (4, 5)

    Raises NapkinError if the rounds are not equal.
    """
    rounds = max(1, micro_batches // ranks)
    per_round, rest = divmod(micro_batches, rounds)
    if rest:
        lower, higher = rounds * per_round, rounds * (per_round + 1)
        # The next multiple has as many rounds only if it is less than another `ranks` micro-batches away.
        if higher // ranks != rounds:
            higher = (rounds + 1) * ranks
        raise NapkinError(
            f"{name} takes {micro_batches} micro-batches through {ranks} ranks in {rounds} rounds, which are not "
            f"equal: use {lower} or {higher} micro-batches"
        )
    return per_round


def _gpipe(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[PipelineAction]:
    return _woven(*_passes([(rank, each) for each in range(micro_batches)], "backward"), ahead=micro_batches)


def _one_forward_one_backward(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[PipelineAction]:
    if micro_batches < ranks:
        raise NapkinError(
            f"1f1b needs at least as many micro-batches as ranks, and {micro_batches} are fewer than {ranks}: use at "
            f"least {ranks} micro-batches, or gpipe"
        )
    return _woven(*_passes([(rank, each) for each in range(micro_batches)], "backward"), ahead=ranks - 1 - rank)


def _interleaved(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[PipelineAction]:
    per_round = micro_batches_per_round("interleaved-1f1b", ranks, micro_batches)
    order = _in_rounds(rank, ranks, stages_per_rank, micro_batches, per_round)
    forwards, backwards = _passes(order, "backward")
    # A backward comes back from the last stage two hops later for each rank in between.
    ahead = (stages_per_rank - 1) * per_round + 2 * (ranks - 1 - rank)
    return _woven(forwards, _mirrored(backwards, rank, ranks, stages_per_rank), ahead=ahead)


def _zero_bubble_h1(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[PipelineAction]:
    per_round = micro_batches_per_round("zb-h1", ranks, micro_batches)
    order = _in_rounds(rank, ranks, stages_per_rank, micro_batches, per_round)
    forwards, backwards = _passes(order, "backward_input")
    # One forward ahead for each later rank, and one weight gradient behind for each earlier one: no rank keeps the
    # activations of more micro-batches than 1f1b's first rank.
    ahead = (stages_per_rank - 1) * per_round + ranks - 1 - rank
    return _woven(forwards, _mirrored(backwards, rank, ranks, stages_per_rank), ahead=ahead, behind=rank)


def _zero_bubble_v(rank: int, ranks: int, stages_per_rank: int, micro_batches: int) -> list[PipelineAction]:
    """F, I and W are forward, gradient of the input and of weights; 0 is the way down the V, 1 the way back.

    The pattern fills the pipeline from 2·ranks − 1 micro-batches on; with fewer, those that do not exist are left out.
    """
    filled = max(micro_batches, 2 * ranks - 1)
    later = ranks - rank
    begun = 2 * ranks - 1 - rank
    pattern = ["F0"] * (2 * later - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * later
    for turn in range(filled - ranks):
        pattern += ["F0"] * (begun + turn < filled) + ["I0", "W0", "F1", "I1", "W1"]
    pattern += ["I0", "I1"] * rank + ["I0", "W0"] * later + ["W1"] * rank + ["W0"] * rank
    stage = {"0": rank, "1": 2 * ranks - 1 - rank}
    kinds: dict[str, Kind] = {"F": "forward", "I": "backward_input", "W": "backward_weight"}
    seen: Counter[str] = Counter()
    actions: list[PipelineAction] = []
    for symbol in pattern:
        if seen[symbol] < micro_batches:
            actions.append(PipelineAction(stage[symbol[1]], kinds[symbol[0]], seen[symbol]))
        seen[symbol] += 1
    return actions


def _in_rounds(
    rank: int, ranks: int, stages_per_rank: int, micro_batches: int, per_round: int
) -> list[tuple[int, int]]:
    """(stage, micro-batch) of each forward: a round of micro-batches through each of the rank's stages in turn."""
    return [
        (rank + ranks * turn, begin + each)
        for begin in range(0, micro_batches, per_round)
        for turn in range(stages_per_rank)
        for each in range(per_round)
    ]


def _passes(order: list[tuple[int, int]], backward: Kind) -> tuple[list[PipelineAction], list[PipelineAction]]:
    """Forward actions in the given order of (stage, micro-batch), and backward actions in the same order."""
    return (
        [PipelineAction(stage, "forward", micro_batch) for stage, micro_batch in order],
        [PipelineAction(stage, backward, micro_batch) for stage, micro_batch in order],
    )


def _mirrored(actions: list[PipelineAction], rank: int, ranks: int, stages_per_rank: int) -> list[PipelineAction]:
    """The actions with the rank's last stage in the place of its first: backwards go through the stages in reverse."""
    ends = 2 * rank + (stages_per_rank - 1) * ranks
    return [action._replace(stage=ends - action.stage) for action in actions]


def _woven(
    forwards: list[PipelineAction], backwards: list[PipelineAction], *, ahead: int, behind: int | None = None
) -> list[PipelineAction]:
    """`ahead` forwards, then a forward and a backward in turn until no forward is left, then the other backwards.

    With `behind`, the gradients of weights follow: one after each backward but the first `behind`, the rest at the end.
    """
    weights = [] if behind is None else [action._replace(kind="backward_weight") for action in backwards]
    behind = behind or 0
    actions = forwards[:ahead]
    for index, backward in enumerate(backwards):
        actions += forwards[ahead + index : ahead + index + 1]
        actions.append(backward)
        if index >= behind:
            actions += weights[index - behind : index - behind + 1]
    return actions + weights[max(0, len(backwards) - behind) :]


class ScheduleKind(NamedTuple):
    """The function that makes the schedules of one name, and their number of stages per rank."""

    order: Callable[[int, int, int, int], list[PipelineAction]]
    """The actions of a rank, from its number, the ranks, the stages per rank and the micro-batches."""
    placement: Literal["loop", "v"] = "loop"
    stages_per_rank: int | None = None
    """The only number that it has an order for; None if it has one for any."""


SCHEDULES: dict[str, ScheduleKind] = {
    "gpipe": ScheduleKind(_gpipe, stages_per_rank=1),
    "1f1b": ScheduleKind(_one_forward_one_backward, stages_per_rank=1),
    "interleaved-1f1b": ScheduleKind(_interleaved),
    "zb-h1": ScheduleKind(_zero_bubble_h1),
    "zb-v": ScheduleKind(_zero_bubble_v, placement="v", stages_per_rank=2),
}
"""The kinds of schedules by name."""


def _check_stages_per_rank(name: str, schedule: ScheduleKind, stages_per_rank: int) -> None:
    needed = schedule.stages_per_rank
    if needed is not None and stages_per_rank != needed:
        others = [other for other, kind in SCHEDULES.items() if kind.stages_per_rank in (None, stages_per_rank)]
        raise NapkinError(
            f"{name} has {needed} {'stage' if needed == 1 else 'stages'} per rank, not {stages_per_rank}: use "
            f"{needed}, or {' or '.join(others)}"
        )
