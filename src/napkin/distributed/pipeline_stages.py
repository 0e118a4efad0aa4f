"""The stages of a pipeline: the model cut down to what this rank computes, and each stage as a module that torch can
run.

The first stage begins with the embedding, the last ends with norm, head and loss. Parts that other ranks hold are
removed from the model; the rest keeps its names, so that optimizers, checkpoints and logs see the same names as in a
single process.

Whichever way the ranks divide the work, the same is computed for each micro-batch of a step.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from napkin.accounting.pipeline_schedules import SCHEDULES, loop_placement, v_placement
from napkin.kernels.loss.distillation import Distillation
from napkin.model.positions import NoPositions
from napkin.model.transformer import Transformer, mixtures
from napkin.recipe.layout import Layout

Tokens = Int[Tensor, "batch position"]


@dataclass(frozen=True)
class MicroBatch:
    """Some of a rank's rows of a batch."""

    inputs: Tokens
    targets: Tokens
    documents: Tokens | None
    weight: float | Tensor
    """Weight of its mean loss in the loss of the step, as `ParallelModel.micro_batch_weights` has it."""


@dataclass(frozen=True)
class PackedRows:
    """Sequences of different lengths in rows of one length, and which of their tokens count."""

    inputs: Tokens
    documents: Tokens | None
    """The number of each token's sequence within its row; None where every row has one sequence."""
    places: Int[Tensor, " token"]
    """Index of the token before each token that counts, among the inputs, row by row."""
    targets: Int[Tensor, " token"]
    """The tokens that count."""
    temperature: float = 1.0
    """Temperature by which logits are divided: that with which these tokens were sampled."""
    coefficients: Float[Tensor, " token"] | None = None
    """The loss's gradient with respect to each log-probability, where it is known before the forward pass."""
    teacher: "Callable[[PackedRows], Distillation] | None" = None
    """Returns the teacher's distributions of the tokens that count in the loss; None without distillation."""


