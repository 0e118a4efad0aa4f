"""How ranks train one model together: each computes its rows of every batch, and with fsdp holds a shard of the model.

The loss of a step is the mean over all target tokens of the global batch. A rank weights each of its micro-batches
by its number of targets over that of the global batch, times the world size: the mean over ranks, which DDP and FSDP2
take of gradients, is then the gradient of that loss.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.data.batches import IGNORE_INDEX
from napkin.distributed.ranks import Ranks
from napkin.model.transformer import Transformer
from napkin.optim.base import Optimizer
from napkin.recipe.resolved import ResolvedRecipe

Tokens = Int[Tensor, "batch position"]

_ODD = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: puts the seeds of ranks far apart."""


class ParallelModel:
    """A model in a single process."""

    sum_squares: Callable[[Tensor], Tensor] | None = None
    """Sums squares of gradients over the ranks that hold the other rows; None where this rank holds all rows."""

    def __init__(self, model: Transformer, ranks: Ranks) -> None:
        self.model = model
        self.ranks = ranks

    def loss(self, inputs: Tokens, targets: Tokens, documents: Tokens | None = None) -> Float[Tensor, ""]:
        """The mean loss of one of this rank's micro-batches."""
        return self.model.loss(inputs, targets, documents)

    def begin_micro_batch(self, *, last: bool) -> None:
        """Called before each micro-batch; `last` is whether it is the last of its step."""

    def reshard(self) -> None:
        """Free gathered parameters: each rank holds only its shard again."""

    def resident(self, optimizer: Optimizer) -> list[Tensor] | None:
        """The tensors that persist between steps; None where the meter can see them while a step runs."""

    def micro_batch_weights(self, targets: Int[Tensor, "batch position"], size: int) -> list[float]:
        """The weight of each micro-batch of `size` of this rank's rows: its targets over those of the global batch,
        times the number of ranks.

        The result is on the host: with targets on the host, no GPU synchronisation is needed.
        """
        counts = (targets != IGNORE_INDEX).sum(dim=1)
        total = max(int(self.ranks.all_reduce_sum(counts.sum().cpu())), 1)
        return [int(part.sum()) * self.ranks.world_size / total for part in counts.split(size)]

    def mean(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The mean over ranks of the sums of their weighted micro-batches: the loss of the global batch."""
        ranks = self.ranks
        return loss if ranks.world_size == 1 else ranks.all_reduce_sum(loss) / ranks.world_size

    def rank_seed(self, seed: int) -> int:
        """A seed that differs between ranks: dropout is independent between rows, whichever rank computes them."""
        return (seed + self.ranks.info.rank * _ODD) % 2**63

    def rounding_seed(self, seed: int) -> int:
        """The seed of stochastic rounding: the same on all ranks, so that copies of a parameter stay equal."""
        return seed


class DDPModel(ParallelModel):
    """Each rank has the whole model; gradients are averaged over ranks during the backward pass."""

    def __init__(self, model: Transformer, ranks: Ranks) -> None:
        super().__init__(model, ranks)
        from torch.nn.parallel import DistributedDataParallel

        device = next(model.parameters()).device
        self.wrapped = DistributedDataParallel(
            _Loss(model),
            device_ids=None if device.type == "cpu" else [device.index],
            # Gradients are all-reduced in place.
            gradient_as_bucket_view=True,
            # The buffers are tables of positions, which follow from the config.
            forward_sync_buffers=False,
        )

    def loss(self, inputs: Tokens, targets: Tokens, documents: Tokens | None = None) -> Float[Tensor, ""]:
        """The mean loss of a micro-batch; the backward pass of the last one all-reduces the gradients."""
        return self.wrapped(inputs, targets, documents)

    def begin_micro_batch(self, *, last: bool) -> None:
        """Gradients of micro-batches add up locally; the last one all-reduces them, once per step."""
        self.wrapped.require_backward_grad_sync = last


class FSDPModel(ParallelModel):
    """Each rank has some of the rows of each parameter, of its gradient and of its optimizer state.

    A block's parameters are gathered while it computes; its gradients are reduce-scattered after every micro-batch,
    because unsharded gradients would not fit.
    """

    def __init__(self, model: Transformer, ranks: Ranks, resolved: ResolvedRecipe) -> None:
        super().__init__(model, ranks)
        self.sum_squares = ranks.all_reduce_sum
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        self.sharded = FSDPModule
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        policy = MixedPrecisionPolicy(
            param_dtype=dtypes[resolved.gather_format],
            reduce_dtype=dtypes[resolved.recipe.training.reduce_format],
            cast_forward_inputs=False,
        )
        mesh = init_device_mesh(resolved.precision.device_type, (ranks.world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        # Outside the blocks the formats are those of a single process: the residual stream starts in fp32.
        outside = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(model, mesh=mesh, mp_policy=outside)
        register_fsdp_forward_method(model, "loss")

    def rounding_seed(self, seed: int) -> int:
        """A seed that differs between ranks: their rows are rounded independently."""
        return self.rank_seed(seed)

    def reshard(self) -> None:
        """Free gathered parameters outside the blocks: a pass without gradients leaves them gathered."""
        for module in self.model.modules():
            if isinstance(module, self.sharded):
                module.reshard()

    def resident(self, optimizer: Optimizer) -> list[Tensor]:
        """All persistent tensors: the meter cannot see storages that grow and shrink as parameters are gathered."""
        return all_resident(self.model, optimizer)


def all_resident(model: Transformer, optimizer: Optimizer) -> list[Tensor]:
    """Parameters, buffers and the optimizer state on their device, averaged weights included."""
    kept = [] if optimizer.state_on_host else optimizer.all_state().values()
    state = [tensor for tensors in kept for tensor in tensors.values()]
    averages = optimizer.state.get("average", {}).get("averages", [])  # pyright: ignore[reportArgumentType, reportCallIssue]
    return [*model.parameters(), *model.buffers(), *state, *averages]


class _Loss(nn.Module):
    """A model whose forward pass is its loss: DDP hooks into `forward`."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        return self.model.loss(inputs, targets, documents)


def parallelize(model: Transformer, resolved: ResolvedRecipe, ranks: Ranks) -> ParallelModel:
    """Put a model on this rank's device, and wrap it in DDP or FSDP as the recipe says."""
    if resolved.strategy == "fsdp":
        return FSDPModel(model, ranks, resolved)
    if resolved.precision.device_type != "cpu":
        model = model.to(resolved.precision.device_type)
    return DDPModel(model, ranks) if resolved.strategy == "ddp" else ParallelModel(model, ranks)
