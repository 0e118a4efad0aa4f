"""How ranks share the work on one model: a part of every batch each, and with fsdp a part of the model too.

The loss of a step is the mean over all tokens of the global batch that count. A rank weighs its own by its share of
them, times the number of ranks: then the mean over ranks, which DDP and FSDP2 take of gradients, is that of the batch.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.data.batches import IGNORE_INDEX
from napkin.distributed.ranks import Ranks
from napkin.model.transformer import Transformer
from napkin.optim.base import Optimizer
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe

Tokens = Int[Tensor, "batch position"]

_ODD = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: seeds of ranks are far apart."""


class Spread:
    """A model in one process: it has all of it."""

    sum_squares: Callable[[Tensor], Tensor] | None = None
    """Adds up squares of gradients over those who hold the others; None where all are here."""

    def __init__(self, model: Transformer, ranks: Ranks) -> None:
        self.model = model
        self.ranks = ranks

    def loss(self, inputs: Tokens, targets: Tokens, documents: Tokens | None = None) -> Float[Tensor, ""]:
        """The mean loss of a micro-batch of this rank's."""
        return self.model.loss(inputs, targets, documents)

    def begin(self, *, last: bool) -> None:
        """A micro-batch begins, the `last` of its step or not."""

    def settle(self) -> None:
        """Give back what was gathered: parameters are then each rank's part."""

    def resident(self, optimizer: Optimizer) -> list[Tensor] | None:
        """What stays from step to step; None where that can be seen while a step runs."""

    def shares(self, targets: Int[Tensor, "batch position"], size: int) -> list[float]:
        """What each micro-batch of `size` of this rank's rows weighs: its tokens that count, over those of the global
        batch, times the number of ranks.

        It looks at the numbers: targets that are on the host still cost no wait for a GPU.
        """
        counts = (targets != IGNORE_INDEX).sum(dim=1)
        total = max(int(self.ranks.sum(counts.sum().cpu())), 1)
        return [int(part.sum()) * self.ranks.size / total for part in counts.split(size)]

    def mean(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The mean over ranks of what each made of its weighed micro-batches: the loss of the global batch."""
        return loss if self.ranks.size == 1 else self.ranks.sum(loss) / self.ranks.size

    def seed(self, seed: int) -> int:
        """This rank's own seed: rows are dropped in independently of one another wherever they are."""
        return (seed + self.ranks.place.rank * _ODD) % 2**63

    def rounding_seed(self, seed: int) -> int:
        """The seed of stochastic rounding: copies of a parameter are rounded alike."""
        return seed


class SpreadDDP(Spread):
    """A rank has the whole model, and the mean of everybody's gradients once it has its own."""

    def __init__(self, model: Transformer, ranks: Ranks) -> None:
        super().__init__(model, ranks)
        from torch.nn.parallel import DistributedDataParallel

        device = next(model.parameters()).device
        self.wrapped = DistributedDataParallel(
            _Loss(model),
            device_ids=None if device.type == "cpu" else [device.index],
            # Gradients are exchanged where they lie.
            gradient_as_bucket_view=True,
            # The tables of positions follow from the config.
            forward_sync_buffers=False,
        )

    def loss(self, inputs: Tokens, targets: Tokens, documents: Tokens | None = None) -> Float[Tensor, ""]:
        """The mean loss of a micro-batch; gradients are exchanged in its backward pass if it is the last."""
        return self.wrapped(inputs, targets, documents)

    def begin(self, *, last: bool) -> None:
        """Gradients of micro-batches add up at home; after the last one they are exchanged, once per step."""
        self.wrapped.require_backward_grad_sync = last


class SpreadFSDP(Spread):
    """A rank has a part of each parameter, its gradient and its optimizer state: some of the rows.

    A block's parameters are gathered while it works; its gradients go to those who hold the rows, after every
    micro-batch: whole gradients, which would save that, are what there is no room for.
    """

    def __init__(self, model: Transformer, ranks: Ranks, precision: Precision, recipe: Recipe) -> None:
        super().__init__(model, ranks)
        self.sum_squares = ranks.sum
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        self.sharded = FSDPModule
        training = recipe.training
        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
        # fp16 has too little range for weights.
        of_products = "bf16" if precision.products == "bf16" else "fp32"
        gathered = of_products if training.gather_format == "auto" else training.gather_format
        policy = MixedPrecisionPolicy(
            param_dtype=dtypes[gathered], reduce_dtype=dtypes[training.reduce_format], cast_forward_inputs=False
        )
        mesh = init_device_mesh(precision.device_type, (ranks.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        # What lies outside of blocks is as it is in one process: the residual stream begins in fp32.
        outside = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(model, mesh=mesh, mp_policy=outside)
        register_fsdp_forward_method(model, "loss")

    def rounding_seed(self, seed: int) -> int:
        """This rank's own: rows of different ranks are rounded independently of one another."""
        return self.seed(seed)

    def settle(self) -> None:
        """An evaluation, which no backward pass follows, leaves what is outside of blocks gathered."""
        for module in self.model.modules():
            if isinstance(module, self.sharded):
                module.reshard()

    def resident(self, optimizer: Optimizer) -> list[Tensor]:
        """All: what is gathered lies in storages that grow and shrink."""
        return all_resident(self.model, optimizer)


def all_resident(model: Transformer, optimizer: Optimizer) -> list[Tensor]:
    """Parameters, buffers and what the optimizer keeps on their device, averages of weights included."""
    kept = [] if optimizer.state_on_host else optimizer.all_state().values()
    state = [tensor for tensors in kept for tensor in tensors.values()]
    averages = optimizer.state.get("average", {}).get("averages", [])  # pyright: ignore[reportArgumentType, reportCallIssue]
    return [*model.parameters(), *model.buffers(), *state, *averages]


class _Loss(nn.Module):
    """A model whose forward pass is its loss: what DDP watches is `forward`."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, documents: Tensor | None) -> Tensor:
        return self.model.loss(inputs, targets, documents)


def spread(model: Transformer, recipe: Recipe, precision: Precision, ranks: Ranks) -> Spread:
    """Put a model on this rank's device, and between the ranks what the recipe says."""
    sharded = ranks.size > 1 and recipe.training.parallelism == "fsdp"
    if sharded:
        return SpreadFSDP(model, ranks, precision, recipe)
    if precision.device_type != "cpu":
        model = model.to(precision.device_type)
    return Spread(model, ranks) if ranks.size == 1 else SpreadDDP(model, ranks)
