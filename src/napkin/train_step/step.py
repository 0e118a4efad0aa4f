"""One training step. The loop runs it, the accountant counts it: what is counted is what runs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.count import count
from napkin.accounting.ledger import Ledger
from napkin.distributed.parallelize import Spread, all_resident, spread
from napkin.distributed.ranks import ALONE, Ranks
from napkin.hardware.cuda_target import Target
from napkin.model.fp8 import multiply_in_fp8
from napkin.model.transformer import Transformer
from napkin.optim.averaging import WeightAverage
from napkin.optim.base import Optimizer
from napkin.optim.clipping import clip_gradients
from napkin.optim.loss_scale import LossScale
from napkin.optim.registry import build_optimizer
from napkin.optim.rounding import StochasticRounding
from napkin.recipe.precision import Precision
from napkin.recipe.recipe import Recipe
from napkin.train_step.activation_checkpointing import recompute_blocks
from napkin.train_step.compile import compile_blocks
from napkin.train_step.expert_counts import ExpertTally

Watch = Callable[[str], AbstractContextManager]

TRACED_MICRO_BATCHES = 3
"""The others are like the second."""


@dataclass(frozen=True)
class TrainState:
    """What a step changes: the model and its optimizer; and how it computes."""

    model: Transformer
    optimizer: Optimizer
    recipe: Recipe
    precision: Precision
    spread: Spread
    """The model's work, as this rank does its part of it."""
    average: WeightAverage | None = None
    """Of the weights, updated by each of the optimizer's steps, where the recipe asks for one."""
    tally: ExpertTally = field(default_factory=ExpertTally)
    """What the routers of the last step did, where the model has experts."""
    loss_scale: LossScale | None = None
    """With fp16."""
    compiled: bool = False
    """Whether the code of blocks is."""

    def step(
        self,
        number: int,
        inputs: Int[Tensor, "batch position"],
        targets: Int[Tensor, "batch position"],
        documents: Int[Tensor, "batch position"] | None = None,
        *,
        shares: list[float] | None = None,
        watch: Watch = lambda part: nullcontext(),
        is_fit: Callable[[Tensor, Tensor], bool] = lambda loss, norm: True,
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Train on this rank's rows of a batch; `number` counts steps from 0 and sets the learning rate; `documents`
        keep apart what is packed into a sequence.

        `shares` is what each micro-batch weighs, as `TrainState.shares` has it; None is all alike. Returns the loss in
        nats per token and the gradient's norm before clipping, both of the whole batch, on the model's device; a
        norm of 0 where fp16 overflowed and the update was left out. Where both are not fit for an update, by
        `is_fit`, none is made.
        """
        size, ranks = self._micro_batch_size(inputs), self.spread.ranks.size
        shares = [size / len(inputs)] * (len(inputs) // size) if shares is None else shares
        loss = torch.zeros((), device=inputs.device)
        self.tally.clear()
        if self.recipe.model.dropout:
            # What a step drops follows from seed and step alone: a resumed run drops what an uninterrupted one does.
            torch.manual_seed(self.spread.seed(self.recipe.training.dropout_seed * 1_000_003 + number))
        apart = [None] * (len(inputs) // size) if documents is None else documents.split(size)
        parts = zip(inputs.split(size), targets.split(size), apart, shares, strict=True)
        for done, (part, wanted, documents_of_part, share) in enumerate(parts, start=1):
            self.spread.begin(last=done == len(shares))
            with watch("forward"), self.precision.autocast():
                micro_loss = self.spread.loss(part, wanted, documents_of_part) * share
                if self.recipe.model.n_experts:
                    self.tally.add(self.model.routings())
            with watch("backward"):
                (micro_loss if self.loss_scale is None else micro_loss * self.loss_scale.of_rank(ranks)).backward()
            loss += micro_loss.detach()
        with watch("optimizer"):
            if self.loss_scale is not None:
                self.loss_scale.unscale(self.model.parameters(), ranks=ranks)
            clip_norm, sum_squares = self.recipe.optimizer.clip_norm, self.spread.sum_squares
            norm = clip_gradients(self.model.parameters(), clip_norm, sum_squares=sum_squares)
            loss = self.spread.mean(loss)
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

    def rehearse(self, rows: int) -> None:
        """Compute the gradients of a micro-batch of a step that has so many rows, and drop them."""
        shape = (min(self.recipe.training.resolved_micro_batch_size, rows), self.recipe.model.context_length)
        tokens = torch.zeros(shape, dtype=torch.int64, device=self.precision.device_type)
        documents = torch.zeros_like(tokens) if self.recipe.data.separate_documents else None
        # Other ranks have nothing to do with it.
        self.spread.begin(last=False)
        with self.precision.autocast():
            loss = self.spread.loss(tokens, torch.zeros_like(tokens), documents)
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def resident(self) -> list[Tensor] | None:
        """What stays from step to step; None where that can be seen while a step runs."""
        if not self.compiled:
            return self.spread.resident(self.optimizer)
        # What compiled code makes is not seen in the making.
        return all_resident(self.model, self.optimizer)

    def shares(self, targets: Int[Tensor, "batch position"]) -> list[float]:
        """What each micro-batch of a batch weighs, by its targets that count; best asked of tensors on the host."""
        return self.spread.shares(targets, self._micro_batch_size(targets))

    def _micro_batch_size(self, inputs: Tensor) -> int:
        return min(self.recipe.training.resolved_micro_batch_size, len(inputs))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has its averaged weights while the block runs, where an average is kept."""
        if self.average is None:
            yield
            return
        self.spread.settle()
        with self.average.applied():
            yield
            # What was gathered holds the average.
            self.spread.settle()

    def extra_state(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides weights and optimizer state."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.to_tensor()}

    def go_on_from(self, updates: int, extra_state: dict[str, Tensor], *, with_average: bool = True) -> None:
        """Take over how many updates were done, and what `extra_state` gave; without one, begin an average anew."""
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


def build_train_state(
    recipe: Recipe, precision: Precision, ranks: Ranks = ALONE, *, compiled: bool = False
) -> TrainState:
    """A new model and its optimizer, weights drawn from `training.init_seed`; this rank's part of them.

    `compiled` is whether blocks are compiled, at their first step.
    """
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
    spread_model = spread(model, recipe, precision, ranks)
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
        optimizer.rounding = StochasticRounding(spread_model.rounding_seed(recipe.training.rounding_seed))
    loss_scale = LossScale() if precision.name == "fp16" else None
    return TrainState(
        model, optimizer, recipe, precision, spread_model, average=average, loss_scale=loss_scale, compiled=compiled
    )


def _cast(model: Transformer, dtype: torch.dtype) -> None:
    """Parameters alone: tables of angles stay wide. A module's own cast does not work on fake tensors."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))


def count_step(recipe: Recipe, precision: Precision, *, target: Target | None = None) -> Ledger:
    """The ledger of the recipe's step, traced on fake tensors: nothing is allocated, nothing computed.

    `target` is the device that it is counted for, as `count` takes it; None is the one that `precision` names.
    """
    size = recipe.training.resolved_micro_batch_size
    traced = min(recipe.training.batch_size // size, TRACED_MICRO_BATCHES)
    with FakeTensorMode():
        # Fake tensors live on the CPU whatever the target: fake CUDA tensors abort a CPU build.
        train_state = build_train_state(recipe, precision.on("cpu"))
        tokens = torch.zeros(recipe.training.batch_size, recipe.model.context_length, dtype=torch.int64)
        others = [tokens.clone() for _ in range(2 if recipe.data.separate_documents else 1)]
        # Views, so that the whole batch takes its bytes.
        batch = tuple(tensor[: traced * size] for tensor in (tokens, *others))
        ledger = count(
            train_state.model,
            batch,
            lambda model, batch: train_state.step(0, *batch),
            target=precision.device_type if target is None else target,
        )
    more = recipe.training.batch_size // size - traced
    return ledger.with_more_micro_batches(more) if more else ledger
