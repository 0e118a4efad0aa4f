"""A pipeline once more, as plainly as can be: a clock that ticks, ranks that compute, links that carry.

Durations of actions are whole ticks, at least 1; those of sends at least 0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from napkin.accounting.pipeline_schedules import PipelineAction, PipelineSchedule

Message = tuple[str, int, int]
"""Activation or gradient, for which stage, of which micro-batch."""


@dataclass
class Link:
    """From one rank to another: what waits to be sent with its ticks, and what is being sent until when."""

    queue: list[tuple[Message, int]] = field(default_factory=list)
    sending: tuple[Message, int] | None = None


class NaivePipeline:
    """Runs a schedule tick by tick; `spans` has start and end of each action that ran."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        ticks: Callable[[PipelineAction], int],
        send_ticks: Sequence[int],
        overlap: bool,
    ) -> None:
        self.schedule, self.ticks, self.send_ticks, self.overlap = schedule, ticks, send_ticks, overlap
        self.spans: dict[PipelineAction, tuple[int, int]] = {}
        self.done: set[PipelineAction] = set()
        self.delivered: set[Message] = set()
        self.computing: dict[int, PipelineAction] = {}
        self.left = [list(actions) for actions in schedule.actions]
        self.links = {(a, b): Link() for a in range(schedule.ranks) for b in range(schedule.ranks)}

    def run(self) -> bool:
        """True once every action has run, False when nothing moves any more."""
        clock = 0
        while True:
            self.finish(clock)
            self.carry(clock)
            self.begin(clock)
            if not self.computing and all(link.sending is None for link in self.links.values()):
                return not any(self.left)
            clock += 1

    def finish(self, clock: int) -> None:
        for rank, action in list(self.computing.items()):
            if self.spans[action][1] == clock:
                del self.computing[rank]
                self.done.add(action)
                stage, kind, micro_batch = action
                if kind == "forward" and stage + 1 < self.schedule.stages:
                    self.send(rank, stage + 1, ("activation", stage + 1, micro_batch), self.send_ticks[stage])
                if kind in ("backward", "backward_input") and stage > 0:
                    self.send(rank, stage - 1, ("gradient", stage - 1, micro_batch), self.send_ticks[stage - 1])

    def send(self, rank: int, to_stage: int, message: Message, ticks: int) -> None:
        to_rank = self.schedule.rank_of_stage[to_stage]
        if to_rank == rank:
            self.delivered.add(message)
        else:
            self.links[rank, to_rank].queue.append((message, ticks))

    def carry(self, clock: int) -> None:
        for link in self.links.values():
            while True:
                if link.sending and link.sending[1] == clock:
                    self.delivered.add(link.sending[0])
                    link.sending = None
                elif link.sending is None and link.queue:
                    message, ticks = link.queue.pop(0)
                    link.sending = (message, clock + ticks)
                else:
                    break

    def begin(self, clock: int) -> None:
        for rank, left in enumerate(self.left):
            blocked = not self.overlap and any(
                link.sending for (sender, _), link in self.links.items() if sender == rank
            )
            if left and rank not in self.computing and not blocked and self.may_run(left[0]):
                action = left.pop(0)
                self.computing[rank] = action
                self.spans[action] = (clock, clock + self.ticks(action))

    def may_run(self, action: PipelineAction) -> bool:
        stage, kind, micro_batch = action
        match kind:
            case "forward":
                return stage == 0 or ("activation", stage, micro_batch) in self.delivered
            case "backward_weight":
                return (stage, "backward_input", micro_batch) in self.done
            case _:
                is_last = stage == self.schedule.stages - 1
                return (stage, "forward", micro_batch) in self.done and (
                    is_last or ("gradient", stage, micro_batch) in self.delivered
                )
