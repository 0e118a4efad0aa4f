"""One training step: the training loop runs it, and the ledger is counted from the same code.

`ExpertCounts` sums the tokens routed to each expert over a step's micro-batches, on the device.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.distributed.parallel_model import ParallelModel, all_resident
from napkin.distributed.pipeline_stages import MicroBatch, PackedRows, Passes
from napkin.distributed.ranks import ALONE, Ranks
from napkin.distributed.sharded_start import allocate, draw_parts, zero_parts
from napkin.distributed.sharding import parallelize
from napkin.kernels.products.linear import narrow_linear
from napkin.model.adapters import add_adapters, merge_adapters
from napkin.model.config import ModelConfig
from napkin.model.feed_forward import Routing
from napkin.model.kernel_forms import (
    hold_frozen_narrow,
    multiplied_matrices,
    multiply_narrow,
    read_narrow_copies,
    use_kernels,
)
from napkin.model.layers import Draw, deferred_draws
from napkin.model.transformer import TokenScores, Transformer, add_scalar_head, mixtures
from napkin.optim.averaging import WeightAverage
from napkin.optim.base import Optimizer
from napkin.optim.clipping import LossScale, clip_gradients, norm_and_factor
from napkin.optim.narrow_copies import NarrowCopies, StochasticRounding
from napkin.optim.registry import build_optimizer
from napkin.optim.tensor_parts import Parts, whole_parts
from napkin.recipe.precision import NARROW, Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.recipe.tuning_recipe import AdapterConfig, ReinforcementRecipe, RewardModelRecipe, TuningRecipe
from napkin.tensors import HostCopy, together
from napkin.train_step.compile import compile_blocks, recompute_blocks
from napkin.train_step.step_graph import MicroBatchGraph, Recorder


class ExpertCounts:
    """Sums over all routings since the last `clear`."""

    def __init__(self, n_routers: int = 0, n_experts: int = 0) -> None:
        """`n_routers` is how many the model has, on this rank or another, and `n_experts` how many each can choose."""
        self.n_routers, self.n_experts = n_routers, n_experts
        self._sums: dict[int, Tensor] = {}
        self._sent: HostCopy | None = None

    def clear(self) -> None:
        self._sums, self._sent = {}, None

    def add(self, routings: Sequence[Routing], first: int = 0) -> None:
        """Add a forward pass through some layers in a row, one routing per layer; `first` is the first router's
        number."""
        for number, routing in enumerate(routings, start=first):
            row = torch.cat([routing.tokens_per_expert, routing.dropped[None]])
            self._sums[number] = self._sums[number] + row if number in self._sums else row

    @property
    def is_sent(self) -> bool:
        """True if `send` was called since the last `clear`."""
        return self._sent is not None

    def send(
        self, sum_over_ranks: Callable[[Tensor], Tensor] = lambda counts: counts, device: torch.device | None = None
    ) -> None:
        """Start to copy the sums to the host, without waiting for a GPU.

        With `sum_over_ranks` those of all ranks, also in layers that are not on this one; `device` is where it counts.
        """
        if not self.n_routers:
            return
        missing = torch.zeros(self.n_experts + 1, dtype=torch.int64, device=device)
        rows = torch.stack([self._sums.get(number, missing) for number in range(self.n_routers)])
        self._sent = HostCopy(sum_over_ranks(rows))

    def read(self) -> tuple[list[list[int]], list[int]] | tuple[None, None]:
        """Tokens of each expert and dropped tokens, by layer, as they were sent, or this rank's; None without
        experts."""
        if not self.n_routers:
            return None, None
        if self._sent is None:
            self.send()
        assert self._sent is not None
        counts = self._sent.read()
        return [row[:-1] for row in counts], [row[-1] for row in counts]


Watch = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class TrainState:
    """The model and optimizer, which a step changes, and the settings that it computes with."""

    model: Transformer
    optimizer: Optimizer
    resolved: ResolvedRecipe
    parallel_model: ParallelModel
    """The model as this rank computes it: alone, in DDP, or in FSDP."""
    average: WeightAverage | None = None
    """Moving average of the weights, if the recipe asks for one; each optimizer step updates it."""
    expert_counts: ExpertCounts = field(default_factory=ExpertCounts)
    """Tokens per expert in the last step, if the model has experts."""
    loss_scale: LossScale | None = None
    """The scale of fp16 losses; None in other formats."""
    compiled: bool = False
    """True if the blocks are compiled."""
    graph: MicroBatchGraph | None = None
    """The CUDA graph of a micro-batch of `step`, if there is to be one."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the whole run: the batch is that of all ranks together."""
        return self.resolved.recipe

    @property
    def precision(self) -> Precision:
        return self.resolved.precision

    def step(
        self,
        number: int,
        inputs: Int[Tensor, "batch position"],
        targets: Int[Tensor, "batch position"],
        documents: Int[Tensor, "batch position"] | None = None,
        *,
        weights: Sequence[float | Tensor] | None = None,
        watch: Watch = lambda part: nullcontext(),
        is_fit: Callable[[Tensor, Tensor], bool] = lambda loss, norm: True,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Train on this rank's rows of a batch.

        `number` counts steps from 0 and sets the learning rate. `documents` are ids that mask documents of a sequence
        from each other. `weights` are those of the micro-batches, as returned by `micro_batch_weights`; None weights
        all equally. The update is skipped where `is_fit(loss, norm)` is False. Returns the loss in nats per token and
        the gradient norm before clipping, both of the whole batch, on the model's device, or with fp16 on the host.
        Where fp16 overflows, the norm is 0 and the update is skipped as well.
        """
        size = self._micro_batch_size(inputs)
        inputs, targets, documents = self.parallel_model.own_columns(inputs, targets, documents)
        weights = [size / len(inputs)] * (len(inputs) // size) if weights is None else weights
        self._begin(number)
        documents_by_part = [None] * (len(inputs) // size) if documents is None else documents.split(size)
        batch = zip(inputs.split(size), targets.split(size), documents_by_part, weights, strict=True)
        gradients = self.parallel_model.gradients if self.graph is None else self.graph.gradients
        loss = gradients([MicroBatch(*part) for part in batch], self._passes(watch))
        return self._update(number, loss, watch, is_fit)

    def step_on_sequences(
        self,
        number: int,
        micro_batches: Sequence[PackedRows],
        loss_of: Callable[[int, TokenScores], Tensor],
        *,
        watch: Watch = lambda part: nullcontext(),
        is_fit: Callable[[Tensor, Tensor], bool] = lambda loss, norm: True,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Train on this rank's micro-batches, whose losses add up; see `ParallelModel.gradients_of_sequences`.

        All else is as in `step`.
        """
        self._begin(number)
        loss = self.parallel_model.gradients_of_sequences(micro_batches, loss_of, self._passes(watch))
        return self._update(number, loss, watch, is_fit)

    def _begin(self, number: int) -> None:
        self.expert_counts.clear()
        if self.recipe.model.dropout:
            # Dropout depends only on seed and step: a resumed run equals an uninterrupted one.
            torch.manual_seed(self.parallel_model.rank_seed(self.recipe.training.dropout_seed * 1_000_003 + number))

    def _passes(self, watch: Watch) -> Passes:
        parts = self.parallel_model.layout.token_parts
        return Passes(
            self.precision.autocast,
            watch,
            self._count_experts,
            None if self.loss_scale is None else self.loss_scale.of_rank(parts),
        )

    def _update(
        self,
        number: int,
        loss: Float[Tensor, ""],
        watch: Watch,
        is_fit: Callable[[Tensor, Tensor], bool],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Clip the gradients and update the weights. Returns the loss of the whole batch and the gradient's norm."""
        parts = self.parallel_model.layout.token_parts
        with watch("optimizer"):
            if self.loss_scale is not None:
                self.loss_scale.unscale(self.model.parameters(), ranks=parts)
            weights = self.parallel_model.sum_of_squares_weights
            clip = clip_gradients if self.optimizer.narrow_copies is None else self._clip_in_update
            norm = clip(
                list(self.model.parameters()),
                self.recipe.optimizer.clip_norm,
                weights=weights,
                sum_over_ranks=None if weights is None else self.parallel_model.ranks.all_reduce_sum,
            )
            loss = self.parallel_model.mean(loss)
            if self.loss_scale is not None:
                # Both are read below: a GPU is waited for once.
                loss, norm = together(loss, norm).float()
            # An overflow of fp16 means that the loss scale was too large.
            overflowed = self.loss_scale is not None and not self.loss_scale.accepts(norm)
            if overflowed:
                norm = torch.zeros_like(norm)
            if is_fit(loss, norm) and not overflowed:
                for group in self.optimizer.param_groups:
                    group["lr"] = self.learning_rate(number)
                if self.optimizer.rounding is not None:
                    self.optimizer.rounding.begin(number)
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def _clip_in_update(self, parameters: list[nn.Parameter], max_norm: float, **settings: Any) -> Float[Tensor, ""]:
        """`clip_gradients`, whose factor the update multiplies by: a kernel reads each gradient once then."""
        norm, self.optimizer.gradient_factor = norm_and_factor(parameters, max_norm, **settings)
        return norm

    def expert_tokens(self) -> tuple[list[list[int]], list[int]] | tuple[None, None]:
        """Tokens of all ranks that each expert had in the last step, and dropped ones, by layer; None without experts.
        A collective."""
        if not self.expert_counts.is_sent:
            self.send_expert_tokens()
        return self.expert_counts.read()

    def send_expert_tokens(self) -> None:
        """Start to copy to the host what `expert_tokens` returns; a collective."""
        self.expert_counts.send(self.parallel_model.of_all_tokens, torch.device(self.precision.device_type))

    def _count_experts(self, module: nn.Module, router: int) -> None:
        if self.recipe.model.n_experts:
            self.expert_counts.add([mixture.take_routing() for mixture in mixtures(module)], router)

    def warm_up(self, rows: int) -> None:
        """Compute the gradients of one micro-batch and drop them, so that the blocks are compiled.

        `rows` is the number of this rank's sequences in a step.
        """
        shape = (min(self.recipe.training.resolved_micro_batch_size, rows), self.recipe.model.context_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.precision.device_type)
        documents = torch.zeros_like(tokens) if self.recipe.data.separate_documents else None
        tokens, targets, documents = self.parallel_model.own_columns(tokens, tokens, documents)
        # Without communication between ranks.
        self.parallel_model.begin_micro_batch(last=False)
        with self.precision.autocast():
            loss = self.parallel_model.loss(tokens, targets, documents)
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def first_update(self) -> None:
        """Run one optimizer update on placeholder gradients, so fake-tensor counts see the optimizer state."""
        for parameter in _trained(self.model):
            parameter.grad = torch.empty_like(parameter)
        self._update(0, torch.zeros(()), lambda part: nullcontext(), lambda loss, norm: True)

    def resident(self) -> list[Tensor] | None:
        """The tensors that persist between steps; None where the meter can see them while a step runs."""
        # The meter does not see the operators in compiled code.
        return all_resident(self.model, self.optimizer) if self.compiled else None

    def micro_batch_weights(self, targets: Int[Tensor, "batch position"]) -> list[Tensor]:
        """The weight of each micro-batch, by its number of targets, on their device."""
        return self.parallel_model.micro_batch_weights(targets, self._micro_batch_size(targets))

    def _micro_batch_size(self, inputs: Tensor) -> int:
        return min(self.recipe.training.resolved_micro_batch_size, len(inputs))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        if self.average is None:
            yield
            return
        self.parallel_model.reshard()
        with self.average.applied():
            yield
            # The gathered parameters are still the average.
            self.parallel_model.reshard()

    def extra_state(self) -> dict[str, Tensor]:
        """Further tensors of a checkpoint, besides weights and optimizer state."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.to_tensor()}

    def restore(self, updates: int, extra_state: dict[str, Tensor], *, with_average: bool = True) -> None:
        """Continue after `updates` updates, with the result of `extra_state`; without `with_average` a new average is
        started."""
        stored = LossScale()
        stored.updates = updates
        if "loss_scale" in extra_state:
            stored.from_tensor(extra_state["loss_scale"])
        if self.loss_scale is not None:
            self.loss_scale.from_tensor(stored.to_tensor())
        for group in self.optimizer.param_groups:
            group["step"] = stored.updates
        if self.average is not None:
            self.average.step = stored.updates
            if not with_average:
                self.average.begin()

    def learning_rate(self, number: int) -> float:
        """Learning rate of step `number`, counted from 0."""
        return self.recipe.schedule(number, self.recipe.optimizer.options["learning_rate"])


Initialize = Callable[[ModelConfig, Parts], None]
"""Sets the initial weights of a model of that config, or of the parts that a rank holds."""


def build_train_state(
    resolved: ResolvedRecipe,
    ranks: Ranks = ALONE,
    *,
    compiled: bool = False,
    recorder: Recorder | None = None,
    initialize: Initialize | None = None,
    drawn: bool = True,
) -> TrainState:
    """Build a model, with weights drawn from `training.init_seed`, and its optimizer; with fsdp, this rank's shard of
    them.

    `compiled` is whether the blocks are compiled, at their first step. `recorder` records the micro-batches of steps
    that are replayed, see `step_graph.py`. `initialize` sets other weights than those drawn
    from the seed. Without `drawn` the weights may be any numbers, because a checkpoint is loaded into them.
    """
    resolved = replace(resolved, world_size=ranks.world_size)
    recipe, precision = resolved.recipe, resolved.precision
    draws: dict[str, Draw] = {}
    if starts_in_shards(resolved):
        model, draws = undrawn_model(resolved)
    else:
        model = build_model(resolved, initialize)
    if precision.name in NARROW:
        multiply_narrow(model.blocks, narrow_linear(precision.name, precision.narrow_form))
    use_kernels(model, recipe.training.kernels)
    model.loss_chunk_size = recipe.training.resolved_loss_chunk_size
    if compiled:
        compile_blocks(model)
    recompute_blocks(model, recipe.training.recompute, every=recipe.training.recompute_every)
    expert_counts = ExpertCounts(len(mixtures(model)), recipe.model.n_experts)
    parallel_model = parallelize(model, resolved, ranks)
    if draws:
        _fill_shards(parallel_model, precision.device_type, draws, initialize, drawn=drawn)
    chosen = recipe.optimizer
    # The range of fp16 is too small for sums of squares.
    products = torch.float32 if precision.products == "fp16" else precision.products_dtype
    optimizer = build_optimizer(chosen.name, model, products=products, fused=bool(chosen.fused), **chosen.options)
    if resolved.layout.shard_optimizer:
        assert parallel_model.same_parameters is not None
        from napkin.distributed.sharding import shard_optimizer

        shard_optimizer(optimizer, parallel_model.same_parameters)
    if recipe.training.kernels == "triton" and _has_whole_matrices(resolved):
        optimizer.narrow_copies = copies = NarrowCopies(multiplied_matrices(model), precision.products_dtype)
        read_narrow_copies(model, copies)
        optimizer.state["narrow copies"] = {"copies": copies.tensors}  # pyright: ignore[reportArgumentType]
    average = WeightAverage(_trained(model), chosen.average_decay) if chosen.average_decay else None
    if average is not None:
        optimizer.register_step_post_hook(lambda *_: average.update())
        # The meter looks for persistent tensors where torch's optimizers keep their state.
        optimizer.state["average"] = {"averages": average.averages}  # pyright: ignore[reportArgumentType]
    optimizer.state_on_host = recipe.training.offload_optimizer
    if precision.name == "bf16-pure":
        optimizer.rounding = StochasticRounding(parallel_model.rounding_seed(recipe.training.rounding_seed))
    loss_scale = LossScale() if precision.name == "fp16" else None
    return TrainState(
        model,
        optimizer,
        resolved,
        parallel_model,
        average=average,
        expert_counts=expert_counts,
        loss_scale=loss_scale,
        compiled=compiled,
        graph=None if recorder is None else MicroBatchGraph(parallel_model, recorder),
    )


def build_model(resolved: ResolvedRecipe, initialize: Initialize | None = None) -> Transformer:
    """The model of a recipe with its additional trained parts, on the CPU, with parameters in their storage formats;
    `initialize` sets other weights than those drawn from `training.init_seed`."""
    # Drawn on the CPU, so that a seed gives the same weights on every device.
    model = Transformer(resolved.recipe.model, seed=resolved.recipe.training.init_seed)
    if initialize is not None:
        initialize(model.config, whole_parts(model))
    return _with_tuned_parts(model, resolved)


def starts_in_shards(resolved: ResolvedRecipe) -> bool:
    """True if no rank holds the whole model at any time. Adapters are made of whole matrices."""
    return resolved.strategy == "fsdp" and adapter_of(resolved.recipe) is None


def undrawn_model(resolved: ResolvedRecipe) -> tuple[Transformer, dict[str, Draw]]:
    """The model of `build_model` whose matrices are on the meta device, and the draws that fill them, by name; under
    FakeTensorMode `build_model`'s, and nothing."""
    with deferred_draws() as draws:
        model = Transformer(resolved.recipe.model, seed=resolved.recipe.training.init_seed)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return _with_tuned_parts(model, resolved), {names[draw.parameter]: draw for draw in draws}


def _fill_shards(
    parallel_model: ParallelModel,
    device_type: str,
    draws: dict[str, Draw],
    initialize: Initialize | None,
    *,
    drawn: bool,
) -> None:
    """Allocate what this rank has of the matrices of `undrawn_model`, and draw or load their numbers."""
    model = parallel_model.model
    undrawn = {name for name, parameter in model.named_parameters() if parameter.is_meta} - draws.keys()
    allocate((*parallel_model.stages, model), device_type)
    parts = parallel_model.parts({name: parameter.detach() for name, parameter in model.named_parameters()})
    for name in undrawn:
        # Parts that tuning adds start at 0.
        zero_parts(parts[name])
    if initialize is not None:
        initialize(model.config, {name: own for name, own in parts.items() if not name.startswith("scalar_head")})
    elif drawn:
        draw_parts(draws, parts)


def _with_tuned_parts(model: Transformer, resolved: ResolvedRecipe) -> Transformer:
    recipe, precision = resolved.recipe, resolved.precision
    add_tuned_parts(model, recipe)
    if precision.weights_dtype != torch.float32:
        _cast(model, precision.weights_dtype)
    adapter = adapter_of(recipe)
    held = None if adapter is None else held_dtype(adapter.kind, adapter.frozen, precision.name)
    if held is not None:
        hold_frozen_narrow(model, held)
    return model


def _trained(model: Transformer) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _has_whole_matrices(resolved: ResolvedRecipe) -> bool:
    """True if a rank's update writes all of each matrix that it multiplies by, in fp32 under autocast."""
    layout = resolved.layout
    divided = layout.tensor * layout.pipeline * layout.expert > 1 or layout.shard_optimizer
    return resolved.precision.name in ("bf16", "fp16") and resolved.strategy != "fsdp" and not divided


def _cast(model: Transformer, dtype: torch.dtype) -> None:
    """Cast only parameters: tables of angles stay in fp32. nn.Module.to does not work on fake tensors."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            cast = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
            setattr(module, name, cast)


# Parts that tuning adds to a model: a head of one number for values and rewards, adapters


def add_tuned_parts(model: Transformer, recipe: Recipe) -> None:
    """Add the parts that a recipe trains in addition to the model, or in place of it; a recipe of pre-training has
    none.

    Raises NapkinError for adapters of matrices that the model does not have.
    """
    adapter = adapter_of(recipe)
    if adapter is not None:
        add_adapters(
            model,
            with_magnitude=adapter.kind == "dora",
            rank=adapter.rank,
            alpha=adapter.alpha,
            modules=adapter.modules,
            seed=adapter.seed,
        )
    if _has_scalar_head(recipe):
        add_scalar_head(model)


def has_tuned_parts(recipe: Recipe) -> bool:
    """True if `add_tuned_parts` adds something."""
    return adapter_of(recipe) is not None or _has_scalar_head(recipe)


def _has_scalar_head(recipe: Recipe) -> bool:
    """A reward model's head of one number, or ppo's of values."""
    is_ppo = isinstance(recipe, ReinforcementRecipe) and recipe.rl.algorithm == "ppo"
    return isinstance(recipe, RewardModelRecipe) or is_ppo


def remove_tuned_parts(model: Transformer) -> None:
    """Turn a tuned model into a plain one: adapters are merged, a scalar head is left out."""
    merge_adapters(model)
    model.scalar_head = None


def adapter_of(recipe: Recipe) -> AdapterConfig | None:
    return recipe.adapter if isinstance(recipe, TuningRecipe) and recipe.adapter.kind != "none" else None


def held_dtype(kind: str, frozen: str, precision: str) -> torch.dtype | None:
    """The format in which frozen matrices are stored, by a recipe's adapter.kind, adapter.frozen and precision; None
    does not change them."""
    if kind == "none" or frozen != "auto":
        return None
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
