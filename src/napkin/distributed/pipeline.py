"""Pipeline parallelism: each rank computes some of the layers, and micro-batches pass from rank to rank.

The engine is torch.distributed.pipelining: `PipelineStage` sends, receives and computes, and its schedules say in which
order, which is that of `napkin.accounting.pipeline_schedules`. Shapes are known beforehand, so nothing but tensors is
sent.

Gradients are averaged over ranks that hold the same parameters as soon as they are complete, and waited for later.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from napkin.data.batches import IGNORE_INDEX
from napkin.distributed.parallel_model import ODD, ParallelModel, all_resident, reshard_modules
from napkin.distributed.pipeline_stages import MicroBatch, Passes, StageModule, Tokens, ranks_of_stages
from napkin.distributed.ranks import Ranks
from napkin.model.transformer import Transformer
from napkin.optim.base import Optimizer, buckets
from napkin.optim.saved_state import local
from napkin.recipe.layout import Layout


class GradientMean:
    """All-reduces, in place, gradients that no backward pass adds to any more.

    DDP would do it from within the backward pass, which the schedules with split backward passes do not run as a whole.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group` are the ranks; None is this rank alone."""
        self.group = group
        self._running: list[tuple[Any, Tensor, list[Tensor]]] = []

    def start(self, gradients: Sequence[Tensor]) -> None:
        """Begin to average these gradients; all ranks of the group pass the same ones in the same order."""
        if self.group is None:
            return
        ranks = dist.get_world_size(self.group)
        for bucket in buckets(map(local, gradients)):
            torch._foreach_div_(bucket, ranks)  # pyright: ignore[reportPrivateImportUsage]
            # Small gradients are sent together.
            alone = len(bucket) == 1 and bucket[0].is_contiguous()
            flat = bucket[0] if alone else torch.cat([gradient.flatten() for gradient in bucket])
            work = dist.all_reduce(flat, group=self.group, async_op=True)
            self._running.append((work, flat, bucket))

    def finish(self) -> None:
        """Wait until all that has begun is averaged."""
        for work, flat, bucket in self._running:
            work.wait()
            if flat is not bucket[0]:
                for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(mean.view_as(gradient))
        self._running.clear()


SINGLE: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MULTI: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zb-h1": ScheduleInterleavedZeroBubble,
    "zb-v": ScheduleZBVZeroBubble,
}
Schedule = PipelineScheduleSingle | PipelineScheduleMulti
# For a failed action torch logs the whole schedule; the error says enough.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class PipelineModel(ParallelModel):
    """Some stages of a model on each rank; the last stage has the loss.

    Gradients are averaged over ranks with the same stages once per step, after their last backward pass.
    """

    def __init__(
        self,
        model: Transformer,
        ranks: Ranks,
        layout: Layout,
        stages: Sequence[StageModule],
        mesh: DeviceMesh,
        same_stages: dist.ProcessGroup | None,
        apart: Collection[Tensor] = (),
    ) -> None:
        """`stages` are this rank's. `same_stages` are the ranks that average gradients, except those of parameters that
        are kept `apart`; None if no other rank has the same stages, or if FSDP averages the gradients."""
        super().__init__(model, ranks, layout)
        self.modules = list(stages)
        self.group = mesh.get_group("pipeline")
        self.mean_over = GradientMean(same_stages)
        self.apart = set(apart)
        self.holders = ranks_of_stages(layout)
        is_an_end = any(module.is_first or module.is_last for module in stages)
        self.tied = next(model.embedding.parameters()) if model.head is None and is_an_end else None
        """The matrix of the first and the last stage, of whose gradient each has a part."""
        is_divided = model.head is None and self.holders[0] != self.holders[-1]
        self.ends = _group_of_ends(mesh, self.holders) if is_divided else None
        """The ranks that hold `tied`, if they are two."""
        self._schedules: dict[tuple[Any, ...], Schedule] = {}

    def gradients(self, micro_batches: Sequence[MicroBatch], passes: Passes) -> Float[Tensor, ""]:
        """Add up the gradients of the micro-batches that pass through this rank's stages.

        Returns the sum of their weighted losses where the last stage is, and 0 elsewhere.
        """
        schedule = self._schedule(len(micro_batches), micro_batches[0].inputs.shape, passes)
        self._run(schedule.step, micro_batches, passes)
        self.mean_over.finish()
        self._complete_tied()
        self.finish_gradients()
        return self._total(micro_batches[0].inputs.device)

    def evaluation_nats(self, inputs: Tokens, targets: Tokens, documents: Tokens | None = None) -> Float[Tensor, ""]:
        """The sum of the losses of some rows' targets where the last stage is, divided by the number of ranks that
        compute the same tokens, and 0 elsewhere. Without gradients."""
        inputs, targets, documents = self.own_columns(inputs, targets, documents)
        n_targets = (targets != IGNORE_INDEX).sum()
        return self._forward(inputs, targets, documents).double() * n_targets / self.layout.tensor

    def reshard(self) -> None:
        """Free gathered parameters: a pass without gradients leaves them gathered."""
        for stage in self.modules:
            reshard_modules(stage)

    @torch.no_grad()
    def _forward(self, inputs: Tokens, targets: Tokens, documents: Tokens | None) -> Float[Tensor, ""]:
        schedule = self._schedule(1, inputs.shape, None)
        self._run(schedule.eval, [MicroBatch(inputs, targets, documents, 1.0)], Passes())
        return self._total(inputs.device)

    def _run(self, run: Callable[..., Any], micro_batches: Sequence[MicroBatch], passes: Passes) -> None:
        for module in self.modules:
            module.passes, module.total = passes, None
        tokens = torch.cat([part.inputs for part in micro_batches])
        each: dict[str, Tensor] = {
            "tokens": tokens,
            "targets": torch.cat([part.targets for part in micro_batches]),
            "weight": torch.stack([torch.as_tensor(part.weight, device=tokens.device) for part in micro_batches]),
        }
        if micro_batches[0].documents is not None:
            each["documents"] = torch.cat([part.documents for part in micro_batches if part.documents is not None])
        try:
            # The last stage returns the loss, so what it is compared with does not matter.
            run(tokens, target=each["weight"], return_outputs=False, **each)
        except RuntimeError as error:
            # Errors within a stage are wrapped in one that describes its arguments.
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None

    def _total(self, device: torch.device) -> Float[Tensor, ""]:
        totals = [module.total for module in self.modules if module.total is not None]
        return torch.stack(totals).sum() if totals else torch.zeros((), device=device)

    def _schedule(self, micro_batches: int, shape: torch.Size, passes: Passes | None) -> Schedule:
        """The schedule for micro-batches of that shape; without `passes`, one that runs forward passes only."""
        key = (micro_batches, *shape, passes is None)
        if key not in self._schedules:
            # Evaluations have few shapes, training one.
            self._schedules = {k: v for k, v in self._schedules.items() if k[-1] != key[-1]}
            self._schedules[key] = self._new_schedule(micro_batches, shape, forward_only=passes is None)
        if passes is not None:
            self._schedules[key]._loss_fn = lambda loss, _: passes.scaled(loss)
        return self._schedules[key]

    def _new_schedule(self, micro_batches: int, shape: torch.Size, *, forward_only: bool) -> Schedule:
        rows, length = shape[0], shape[1]
        stages: list[Any] = [_Stage(module, rows, length, self.layout.stages, self) for module in self.modules]
        settings: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        name = self.layout.schedule
        if name in MULTI:
            return MULTI[name](stages, micro_batches, **settings)
        # Without backward passes these two are the same, but for a limit on the number of micro-batches.
        return SINGLE["gpipe" if forward_only else name](stages[0], micro_batches, **settings)

    def _complete_tied(self) -> None:
        if self.tied is None:
            return
        assert self.tied.grad is not None
        self.mean_over.start([self.tied.grad])
        self.mean_over.finish()
        if self.ends is not None:
            dist.all_reduce(local(self.tied.grad), group=self.ends)

    def rounding_seed(self, seed: int) -> int:
        """A seed that differs between stages and shards; copies of a parameter are rounded alike."""
        places = self.layout.coordinates(self.ranks.info.rank)
        shard = places["shard"] * self.layout.context + places["context"] if self.layout.strategy == "fsdp" else 0
        return (seed + (places["pipeline"] * self.layout.token_parts + shard) * ODD) % 2**63

    def resident(self, optimizer: Optimizer) -> list[Tensor]:
        return all_resident(self.model, optimizer)

    def sum_of_squares_weight(self, parameter: Tensor) -> float:
        """The weight as for other layouts; the matrix that the first and the last stage share counts half on each."""
        weight = super().sum_of_squares_weight(parameter)
        return weight / 2 if parameter is self.tied and self.ends is not None else weight


def _group_of_ends(mesh: DeviceMesh, holders: Sequence[int]) -> dist.ProcessGroup | None:
    """The ranks of the first and the last stage of this rank's pipeline; None if it is neither. A collective."""
    # The pipeline is the outermost dimension.
    stages, apart = mesh.size(0), mesh.size() // mesh.size(0)
    pipelines = [[stage * apart + other for stage in range(stages)] for other in range(apart)]
    ends = [[pipeline[holders[0]], pipeline[holders[-1]]] for pipeline in pipelines]
    own, _ = dist.new_subgroups_by_enumeration(ends)
    return own if isinstance(own, dist.ProcessGroup) else None


class _Stage(PipelineStage):
    """torch's stage, with buffers that exist only while something is in them.

    Of itself it has room for the input and the output's gradient of every micro-batch of a step, all the time.
    """

    def __init__(self, module: StageModule, rows: int, length: int, stages: int, pipeline: PipelineModel) -> None:
        model = module.model
        parameter = next(module.parameters())
        # Between blocks, each tensor-parallel rank holds a part of every sequence.
        part = rows, length // pipeline.layout.tensor, model.config.d_model
        stream = torch.empty(part, dtype=parameter.dtype, device="meta", requires_grad=True)
        super().__init__(
            module,
            module.stage,
            stages,
            parameter.device,
            input_args=torch.empty(rows, length, dtype=torch.int64, device="meta") if module.is_first else stream,
            output_args=torch.empty((), device="meta", requires_grad=True) if module.is_last else stream,
            group=pipeline.group,
        )
        self._watched = module
        self._pipeline = pipeline

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Room for an input, just before it is received."""
        self._make_room(self.args_recv_info[fwd_chunk_id])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Room for a gradient, just before it is received."""
        if self.has_backward and not self.is_last:
            self._make_room(self.grad_recv_info[bwd_chunk_id])
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _make_room(self, infos: Sequence[Any]) -> None:
        for info in infos:
            if not info.is_root_arg:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            _empty(infos)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for infos in self.grad_recv_info.values():
            _empty(infos)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Any, ...]:
        received = super()._retrieve_recv_activations(fwd_chunk_id)
        _empty(self.args_recv_info[fwd_chunk_id])
        return received

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Any, ...]:
        received = super()._retrieve_recv_grads(bwd_chunk_id)
        _empty(self.grad_recv_info[bwd_chunk_id])
        return received

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        with self._watched.passes.watch("forward"):
            return super().forward_one_chunk(*arguments, **options)

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        with self._watched.passes.watch("backward"):
            return super().backward_one_chunk(*arguments, **options)

    def backward_weight_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        with self._watched.passes.watch("backward"):
            return super().backward_weight_one_chunk(*arguments, **options)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradient for the stage before, if that is on the same rank."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """The gradient from the stage after, if that is on the same rank."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Begin to average the gradients of this stage, which are complete."""
        if not self.has_backward:
            return
        super().perform_reduce_grad(grad_scale_factor)
        later = {self._pipeline.tied, *self._pipeline.apart}
        own = (p for p in self._watched.parameters() if p not in later)
        self._pipeline.mean_over.start([p.grad for p in own if p.grad is not None])


def _empty(infos: Sequence[Any]) -> None:
    for info in infos:
        info.buffer = None
