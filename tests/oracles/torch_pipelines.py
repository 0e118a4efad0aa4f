"""The orders of actions of torch.distributed.pipelining, with stages that compute nothing and no process group."""

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from napkin.accounting.pipeline_schedules import Kind, PipelineAction

SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
KINDS: dict[Any, Kind] = {
    schedules.FORWARD: "forward",
    schedules.FULL_BACKWARD: "backward",
    schedules.BACKWARD_INPUT: "backward_input",
    schedules.BACKWARD_WEIGHT: "backward_weight",
}

Table = list[list[PipelineAction]]


class RecordingStage:
    """A stage without neighbours that notes what it is asked to compute."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.recorded: list[PipelineAction] = []

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.recorded.append(PipelineAction(self.stage_index, "forward", micro_batch))

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.recorded.append(PipelineAction(self.stage_index, "backward", micro_batch))

    def perform_reduce_grad(self, _: int) -> None:
        pass

    def _nothing_to_send(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing_to_send


def executed_by_torch(name: str, ranks: int, micro_batches: int) -> Table:
    """What each rank of a schedule with one stage per rank runs, in order."""
    without_buffers = type("WithoutBuffers", (SINGLE[name],), {"_initialize_stage": lambda *_: None})
    stages: list[Any] = [RecordingStage(rank, ranks) for rank in range(ranks)]
    for stage in stages:
        without_buffers(stage, micro_batches)._step_microbatches()
    return [stage.recorded for stage in stages]


def table_of_torch(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Table:
    """The table of a schedule, `pipeline_order`, without its bubbles."""
    if name in SINGLE:
        single: Any = SimpleNamespace(stage_index=0, num_stages=ranks)
        order = SINGLE[name](single, micro_batches).pipeline_order
    else:
        stage: Any = SimpleNamespace(num_stages=ranks * stages_per_rank, group_size=ranks, group_rank=0, submod=None)
        order = MULTI[name]([stage] * stages_per_rank, micro_batches).pipeline_order
    assert order is not None
    return [
        [
            PipelineAction(action.stage_index, KINDS[action.computation_type], action.microbatch_index)
            for action in order[rank]
            if action is not None and action.computation_type in KINDS and action.microbatch_index is not None
        ]
        for rank in range(ranks)
    ]