@dataclass(frozen=True)
class Passes:
    """The contexts around the forward and backward passes of a micro-batch."""

    autocast: Callable[[], AbstractContextManager] = nullcontext
    """The number formats of the forward pass."""
    watch: Callable[[str], AbstractContextManager] = lambda part: nullcontext()
    """Times the parts of a step: "forward" and "backward"."""
    after_forward: Callable[[nn.Module, int], None] = lambda module, router: None
    """Called after each forward pass with the module that has run, the model or a stage of it, and the number of its
    first router among those of the model."""
    loss_factor: float | None = None
    """Factor of a loss before its backward pass: fp16's scale."""

    def scaled(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The loss, scaled as its backward pass starts from it."""
        return loss if self.loss_factor is None else loss * self.loss_factor


Batch = Int[Tensor, "batch position"]


class OnAnotherRank(nn.Module):
    """Stands for a part of the model that another rank of the pipeline holds."""

    def forward(self, *_: Any) -> Tensor:
        raise AssertionError("another rank computes this part of the model")


def ranks_of_stages(layout: Layout) -> tuple[int, ...]:
    """The rank in the pipeline of each stage, first stage first."""
    place = v_placement if SCHEDULES[layout.schedule].placement == "v" else loop_placement
    return place(layout.pipeline, layout.stages_per_rank)


def cut_stages(model: Transformer, layout: Layout, rank: int) -> "list[StageModule]":
    """This rank's stages, in the order of the forward pass; modules that none of them computes are removed from the
    model.

    `rank` counts along the pipeline. With tied embeddings the last stage has the matrix too.
    """
    blocks = layout.blocks_of_stages(len(model.blocks))
    routers = [len(mixtures(block)) for block in model.blocks]
    own = [stage for stage, holder in enumerate(ranks_of_stages(layout)) if holder == rank]
    has_first, has_last = own[0] == 0, own[-1] == layout.stages - 1
    kept = {block for stage in own for block in blocks[stage]}
    for index in set(range(len(model.blocks))) - kept:
        model.blocks[index] = OnAnotherRank()
    if not has_first:
        if next(model.positions.parameters(), None) is not None:
            # They are only added to the embedding.
            model.add_module("positions", NoPositions())
        if not (has_last and model.head is None):
            model.add_module("embedding", OnAnotherRank())
    if not has_last:
        model.add_module("norm", OnAnotherRank())
        if model.head is not None:
            model.add_module("head", OnAnotherRank())
    return [StageModule(model, stage, blocks[stage], layout, routers) for stage in own]


class StageModule(nn.Module):
    """Some blocks of a model in a row, called for a micro-batch at a time.

    Its submodules are those of the model; the model itself is not among them, because it may have other stages too.
    """

    def __init__(self, model: Transformer, stage: int, blocks: range, layout: Layout, routers: Sequence[int]) -> None:
        """`routers` is the number of routers in each block of the whole model."""
        super().__init__()
        self.stage = stage
        self.is_first, self.is_last = stage == 0, stage == layout.stages - 1
        self.first_router = sum(routers[: blocks.start])
        self.n_routers = sum(routers)
        self.blocks = nn.ModuleList(model.blocks[index] for index in blocks)
        self.outside = nn.ModuleList(self._outside(model))
        self._model = (model,)
        self.splits_backward = layout.splits_backward
        """True if the gradients of parameters are computed later than those of the input."""
        self.passes = Passes()
        self.total: Tensor | None = None
        """The sum of the weighted losses of the micro-batches of a step, without gradient."""

    def _outside(self, model: Transformer) -> Iterable[nn.Module]:
        if self.is_first:
            yield model.embedding
        if self.is_first or next(model.positions.parameters(), None) is None:
            yield model.positions
        if self.is_last:
            yield model.norm
            yield model.embedding if model.head is None else model.head

    @property
    def model(self) -> Transformer:
        """The model that it is a part of."""
        return self._model[0]

    def forward(
        self,
        x: Float[Tensor, "batch position d_model"] | Batch,
        *,
        tokens: Batch,
        targets: Batch,
        weight: Float[Tensor, " 1"],
        documents: Batch | None = None,
    ) -> Float[Tensor, "batch position d_model"] | Float[Tensor, ""]:
        """The residual stream after this stage, or in the last one the loss, weighted.

        `x` is what the stage before has returned; in the first it is `tokens`.
        """
        model, boundary = self.model, x.dtype
        with self.passes.autocast():
            if self.is_first:
                x = model.embed(tokens, documents)
                boundary = model.embedding.weight.dtype
            x = model.through(self.blocks, x, tokens, documents)
            if not self.is_last and not self.n_routers:
                return x.to(boundary)
            loss = x.new_zeros((), dtype=torch.float32)
            if self.is_last:
                hidden = model.normalized(x)
                loss = self._split_loss(hidden, targets) if self.splits_backward else model.loss_of(hidden, targets)
            if self.n_routers:
                loss = model.add_router_losses(loss, self.blocks, self.n_routers)
            loss = loss * weight.squeeze()
            self.passes.after_forward(self, self.first_router)
        self.total = loss.detach() if self.total is None else self.total + loss.detach()
        if self.is_last:
            return loss
        x = x.to(boundary)
        return x if loss.grad_fn is None else _WithLoss.apply(x, self.passes.scaled(loss))  # pyright: ignore[reportReturnType]

    def _split_loss(self, hidden: Float[Tensor, "batch position d_model"], targets: Batch) -> Float[Tensor, ""]:
        """The loss, whose backward pass may be run in two: for the hidden states, and later for the head's matrix."""
        if not torch.is_grad_enabled():
            return self.model.loss_of(hidden, targets)
        matrix = self.model.head_weight
        leaves = hidden.detach().requires_grad_(), matrix.detach().requires_grad_()
        later = _Later(self.model.loss_of(leaves[0], targets, leaves[1]), leaves)
        return _ForHidden.apply(hidden, later) + _ForMatrix.apply(matrix, later)  # pyright: ignore[reportOperatorIssue]


class _WithLoss(torch.autograd.Function):
    """The first argument; its backward pass is also that of the second, a loss that depends on this stage alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        # A view could not be detached, which torch's split backward pass does with the output of a stage.
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (one,) = ctx.saved_tensors
        return grad_outputs[0], one


class _Later:
    """A loss whose gradients, of hidden states and of the head's matrix, are computed at once and used one by one."""

    def __init__(self, loss: Tensor, leaves: tuple[Tensor, Tensor]) -> None:
        self.loss, self.leaves = loss, leaves
        self.of_matrix: Tensor | None = None


class _ForHidden(torch.autograd.Function):
    """The loss, as far as it depends on the hidden states."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, later: _Later) -> Tensor:
        ctx.later = later
        return later.loss.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        later: _Later = ctx.later
        of_hidden, later.of_matrix = torch.autograd.grad(later.loss, later.leaves, grad_outputs)
        return of_hidden, None


class _ForMatrix(torch.autograd.Function):
    """Returns 0; its backward pass yields the matrix's gradient, which the backward pass for the hidden states has
    left."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, later: _Later) -> Tensor:
        ctx.later = later
        return torch.zeros_like(later.loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.later.of_matrix, None
