"""Training one model on several ranks: each computes its tokens of every batch, and with fsdp holds a shard of the
model.

The loss of a step is the mean over all target tokens of the global batch. A rank weights each of its micro-batches
by its number of targets over that of the global batch, times the number of ranks that compute other tokens: the mean
over these, which DDP and FSDP2 take of gradients, is then the gradient of that loss.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.data.batches import IGNORE_INDEX
from napkin.distributed.pipeline_stages import MicroBatch, PackedRows, Passes, Tokens
from napkin.distributed.ranks import Ranks
from napkin.model.transformer import TokenScores, Transformer
from napkin.optim.base import Optimizer
from napkin.optim.saved_state import is_divided, local, shards_of
from napkin.optim.tensor_parts import Parts, parts_of
from napkin.recipe.layout import Layout
from napkin.recipe.resolved import ResolvedRecipe

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

    from napkin.distributed.expert_parallel import DividedExperts

ODD = 0x9E3779B97F4A7C15
"""2^64 / golden ratio: puts the seeds of ranks far apart."""
TEACHER = "teacher"
"""The name among an optimizer's states, where meters look for persistent tensors, of a teacher's weights."""


class ParallelModel:
    """A model on ranks that all compute the same tokens: a single process, or tensor parallelism alone."""

    def __init__(self, model: Transformer, ranks: Ranks, layout: Layout) -> None:
        self.model = model
        self.ranks = ranks
        self.layout = layout
        self.stacked: Mapping[str, tuple[int, ...]] = {}
        """For parameters that are stacked matrices, the heights of these matrices, by name; each matrix is divided
        separately."""
        self.stages: Sequence[nn.Module] = ()
        """This rank's pipeline stages, which FSDP2 shards in place of the model."""
        self.experts: DividedExperts | None = None
        """The experts that ranks have in parts."""
        self.same_parameters: ProcessGroup | None = None
        """The ranks that hold the same parameters, or the same parts of them, and average their gradients."""

    def gradients(self, micro_batches: Sequence[MicroBatch], passes: Passes) -> Float[Tensor, ""]:
        """Add up the gradients of this rank's micro-batches. Returns the sum of their weighted losses."""
        total = torch.zeros((), device=micro_batches[0].inputs.device)
        for done, part in enumerate(micro_batches, start=1):
            self.begin_micro_batch(last=done == len(micro_batches))
            with passes.watch("forward"), passes.autocast():
                loss = self.loss(part.inputs, part.targets, part.documents) * part.weight
                passes.after_forward(self.model, 0)
            with passes.watch("backward"):
                passes.scaled(loss).backward()
            total += loss.detach()
        self.finish_gradients()
        return total

    def gradients_of_sequences(
        self, micro_batches: Sequence[PackedRows], loss_of: Callable[[int, TokenScores], Tensor], passes: Passes
    ) -> Float[Tensor, ""]:
        """Add up the gradients of losses of this rank's tokens, `loss_of(micro-batch, scores)`. Returns their sum.

        Each loss is a part of the sum over all micro-batches of all ranks; routers' losses are added by their share of
        the tokens that count. With fsdp all ranks have the same number of micro-batches.
        """
        total = torch.zeros((), device=micro_batches[0].inputs.device)
        n_tokens = max(sum(len(part.targets) for part in micro_batches), 1)
        for number, part in enumerate(micro_batches):
            self.begin_micro_batch(last=number == len(micro_batches) - 1)
            with passes.watch("forward"), passes.autocast():
                scores = self.token_scores(part)
                loss = loss_of(number, scores)
                routers = self.model.add_router_losses(torch.zeros_like(loss), self.model.blocks)
                passes.after_forward(self.model, 0)
            with passes.watch("backward"):
                # Gradients are averaged over ranks, and these add up.
                share = len(part.targets) / n_tokens
                summand = loss * self.layout.token_parts + routers * share
                if self.layout.token_parts > 1:
                    summand = summand + _nothing(scores)
                passes.scaled(summand).backward()
            total += loss.detach() * self.layout.token_parts
        self.finish_gradients()
        return total

    def token_scores(self, part: PackedRows, *, temperature: float | None = None) -> TokenScores:
        """The scores of the tokens of a micro-batch that count."""
        return self.model.token_scores(*_scored(part), temperature=temperature or part.temperature)

    def finish_gradients(self) -> None:
        """Called after the last backward pass of a step: adds up what the ranks of tensor have summands of, and
        averages the gradients of experts that ranks divide."""
        if self.layout.tensor > 1:
            from napkin.distributed.tensor_parallel import add_up_summands

            add_up_summands(list(self.model.parameters()))
        if self.experts is not None:
            self.experts.average_gradients()

    def loss(self, inputs: Tokens, targets: Tokens, documents: Tokens | None = None) -> Float[Tensor, ""]:
        """The mean loss of one of this rank's micro-batches."""
        return self.model.loss(inputs, targets, documents)

    def evaluation_nats(self, inputs: Tokens, targets: Tokens, documents: Tokens | None = None) -> Float[Tensor, ""]:
        """The sum of the losses of some rows' targets in fp64, divided by the number of ranks that compute the same
        tokens: summed over all ranks, each target counts once. Without gradients, and not read by the host."""
        inputs, targets, documents = self.own_columns(inputs, targets, documents)
        n_targets = (targets != IGNORE_INDEX).sum()
        return self.model.loss(inputs, targets, documents).double() * n_targets / self.layout.tensor

    def parts(self, named: Mapping[str, Tensor]) -> Parts:
        """The parts of parameters, or of their optimizer state (named KEY.PARAMETER), that this rank holds."""

        def heights(name: str) -> tuple[int, ...]:
            return self.stacked.get(name) or self.stacked.get(name.partition(".")[2], ())

        ranks = self.layout.tensor
        return {name: parts_of(tensor, heights=heights(name), ranks=ranks) for name, tensor in named.items()}

    def begin_micro_batch(self, *, last: bool) -> None:
        """Called before each micro-batch; `last` is whether it is the last of its step."""

    def reshard(self) -> None:
        """Free gathered parameters: each rank holds only its shard again."""

    def rows(self, batch_size: int) -> slice:
        """The rows of a batch that this rank computes."""
        return self.layout.rows(self.ranks.info.rank, batch_size)

    def own_columns(
        self, inputs: Tokens, targets: Tokens, documents: Tokens | None
    ) -> tuple[Tokens, Tokens, Tokens | None]:
        """The tokens of some sequences that this rank computes."""
        columns = self.layout.columns(self.ranks.info.rank, inputs.shape[1])
        if len(columns) == 1:
            return inputs, targets, documents
        return tuple(
            None if each is None else torch.cat([each[:, own] for own in columns], dim=1)
            for each in (inputs, targets, documents)
        )  # pyright: ignore[reportReturnType]

    def micro_batch_weights(self, targets: Int[Tensor, "batch position"], size: int) -> list[Tensor]:
        """The weight of each micro-batch of `size` of this rank's rows: its targets over those of the global batch,
        times the number of ranks that compute other tokens.

        They are computed and stay on the targets' device: a GPU is not waited for.
        """
        _, targets, _ = self.own_columns(targets, targets, None)
        counts = (targets != IGNORE_INDEX).sum(dim=1)
        alike = self.layout.pipeline * self.layout.tensor
        total = (self.ranks.all_reduce_sum(counts.sum()) // alike).clamp(min=1)
        own = torch.stack([part.sum() for part in counts.split(size)]) * self.layout.token_parts
        return list((own.double() / total).float().unbind())

    @torch.no_grad()
    def mean(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """The mean over ranks of the sums of their weighted micro-batches: the loss of the global batch."""
        ranks = self.ranks
        if ranks.world_size == 1:
            return loss
        return ranks.all_reduce_sum(loss) / (self.layout.token_parts * self.layout.tensor)

    def of_all_tokens(self, counts: Int[Tensor, "*counts"]) -> Int[Tensor, "*counts"]:
        """The sum over ranks of what each counted for its own tokens in its own layers. A collective."""
        return self.ranks.all_reduce_sum(counts) // self.layout.tensor

    @functools.cached_property
    def sum_of_squares_weights(self) -> list[float] | None:
        """Weights of the squares of each parameter's gradient, so that summed over all ranks each counts once; None
        where every rank has all gradients, whole.

        Computed once, at the first use: after a backward pass, when no parameter is gathered.
        """
        if self.layout.splits_only_batches and self.layout.strategy != "fsdp":
            return None
        return [self.sum_of_squares_weight(parameter) for parameter in self.model.parameters()]

    def sum_of_squares_weight(self, parameter: Tensor) -> float:
        """The shards of a parameter over the ranks that compute its layer: 1 over the number of its copies."""
        return shards_of(parameter) * self.layout.pipeline / self.layout.world_size

    def rank_seed(self, seed: int) -> int:
        """A seed that differs between ranks: dropout is independent between rows, whichever rank computes them."""
        return (seed + self.ranks.info.rank * ODD) % 2**63

    def rounding_seed(self, seed: int) -> int:
        """The seed of stochastic rounding: the same on all ranks with copies of a parameter, which stay equal."""
        return seed


class DDPModel(ParallelModel):
    """Each rank has the whole model; gradients are averaged over ranks during the backward pass."""

    def __init__(
        self,
        model: Transformer,
        ranks: Ranks,
        layout: Layout,
        group: "ProcessGroup | None" = None,
        apart: Collection[Tensor] = (),
    ) -> None:
        """`group` is that of the ranks, by default all. The gradients of parameters `apart` are not averaged."""
        super().__init__(model, ranks, layout)
        self.same_parameters = group
        from torch.nn.parallel import DistributedDataParallel

        device = next(model.parameters()).device
        called = _Called(model)
        left_out = [name for name, parameter in called.named_parameters() if parameter in set(apart)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(called, left_out)
        self.wrapped = DistributedDataParallel(
            called,
            process_group=group,
            device_ids=None if device.type == "cpu" else [device.index],
            # Gradients are all-reduced in place.
            gradient_as_bucket_view=True,
            # The buffers are tables of positions, which follow from the config.
            forward_sync_buffers=False,
        )

    def loss(self, inputs: Tokens, targets: Tokens, documents: Tokens | None = None) -> Float[Tensor, ""]:
        """The mean loss of a micro-batch; the backward pass of the last one all-reduces the gradients."""
        return self.wrapped("loss", inputs, targets, documents)

    def token_scores(self, part: PackedRows, *, temperature: float | None = None) -> TokenScores:
        """The scores of the tokens of a micro-batch; the backward pass of the last one all-reduces."""
        if not torch.is_grad_enabled():
            return super().token_scores(part, temperature=temperature)
        return TokenScores(*self.wrapped("token_scores", *_scored(part), temperature=temperature or part.temperature))

    def begin_micro_batch(self, *, last: bool) -> None:
        """Gradients of micro-batches add up locally; the last one all-reduces them, once per step."""
        self.wrapped.require_backward_grad_sync = last


class FSDPModel(ParallelModel):
    """Each rank has some of the rows of each parameter, of its gradient and of its optimizer state.

    A block's parameters are gathered while it computes; its gradients are reduce-scattered after every micro-batch,
    because unsharded gradients would not fit.
    """

    def __init__(
        self,
        model: Transformer,
        ranks: Ranks,
        resolved: ResolvedRecipe,
        mesh: "DeviceMesh",
        experts: "DividedExperts | None" = None,
    ) -> None:
        """`mesh` has the dimension of shards; if it has two, the first is that of replicas. Experts that ranks divide
        are sharded over the rest of the mesh, or not at all."""
        super().__init__(model, ranks, resolved.layout)
        shard_module(model, model.blocks, resolved, mesh, experts=experts)
        _register_methods(model)

    def rounding_seed(self, seed: int) -> int:
        """A seed that differs between shards, so that their rows are rounded independently, but not between replicas of
        a shard."""
        places = self.layout.coordinates(self.ranks.info.rank)
        return (seed + (places["shard"] * self.layout.context + places["context"]) * ODD) % 2**63

    def reshard(self) -> None:
        """Free gathered parameters outside the blocks: a pass without gradients leaves them gathered."""
        reshard_modules(self.model)


class CopiesModel(FSDPModel):
    """Each rank has a whole copy of a part of the model, which tensor parallelism has made: what DDP is for DTensors.

    It is FSDP2 without shards: the gradients of a block are all-reduced while those of the next are computed. While a
    block computes, it has a second copy of its parameters.
    """

    def __init__(self, model: Transformer, ranks: Ranks, resolved: ResolvedRecipe, mesh: "DeviceMesh") -> None:
        """`mesh` has one dimension, that of the ranks with the same parameters."""
        ParallelModel.__init__(self, model, ranks, resolved.layout)
        self.same_parameters = mesh.get_group()
        from torch.distributed._composable.replicate_with_fsdp import replicate
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

        self.sharded = FSDPModule
        self.same_parameters = mesh.get_group()
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        for module in (*model.blocks, model):
            replicate(module, mesh=mesh, mp_policy=policy)
        _register_methods(model)

    def rounding_seed(self, seed: int) -> int:
        """The seed itself, as all ranks must round alike."""
        return seed

    def begin_micro_batch(self, *, last: bool) -> None:
        """Gradients of micro-batches add up locally; the last one all-reduces them, once per step."""
        cast(Any, self.model).set_requires_gradient_sync(last)


def _scored(part: PackedRows) -> tuple[Any, ...]:
    """The arguments of `Transformer.token_scores`."""
    taught = None if part.teacher is None else part.teacher(part)
    return part.inputs, part.places, part.targets, part.documents, part.coefficients, taught


def _nothing(scores: TokenScores) -> Float[Tensor, ""]:
    """0, with a gradient of 0: ranks exchange the gradients of both heads, whichever of them a loss reads."""
    read = scores.log_probabilities, scores.scalars, scores.weighted_sum
    return 0 * torch.stack([each.sum() for each in read if each is not None]).sum()


def _register_methods(model: Transformer) -> None:
    """FSDP2 gathers parameters around these methods, as it does around `forward`."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    for method in ("loss", "token_scores"):
        register_fsdp_forward_method(model, method)


def parameters_apart(experts: "DividedExperts | None") -> set[nn.Parameter]:
    """Parameters whose gradients are not averaged with the others: those of experts that ranks divide."""
    return set() if experts is None else set(experts.parameters)


def shard_module(
    module: nn.Module,
    blocks: nn.ModuleList,
    resolved: ResolvedRecipe,
    mesh: "DeviceMesh",
    *,
    reshard_after_forward: bool | None = None,
    experts: "DividedExperts | None" = None,
) -> None:
    """Divide the parameters of each of a module's blocks, and of all that is outside of them, by FSDP2.

    Without `reshard_after_forward` gathered parameters stay until the backward pass; None is True for blocks alone.
    Experts that ranks divide are divided further over the remaining ranks of `mesh`, or left as they are.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    policy = MixedPrecisionPolicy(
        param_dtype=dtypes[resolved.gather_format],
        reduce_dtype=dtypes[resolved.recipe.training.reduce_format],
        cast_forward_inputs=False,
    )
    options: dict[str, Any] = {
        "reshard_after_forward": reshard_after_forward,
        "ignored_params": parameters_apart(experts),
    }

    def divided_by(mesh: "DeviceMesh") -> dict[str, Any]:
        return {"mesh": mesh, "shard_placement_fn": functools.partial(_placement, shards=mesh.size(mesh.ndim - 1))}

    if experts is not None and experts.mesh is not None:
        for each in (each for each in module.modules() if each in experts.modules):
            divided = cast(FSDPModule, fully_shard(each, mp_policy=policy, **divided_by(experts.mesh), **options))
            # Their gradients are already sums over the ranks that divide them.
            divided.set_gradient_divide_factor(experts.token_parts)
            # gloo cannot divide while it adds up.
            divided.set_force_sum_reduction_for_comms(enable=True)
    options |= divided_by(mesh)
    for block in blocks:
        fully_shard(block, mp_policy=policy, **options)
    # Outside the blocks the formats are those of a single process: the residual stream starts in fp32.
    outside = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    fully_shard(module, mp_policy=outside, **options)


def shard_dimension(shape: Sequence[int], shards: int, taken: Collection[int] = ()) -> int:
    """The dimension along which FSDP2 divides a parameter.

    It is the first one, whose parts are padded to one size. For a stack of matrices whose number is not a multiple of
    the number of shards, it is another dimension that divides evenly, if there is one that tensor parallelism has not
    `taken`: fewer experts than ranks would be padded to as many, and the padding sent.
    """
    if len(shape) < 3 or shape[0] % shards == 0:
        return 0
    return next((dim for dim in range(1, len(shape)) if dim not in taken and shape[dim] % shards == 0), 0)


def _placement(parameter: nn.Parameter, shards: int) -> "Shard":
    from torch.distributed.tensor import Shard

    taken = [dim for dim in range(parameter.ndim) if is_divided(parameter, dim)]
    return Shard(shard_dimension(local(parameter).shape, shards, taken))


def reshard_modules(root: nn.Module) -> None:
    """Free the gathered parameters of all modules that FSDP2 divides."""
    from torch.distributed.fsdp import FSDPModule

    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def all_resident(model: Transformer, optimizer: Optimizer) -> list[Tensor]:
    """Parameters, buffers and the optimizer state on their device, with averaged weights and those of a teacher."""
    kept = [] if optimizer.state_on_host else optimizer.all_state().values()
    state = [tensor for tensors in kept for tensor in tensors.values()]
    averages = optimizer.state.get("average", {}).get("averages", [])  # pyright: ignore[reportArgumentType, reportCallIssue]
    teacher = optimizer.state.get(TEACHER, {}).get("weights", [])  # pyright: ignore[reportArgumentType, reportCallIssue]
    copies = [] if optimizer.narrow_copies is None else optimizer.narrow_copies.tensors
    return [*model.parameters(), *model.buffers(), *state, *averages, *copies, *teacher]


class _Called(nn.Module):
    """A model whose forward pass is one of its methods: DDP hooks into `forward`."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, *tensors: Tensor | None, **settings: float) -> Any:
        return getattr(self.model, method)(*tensors, **settings)
