"""What is computed for each micro-batch of a step, whichever way the ranks divide the work."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

Tokens = Int[Tensor, "batch position"]


@dataclass(frozen=True)
class MicroBatch:
    """Some of a rank's rows of a batch."""

    inputs: Tokens
    targets: Tokens
    documents: Tokens | None
    weight: float
    """Of its mean loss in the loss of the step, as `ParallelModel.micro_batch_weights` has it."""


@dataclass(frozen=True)
class PackedRows:
    """Sequences of different lengths in rows of one length, and which of their tokens count."""

    inputs: Tokens
    documents: Tokens | None
    """The number of each token's sequence within its row; None where every row has one sequence."""
    places: Int[Tensor, " token"]
    """Of each token that counts, the index of the token before it among the inputs, row by row."""
    targets: Int[Tensor, " token"]
    """The tokens that count."""
    temperature: float = 1.0
    """By which logits are divided: that of the sampler whose tokens these are."""
    coefficients: Float[Tensor, " token"] | None = None
    """The loss's gradient with respect to each log-probability, where it is known before the forward pass."""


@dataclass(frozen=True)
class Passes:
    """What surrounds the forward and backward passes of a micro-batch."""

    autocast: Callable[[], AbstractContextManager] = nullcontext
    """The number formats of the forward pass."""
    watch: Callable[[str], AbstractContextManager] = lambda part: nullcontext()
    """Times the parts of a step: "forward" and "backward"."""
    after_forward: Callable[[nn.Module, int], None] = lambda module, router: None
    """Called after each forward pass with the module that has run, the model or a stage of it, and the number of its
    first router among those of the model."""
    loss_factor: float | None = None
    """By which a loss is multiplied before its backward pass: fp16's scale."""

    def scaled(self, loss: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """A loss as its backward pass begins with it."""
        return loss if self.loss_factor is None else loss * self.loss_factor
