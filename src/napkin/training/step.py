"""One training step. The loop runs it, the accountant counts it: what is counted is what runs."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from napkin.accounting.count import count
from napkin.accounting.cuda_target import Target
from napkin.accounting.ledger import Ledger
from napkin.model.transformer import Transformer
from napkin.optim.base import Optimizer
from napkin.optim.clipping import clip_gradients
from napkin.optim.names import build_optimizer
from napkin.training.precision import Precision
from napkin.training.ranks import ALONE, Ranks
from napkin.training.recipe import Recipe
from napkin.training.spreading import Spread, spread

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
    spread: Spread
    """The model's work, as this rank does its part of it."""

    def step(
        self,
        number: int,
        inputs: Int[Tensor, "batch position"],
        targets: Int[Tensor, "batch position"],
        *,
        shares: list[float] | None = None,
        watch: Watch = lambda part: nullcontext(),
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Train on this rank's rows of a batch; `number` counts steps from 0 and sets the learning rate.

        `shares` is what each micro-batch weighs, as `Learner.shares` has it; None is all alike.
        Returns the loss in nats a token and the gradient's norm before clipping, both of the whole batch, on the
        model's device.
        """
        size = self._micro_batch_size(inputs)
        shares = [size / len(inputs)] * (len(inputs) // size) if shares is None else shares
        loss = torch.zeros((), device=inputs.device)
        if self.recipe.model.dropout:
            # What a step drops follows from seed and step alone: a resumed run drops what an uninterrupted one does.
            torch.manual_seed(self.spread.seed(self.recipe.training.dropout_seed * 1_000_003 + number))
        parts = zip(inputs.split(size), targets.split(size), shares, strict=True)
        for done, (part, wanted, share) in enumerate(parts, start=1):
            self.spread.begin(last=done == len(shares))
            with watch("forward"), self.precision.autocast():
                micro_loss = self.spread.loss(part, wanted) * share
            with watch("backward"):
                micro_loss.backward()
            loss += micro_loss.detach()
        with watch("optimizer"):
            clip_norm, sum_squares = self.recipe.optimizer.clip_norm, self.spread.sum_squares
            norm = clip_gradients(self.model.parameters(), clip_norm, sum_squares=sum_squares)
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(number)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return self.spread.mean(loss), norm

    def shares(self, targets: Int[Tensor, "batch position"]) -> list[float]:
        """What each micro-batch of a batch weighs, by its targets that count; best asked of tensors on the host."""
        return self.spread.shares(targets, self._micro_batch_size(targets))

    def _micro_batch_size(self, inputs: Tensor) -> int:
        return min(self.recipe.training.resolved_micro_batch_size, len(inputs))

    def learning_rate(self, number: int) -> float:
        """Learning rate of step `number`, counted from 0."""
        return self.recipe.schedule(number, self.recipe.optimizer.options["learning_rate"])


def build_learner(recipe: Recipe, precision: Precision, ranks: Ranks = ALONE) -> Learner:
    """A new model and its optimizer, weights drawn from `training.init_seed`; this rank's part of them."""
    # Drawn on the CPU whatever the device, so that a seed means the same weights everywhere.
    model = Transformer(recipe.model, seed=recipe.training.init_seed)
    spread_model = spread(model, recipe, precision, ranks)
    chosen = recipe.optimizer
    products = torch.bfloat16 if precision.products == "bf16" else torch.float32
    optimizer = build_optimizer(chosen.name, model, products=products, fused=chosen.fused, **chosen.options)
    return Learner(model, optimizer, recipe, precision, spread_model)


def count_step(recipe: Recipe, precision: Precision, *, target: Target | None = None) -> Ledger:
    """The ledger of the recipe's step, traced on fake tensors: nothing is allocated, nothing computed.

    `target` is the device that it is counted for, as `count` takes it; None is the one that `precision` names.
    """
    size = recipe.training.resolved_micro_batch_size
    traced = min(recipe.training.batch_size // size, TRACED_MICRO_BATCHES)
    with FakeTensorMode():
        # Fake tensors live on the CPU whatever the target: fake CUDA tensors abort a CPU build.
        learner = build_learner(recipe, Precision(precision.products, "cpu"))
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
