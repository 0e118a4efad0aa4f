"""CUDA graphs: the forward and backward pass of a micro-batch, recorded once and replayed with one launch.

A replay does to the same addresses what was recorded, with no Python between: batch and weight are copied into static
buffers, gradients add up in static tensors, loss and weight stay on the device. Draws of dropout come from the device's
generator, whose state each replay reads anew. The numbers are those of the plain step, bit for bit.

The first steps of a process are plain: they warm up libraries and compilers, and one of them is metered, operator by
operator. The update, which waits for the device, is not recorded.

The memory of a graph, a private pool of the allocator, stays reserved for it: the plan counts these bytes separately.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from napkin.accounting.ledger import METERED_STEP
from napkin.distributed.parallel_model import ParallelModel
from napkin.distributed.pipeline_stages import MicroBatch, Passes
from napkin.errors import NapkinError, first_line
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.tuning_recipe import TuningRecipe
from napkin.tensors import random_state_kept, record_graph

PLAIN_STEPS = METERED_STEP + 1
"""Steps of a process before the graph is recorded."""


def graph_obstacle(resolved: ResolvedRecipe) -> str | None:
    """Why micro-batches of a recipe cannot be recorded as a CUDA graph; None if they can."""
    recipe, training = resolved.recipe, resolved.recipe.training
    obstacles = {
        "CUDA graphs are a GPU's, and the run is on a CPU": resolved.precision.device_type != "cuda",
        "sequences of tuning differ in length, and a graph has one shape": isinstance(recipe, TuningRecipe),
        "the number of tokens per expert is data, and a graph has fixed shapes": bool(recipe.model.n_experts),
        "ranks exchange gradients inside the backward pass, which was not tested in a graph": resolved.world_size > 1,
        "state of the optimizer in host memory leaves no room for the graph's pool": training.offload_optimizer,
        "fp16's loss scale changes on the host": resolved.precision.name == "fp16",
        "recomputation restores the generator of dropout on the host": recipe.model.dropout > 0
        and training.recompute != "none",
    }
    return next((why for why, is_so in obstacles.items() if is_so), None)


Recorder = Callable[[Callable[[], None]], Callable[[], object]]
"""Runs a function as often as recording needs, and returns a function that does the same to the same tensors."""


def record_cuda_graph(run: Callable[[], None]) -> Callable[[], object]:
    """Record the function on a stream of its own; see `record_graph`.

    Raises NapkinError where something in it cannot be recorded, such as a wait of the host.
    """
    try:
        _, replay = record_graph(run, torch.cuda.Stream())
    except RuntimeError as error:
        raise NapkinError(
            f"the training step cannot be recorded as a CUDA graph ({first_line(error)}): use "
            '--training.cuda-graphs off, or cuda_graphs = "off" under [training] in the run\'s recipe.toml'
        ) from error
    return replay


class MicroBatchGraph:
    """The gradients of a step by replaying the graph of one micro-batch."""

    def __init__(self, parallel_model: ParallelModel, recorder: Recorder) -> None:
        self._parallel_model = parallel_model
        self._recorder = recorder
        self._plain_steps = 0
        self._trained: list[nn.Parameter] = []
        self._gradients: list[Tensor] = []
        self._buffers: MicroBatch | None = None
        self._total = torch.zeros(())
        self._replay: Callable[[], object] | None = None

    def gradients(self, micro_batches: Sequence[MicroBatch], passes: Passes) -> Float[Tensor, ""]:
        """See `ParallelModel.gradients`. Micro-batches of another shape, and steps whose operators are watched, are
        computed without the graph."""
        is_watched = _get_current_dispatch_mode() is not None
        if is_watched or self._plain_steps < PLAIN_STEPS or not self._fit(micro_batches):
            loss = self._parallel_model.gradients(micro_batches, passes)
            self._plain_steps += 1
            # A parameter that no pass reaches is not updated, and gets no gradient of zeros.
            self._trained = self._trained or [p for p in self._parallel_model.model.parameters() if p.grad is not None]
            return loss
        if self._replay is None:
            with passes.watch("recording the graph"):
                self._record(micro_batches[0], passes)
        assert self._buffers is not None
        assert self._replay is not None
        self._own_gradients()
        self._total.zero_()
        for part in micro_batches:
            _copy(part, self._buffers)
            with passes.watch("forward and backward"):
                self._replay()
        return self._total.clone()

    def _fit(self, micro_batches: Sequence[MicroBatch]) -> bool:
        first = self._buffers or micro_batches[0]
        wanted = first.inputs.shape, first.documents is None
        return all((part.inputs.shape, part.documents is None) == wanted for part in micro_batches)

    def _record(self, part: MicroBatch, passes: Passes) -> None:
        device, model = part.inputs.device, self._parallel_model
        documents = None if part.documents is None else part.documents.clone()
        weight = torch.zeros((), device=device)
        buffers = self._buffers = MicroBatch(part.inputs.clone(), part.targets.clone(), documents, weight)
        total = self._total = torch.zeros((), device=device)
        self._gradients = [torch.zeros_like(parameter) for parameter in self._trained]
        self._own_gradients()

        def run() -> None:
            with passes.autocast():
                loss = model.loss(buffers.inputs, buffers.targets, buffers.documents) * buffers.weight
            loss.backward()
            total.add_(loss.detach())

        with random_state_kept(device.type):
            self._replay = self._recorder(run)

    def _own_gradients(self) -> None:
        """Give the parameters the graph's gradients, all 0: the update drops them."""
        torch._foreach_zero_(self._gradients)  # pyright: ignore[reportPrivateImportUsage]
        for parameter, gradient in zip(self._trained, self._gradients, strict=True):
            parameter.grad = gradient


def _copy(part: MicroBatch, buffers: MicroBatch) -> None:
    """Copy a micro-batch to where the graph reads it, behind what is queued."""
    buffers.inputs.copy_(part.inputs)
    buffers.targets.copy_(part.targets)
    if part.documents is not None and buffers.documents is not None:
        buffers.documents.copy_(part.documents)
    assert isinstance(buffers.weight, Tensor)
    if isinstance(part.weight, Tensor):
        buffers.weight.copy_(part.weight)
    else:
        buffers.weight.fill_(part.weight)
