"""One training step. The loop runs it and the accountant counts it: what is counted is what runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from napkin.distributed.parallel_model import ParallelModel, all_resident, parallelize
from napkin.distributed.ranks import ALONE, Ranks
from napkin.model.fp8 import multiply_in_fp8
from napkin.model.transformer import Transformer
from napkin.optim.averaging import WeightAverage
from napkin.optim.base import Optimizer
from napkin.optim.clipping import clip_gradients
from napkin.optim.loss_scale import LossScale
from napkin.optim.names import build_optimizer
from napkin.optim.rounding import StochasticRounding
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.recipe.resolved import ResolvedRecipe
from napkin.train_step.activation_checkpointing import recompute_blocks
from napkin.train_step.compile import compile_blocks
from napkin.train_step.expert_counts import ExpertCounts

Watch = Callable[[str], AbstractContextManager]


@dataclass(frozen=True)
class TrainState:
    """What a step changes, the model and its optimizer, and how it computes."""

    model: Transformer
    optimizer: Optimizer
    resolved: ResolvedRecipe
    parallel_model: ParallelModel
    """The model, as this rank does its part of the work."""
    average: WeightAverage | None = None
    """Of the weights, updated by each of the optimizer's steps, where the recipe asks for one."""
    expert_counts: ExpertCounts = field(default_factory=ExpertCounts)
    """How the routers of the last step distributed its tokens, where the model has experts."""
    loss_scale: LossScale | None = None
    """With fp16."""
    compiled: bool = False
    """Whether the blocks are compiled."""

    @property
    def recipe(self) -> Recipe:
        """Of the whole run: the batch is that of all ranks together."""
        return self.resolved.recipe

    @property
    def precision(self) -> Precision:
        """The number formats that the step computes in."""
        return self.resolved.precision

    def step(
        self,
        number: int,
        inputs: Int[Tensor, "batch position"],
        targets: Int[Tensor, "batch position"],
        documents: Int[Tensor, "batch position"] | None = None,
        *,
        weights: list[float] | None = None,
        watch: Watch = lambda part: nullcontext(),
        is_fit: Callable[[Tensor, Tensor], bool] = lambda loss, norm: True,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Train on this rank's rows of a batch.

        `number` counts steps from 0 and sets the learning rate. `documents` keep apart what is packed into a sequence.
        `weights` are those of the micro-batches, as `micro_batch_weights` makes them; None weighs all alike. The update
        is left out where `is_fit(loss, norm)` is False. Returns the loss in nats per token and the gradient's norm
        before clipping, both of the whole batch, on the model's device; the norm is 0 where fp16 overflowed, which
        leaves the update out as well.
        """
        size, ranks = self._micro_batch_size(inputs), self.parallel_model.ranks.world_size
        weights = [size / len(inputs)] * (len(inputs) // size) if weights is None else weights
        loss = torch.zeros((), device=inputs.device)
        self.expert_counts.clear()
        if self.recipe.model.dropout:
            # What a step drops follows from seed and step alone: a resumed run drops what an uninterrupted one does.
            torch.manual_seed(self.parallel_model.rank_seed(self.recipe.training.dropout_seed * 1_000_003 + number))
        apart = [None] * (len(inputs) // size) if documents is None else documents.split(size)
        parts = zip(inputs.split(size), targets.split(size), apart, weights, strict=True)
        for done, (part, wanted, documents_of_part, weight) in enumerate(parts, start=1):
            self.parallel_model.begin_micro_batch(last=done == len(weights))
            with watch("forward"), self.precision.autocast():
                micro_loss = self.parallel_model.loss(part, wanted, documents_of_part) * weight
                if self.recipe.model.n_experts:
                    self.expert_counts.add(self.model.routings())
            with watch("backward"):
                (micro_loss if self.loss_scale is None else micro_loss * self.loss_scale.of_rank(ranks)).backward()
            loss += micro_loss.detach()
        with watch("optimizer"):
            if self.loss_scale is not None:
                self.loss_scale.unscale(self.model.parameters(), ranks=ranks)
            clip_norm, sum_squares = self.recipe.optimizer.clip_norm, self.parallel_model.sum_squares
            norm = clip_gradients(self.model.parameters(), clip_norm, sum_squares=sum_squares)
            loss = self.parallel_model.mean(loss)
            # Where fp16 overflows it is only the scale that was too large.
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

    def warm_up(self, rows: int) -> None:
        """Compute the gradients of a micro-batch of a step of so many rows, and drop them: compiles the blocks."""
        shape = (min(self.recipe.training.resolved_micro_batch_size, rows), self.recipe.model.context_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.precision.device_type)
        documents = torch.zeros_like(tokens) if self.recipe.data.separate_documents else None
        # Nothing is exchanged with other ranks.
        self.parallel_model.begin_micro_batch(last=False)
        with self.precision.autocast():
            loss = self.parallel_model.loss(tokens, torch.zeros_like(tokens), documents)
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def resident(self) -> list[Tensor] | None:
        """What stays from step to step; None where that can be seen while a step runs."""
        if not self.compiled:
            return self.parallel_model.resident(self.optimizer)
        # What compiled code allocates is not seen operator by operator.
        return all_resident(self.model, self.optimizer)

    def micro_batch_weights(self, targets: Int[Tensor, "batch position"]) -> list[float]:
        """The weight of each micro-batch of a batch, by its number of targets; best asked of tensors on the host."""
        return self.parallel_model.micro_batch_weights(targets, self._micro_batch_size(targets))

    def _micro_batch_size(self, inputs: Tensor) -> int:
        return min(self.recipe.training.resolved_micro_batch_size, len(inputs))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Give the model its averaged weights while the block runs, where an average is kept."""
        if self.average is None:
            yield
            return
        self.parallel_model.reshard()
        with self.average.applied():
            yield
            # What was gathered is the average.
            self.parallel_model.reshard()

    def extra_state(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides weights and optimizer state."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.to_tensor()}

    def restore(self, updates: int, extra_state: dict[str, Tensor], *, with_average: bool = True) -> None:
        """Continue after so many updates, with what `extra_state` gave; `with_average` False begins an average anew."""
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


def build_train_state(resolved: ResolvedRecipe, ranks: Ranks = ALONE, *, compiled: bool = False) -> TrainState:
    """A new model and its optimizer, weights drawn from `training.init_seed`; this rank's part of them.

    `compiled` is whether the blocks are compiled, at their first step.
    """
    resolved = replace(resolved, world_size=ranks.world_size)
    recipe, precision = resolved.recipe, resolved.precision
    # Drawn on the CPU whatever the device, so that a seed means the same weights everywhere.
    model = Transformer(recipe.model, seed=recipe.training.init_seed)
    if precision.weights_dtype != torch.float32:
        _cast(model, precision.weights_dtype)
    if precision.name == "fp8":
        multiply_in_fp8(model.blocks, native=precision.native_fp8)
    model.loss_chunk_size = recipe.training.loss_chunk_size
    if compiled:
        compile_blocks(model)
    recompute_blocks(model, recipe.training.recompute, every=recipe.training.recompute_every)
    parallel_model = parallelize(model, resolved, ranks)
    chosen = recipe.optimizer
    # fp16 has too little range for sums of squares.
    products = torch.float32 if precision.products == "fp16" else precision.products_dtype
    optimizer = build_optimizer(chosen.name, model, products=products, fused=bool(chosen.fused), **chosen.options)
    average = WeightAverage(model.parameters(), chosen.average_decay) if chosen.average_decay else None
    if average is not None:
        optimizer.register_step_post_hook(lambda *_: average.update())
        # The accountant looks for what an update keeps where torch's optimizers keep it.
        optimizer.state["average"] = {"averages": average.averages}  # pyright: ignore[reportArgumentType]
    optimizer.state_on_host = recipe.training.offload_optimizer
    if precision.name == "bf16-pure":
        optimizer.rounding = StochasticRounding(parallel_model.rounding_seed(recipe.training.rounding_seed))
    loss_scale = LossScale() if precision.name == "fp16" else None
    return TrainState(
        model, optimizer, resolved, parallel_model, average=average, loss_scale=loss_scale, compiled=compiled
    )


def _cast(model: Transformer, dtype: torch.dtype) -> None:
    """Parameters alone: tables of angles stay wide. A module's own cast does not work on fake tensors."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))
