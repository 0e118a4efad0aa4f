"""How ranks train one model together: each works on its rows of every batch, and with fsdp holds a part of the model.

The loss of a step is the mean over all target tokens of the global batch. A rank weighs each of its micro-batches by
its number of targets over that of the global batch, times the number of ranks: then the mean over ranks, which DDP and
FSDP2 take of gradients, is the gradient of that loss.
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
"""2^64 over the golden ratio: seeds of ranks are far apart."""


class ParallelModel:
    """A model in one process, which holds all of it."""

    sum_squares: Callable[[Tensor], Tensor] | None = None
    """Adds up squares of gradients over the ranks that hold the other rows; None where all rows are here."""

    def __init__(self, model: Transformer, ranks: Ranks) -> None:
        self.model = model
        self.ranks = ranks

    def loss(self, inputs: Tokens, targets: Tokens, documents: Tokens | None = None) -> Float[Tensor, ""]:
        """The mean loss of one of this rank's micro-batches."""
        return self.model.loss(inputs, targets, documents)

    def begin_micro_batch(self, *, last: bool) -> None:
        """To be called before each micro-batch; `last` says whether it is the last of its step."""

    def reshard(self) -> None:
        """Free what was gathered: each rank has its own part of the parameters again."""

    def resident(self, optimizer: Optimizer) -> list[Tensor] | None:
        """What stays from step to step; None where that can be seen while a step runs."""

    def micro_batch_weights(self, targets: Int[Tensor, "batch position"], size: int) -> list[float]:
        """The weight of each micro-batch of `size` of this rank's rows: its targets over those of the global batch,
        times the number of ranks.

        It reads the numbers: with targets that are still on the host no GPU is waited for.
        """
        counts = (targets != IGNORE_INDEX).sum(dim=1)
        total = max(int(self.ranks.all_reduce_sum(counts.sum().cpu())), 1)
        return [int(part.sum()) * self.ranks.world_size / total for part in counts.split(size)]

    def mean(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The mean over ranks of the sums of their weighted micro-batches: the loss of the global batch."""
        ranks = self.ranks
        return loss if ranks.world_size == 1 else ranks.all_reduce_sum(loss) / ranks.world_size

    def rank_seed(self, seed: int) -> int:
        """This rank's own seed: dropout is independent from row to row, whichever rank has them."""
        return (seed + self.ranks.info.rank * _ODD) % 2**63

    def rounding_seed(self, seed: int) -> int:
        """The seed of stochastic rounding: copies of a parameter are rounded alike."""
        return seed


class DDPModel(ParallelModel):
    """A rank has the whole model; gradients are averaged over ranks while the backward pass runs."""

    def __init__(self, model: Transformer, ranks: Ranks) -> None:
        super().__init__(model, ranks)
        from torch.nn.parallel import DistributedDataParallel

        device = next(model.parameters()).device
        self.wrapped = DistributedDataParallel(
            _Loss(model),
            device_ids=None if device.type == "cpu" else [device.index],
            # Gradients are all-reduced in place.
            gradient_as_bucket_view=True,
            # The tables of positions follow from the config.
            forward_sync_buffers=False,
        )

    def loss(self, inputs: Tokens, targets: Tokens, documents: Tokens | None = None) -> Float[Tensor, ""]:
        """The mean loss of a micro-batch; the backward pass of the last one all-reduces the gradients."""
        return self.wrapped(inputs, targets, documents)

    def begin_micro_batch(self, *, last: bool) -> None:
        """Gradients of micro-batches add up locally; the last one all-reduces them, once per step."""
        self.wrapped.require_backward_grad_sync = last


class FSDPModel(ParallelModel):
    """A rank has some of the rows of each parameter, of its gradient and of its optimizer state.

    A block's parameters are gathered while it works; its gradients are reduced and scattered after every micro-batch,
    because there is no room for whole gradients.
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
        # Outside of blocks the formats are those of a single process: the residual stream begins in fp32.
        outside = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(model, mesh=mesh, mp_policy=outside)
        register_fsdp_forward_method(model, "loss")

    def rounding_seed(self, seed: int) -> int:
        """This rank's own: rows of different ranks are rounded independently of one another."""
        return self.rank_seed(seed)

    def reshard(self) -> None:
        """Free what is outside of blocks: an evaluation, which no backward pass follows, leaves it gathered."""
        for module in self.model.modules():
            if isinstance(module, self.sharded):
                module.reshard()

    def resident(self, optimizer: Optimizer) -> list[Tensor]:
        """All of it: what is gathered lies in storages that grow and shrink."""
        return all_resident(self.model, optimizer)


def all_resident(model: Transformer, optimizer: Optimizer) -> list[Tensor]:
    """Parameters, buffers and what the optimizer keeps on their device, averages of weights included."""
    kept = [] if optimizer.state_on_host else optimizer.all_state().values()
    state = [tensor for tensors in kept for tensor in tensors.values()]
    averages = optimizer.state.get("average", {}).get("averages", [])  # pyright: ignore[reportArgumentType, reportCallIssue]
    return [*model.parameters(), *model.buffers(), *state, *averages]


class _Loss(nn.Module):
    """A model whose forward pass is its loss: DDP watches `forward`."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        return self.model.loss(inputs, targets, documents)


def parallelize(model: Transformer, resolved: ResolvedRecipe, ranks: Ranks) -> ParallelModel:
    """Put a model on this rank's device, and divide it between the ranks as the recipe says."""
    if resolved.strategy == "fsdp":
        return FSDPModel(model, ranks, resolved)
    if resolved.precision.device_type != "cpu":
        model = model.to(resolved.precision.device_type)
    return DDPModel(model, ranks) if resolved.strategy == "ddp" else ParallelModel(model, ranks)
