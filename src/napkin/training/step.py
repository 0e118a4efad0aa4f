"""One training step. The loop runs it, the accountant counts it: what is counted is what runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.count import count
from napkin.accounting.cuda_target import Target
from napkin.accounting.ledger import Ledger
from napkin.model.fp8 import multiply_in_fp8
from napkin.model.transformer import Transformer
from napkin.optim.base import Optimizer
from napkin.optim.clipping import clip_gradients
from napkin.optim.loss_scale import LossScale
from napkin.optim.names import build_optimizer
from napkin.optim.rounding import StochasticRounding
from napkin.training.precision import Precision
from napkin.training.recipe import Recipe
from napkin.training.recomputation import recompute_blocks

Watch = Callable[[str], AbstractContextManager]

TRACED_MICRO_BATCHES = 3
"""The others are like the second."""


@dataclass(frozen=True)
class Learner:
    """What a step changes: the model and its optimizer; and how it computes."""

    model: Transformer
    optimizer: Optimizer
    recipe: Recipe
    precision: Precision
    loss_scale: LossScale | None = None
    """With fp16."""

    def step(
        self,
        number: int,
        inputs: Int[Tensor, "batch position"],
        targets: Int[Tensor, "batch position"],
        *,
        watch: Watch = lambda part: nullcontext(),
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Train on one batch; `number` counts steps from 0 and sets the learning rate.

        Returns the loss in nats a token and the gradient's norm before clipping, on the model's device; a norm of 0
        where fp16 overflowed and the update was left out.
        """
        size = self.recipe.training.resolved_micro_batch_size
        share = size / len(inputs)
        loss = torch.zeros((), device=inputs.device)
        if self.recipe.model.dropout:
            # What a step drops follows from seed and step alone: a resumed run drops what an uninterrupted one does.
            torch.manual_seed((self.recipe.training.dropout_seed * 1_000_003 + number) % 2**63)
        for part, wanted in zip(inputs.split(size), targets.split(size), strict=True):
            with watch("forward"), self.precision.autocast():
                micro_loss = self.model.loss(part, wanted) * share
            with watch("backward"):
                (micro_loss if self.loss_scale is None else micro_loss * self.loss_scale.scale).backward()
            loss += micro_loss.detach()
        with watch("optimizer"):
            if self.loss_scale is not None:
                self.loss_scale.unscale(self.model.parameters())
            norm = clip_gradients(self.model.parameters(), self.recipe.optimizer.clip_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(number)
            if self.optimizer.rounding is not None:
                self.optimizer.rounding.begin(number)
            if self.loss_scale is None or self.loss_scale.accepts(norm):
                self.optimizer.step()
            else:
                norm = torch.zeros_like(norm)
            self.optimizer.zero_grad(set_to_none=True)
        return loss, norm

    def extra_state(self) -> dict[str, Tensor]:
        """What a checkpoint holds besides weights and optimizer state."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.to_tensor()}

    def go_on_from(self, step: int, extra_state: dict[str, Tensor]) -> None:
        """Take over how many updates were done, and what `extra_state` gave."""
        stored = LossScale()
        stored.updates = step
        if "loss_scale" in extra_state:
            stored.from_tensor(extra_state["loss_scale"])
        if self.loss_scale is not None:
            self.loss_scale.from_tensor(stored.to_tensor())
        for group in self.optimizer.param_groups:
            group["step"] = stored.updates

    def learning_rate(self, number: int) -> float:
        """Learning rate of step `number`, counted from 0."""
        return self.recipe.schedule(number, self.recipe.optimizer.options["learning_rate"])


def build_learner(recipe: Recipe, precision: Precision) -> Learner:
    """A new model and its optimizer, weights drawn from `training.init_seed`."""
    # Drawn on the CPU whatever the device, so that a seed means the same weights everywhere.
    model = Transformer(recipe.model, seed=recipe.training.init_seed)
    if precision.weights_dtype != torch.float32:
        _cast(model, precision.weights_dtype)
    if precision.device_type != "cpu":
        model = model.to(precision.device_type)
    if precision.name == "fp8":
        multiply_in_fp8(model.blocks, native=precision.native_fp8)
    model.loss_chunk_size = recipe.training.loss_chunk_size
    recompute_blocks(model, recipe.training.recompute, every=recipe.training.recompute_every)
    chosen = recipe.optimizer
    # fp16 has too little range for sums of squares.
    products = torch.float32 if precision.products == "fp16" else precision.products_dtype
    optimizer = build_optimizer(chosen.name, model, products=products, fused=bool(chosen.fused), **chosen.options)
    optimizer.state_on_host = recipe.training.offload_optimizer
    if precision.name == "bf16-pure":
        optimizer.rounding = StochasticRounding(recipe.training.rounding_seed)
    return Learner(model, optimizer, recipe, precision, LossScale() if precision.name == "fp16" else None)


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
        learner = build_learner(recipe, precision.on("cpu"))
        tokens = torch.zeros(recipe.training.batch_size, recipe.model.context_length, dtype=torch.int64)
        # Views, so that the whole batch takes its bytes.
        batch = (tokens[: traced * size], tokens.clone()[: traced * size])
        ledger = count(
            learner.model,
            batch,
            lambda model, batch: learner.step(0, *batch),
            target=precision.device_type if target is None else target,
        )
    more = recipe.training.batch_size // size - traced
    return ledger.with_more_micro_batches(more) if more else ledger
