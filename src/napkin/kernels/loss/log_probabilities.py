"""Log-probabilities of given tokens, and entropies, from hidden states: the logits never all exist at once.

The gradient of log p(target) with respect to a token's logits is onehot(target) - softmax(logits), times a factor of
its row. So one loop makes all forms: it computes a chunk of logits, turns it into that difference in place, multiplies
it into the gradients of hidden states and weight, whose rows take the factors, and drops it.

Where the factors are known before the forward pass, as in supervised tuning, that pass does all of it, as in
`linear_cross_entropy`. Else, as in policy gradients and DPO, the backward pass computes each chunk of logits again: a
third product more, and the memory of one chunk instead of all logits.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.loss.cross_entropy import add_product_, bound_, chunk_size_of, loss_rows_
from napkin.kernels.operators import dtype_of_product, early_gradient, is_computed, scaled


def log_probabilities(
    logits: Float[Tensor, "*batch vocab_size"], targets: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch"]:
    """log softmax(logits)[target] of each row, in nats, in fp32 or wider: the plain form, for a model that gives
    logits.

    >>> log_probabilities(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]), torch.tensor([1, 0]))
    tensor([-0.6931,  0.0000])
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.log_softmax(dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def entropies(logits: Float[Tensor, "*batch vocab_size"]) -> Float[Tensor, "*batch"]:
    """The entropy of softmax(logits) of each row, in nats, in fp32 or wider: the plain form.

    >>> entropies(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]))
    tensor([0.6931, 0.0000])
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_all = wide.log_softmax(dim=-1)
    # A token of probability 0 adds nothing, and its gradient is 0.
    return -(of_all.exp() * of_all.masked_fill(of_all.isneginf(), 0.0)).sum(dim=-1)


class LinearScores(NamedTuple):
    """Log-probabilities of given tokens under a head, in nats, in fp32 or wider."""

    log_probabilities: Float[Tensor, " n"]
    entropies: Float[Tensor, " n"]
    weighted_sum: Float[Tensor, ""] | None
    """coefficients · log_probabilities, where there are coefficients."""


def linear_log_probabilities(
    hidden: Float[Tensor, "n d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, " n"],
    coefficients: Float[Tensor, " n"] | None = None,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    logit_softcap: float | None = None,
    compiled: bool = False,
) -> LinearScores:
    """log softmax(logits / temperature)[target] and the entropy of softmax(logits / temperature) of each row;
    logits = hidden · weightᵀ, bounded by a softcap if there is one.

    Both have gradients. With coefficients only their weighted sum has, which is computed in the forward pass and kept:
    a second backward pass raises a RuntimeError. At most chunk_size rows of logits are held at a time; None is what
    `loss_chunk_size` says for the weight's device. Under autocast the products are in autocast's dtype. `compiled`
    takes the compiled loop where there is one: on a CPU, in fp32 and bf16.
    """
    size = chunk_size or chunk_size_of(weight)
    chunks = HeadChunks(dtype_of_product(hidden, weight), temperature, size, logit_softcap, compiled)
    # Dtypes are chosen here, operator by operator.
    with torch.autocast(hidden.device.type, enabled=False):
        if coefficients is None or not torch.is_grad_enabled():
            log_probabilities, entropies = _Recomputed.apply(hidden, weight, targets, chunks)  # pyright: ignore[reportGeneralTypeIssues]
            weighted_sum = None if coefficients is None else _weighted_sum(coefficients, log_probabilities)
            return LinearScores(log_probabilities, entropies, weighted_sum)
        return LinearScores(*_Early.apply(hidden, weight, targets, coefficients, chunks))  # pyright: ignore[reportGeneralTypeIssues]


def _weighted_sum(coefficients: Tensor, log_probabilities: Tensor) -> Tensor:
    return coefficients.to(log_probabilities.dtype) @ log_probabilities


class _Recomputed(torch.autograd.Function):
    """Log-probabilities and entropies; the backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: "HeadChunks"
    ) -> tuple[Tensor, Tensor]:
        log_probabilities, entropies = chunks.values(hidden, weight, targets)
        ctx.save_for_backward(hidden, weight, targets, entropies)
        ctx.chunks = chunks
        # If a loss does not read the entropies, their gradient is None instead of zeros, and nothing is computed.
        ctx.set_materialize_grads(False)
        return log_probabilities, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, entropies = ctx.saved_tensors
        of_log_probabilities, of_entropies = grad_outputs
        slopes = _Slopes(of_log_probabilities, of_entropies, entropies)
        return (*ctx.chunks.gradients(hidden, weight, targets, slopes, ctx.needs_input_grad[:2]), None, None)


class _Early(torch.autograd.Function):
    """The weighted sum of log-probabilities; gradients are computed in its forward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor, chunks: "HeadChunks"
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = ctx.needs_input_grad[:2]
        log_probabilities, entropies, grad_hidden, grad_weight, largest = chunks.values_and_gradients(
            hidden, weight, targets, coefficients, wanted
        )
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, largest)
        ctx.mark_non_differentiable(log_probabilities, entropies)
        return log_probabilities, entropies, _weighted_sum(coefficients, log_probabilities)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *gradients, largest = ctx.saved_tensors
        return (*scaled(gradients, grad_outputs[2] * largest, ctx.dtypes), None, None, None)


class _Slopes(NamedTuple):
    """The gradients of a loss with respect to log-probabilities and entropies; None is one that it does not read."""

    of_log_probabilities: Tensor | None
    of_entropies: Tensor | None
    entropies: Tensor


@dataclass(frozen=True)
class HeadChunks:
    """Computes rows a chunk at a time.

    Logits are divided by the temperature by dividing hidden states, which are smaller; a softcap's bound with them.
    """

    dtype: torch.dtype
    """The dtype of products."""
    temperature: float
    size: int
    softcap: float | None
    compiled: bool

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def bound(self) -> float | None:
        return None if self.softcap is None else self.softcap / self.temperature

    def values(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_probabilities, entropies = self.empty_values(hidden)
        matrix = weight.to(self.dtype)
        for rows in self.rows(hidden):
            scores = self._scores(hidden[rows], matrix, targets[rows, None], with_gradient=False)
            log_probabilities[rows], entropies[rows] = scores[:2]
            # Else it would live until the next chunk is there.
            del scores
        return log_probabilities, entropies

    def gradients(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, slopes: _Slopes, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of hidden and weight, where wanted."""
        total = HeadGradients.start(hidden, weight, self, wanted)
        of_log_probabilities, of_entropies, entropies = slopes
        for rows in self.rows(hidden):
            if of_entropies is None:
                assert of_log_probabilities is not None
                gradient = self._scores(
                    hidden[rows], total.matrix, targets[rows, None], with_gradient=True, with_entropies=False
                )[2]
                total.add(rows, gradient, of_log_probabilities[rows])
            else:
                of_targets = torch.zeros_like(of_entropies) if of_log_probabilities is None else of_log_probabilities
                columns = _Slopes(*(each[rows, None] for each in (of_targets, of_entropies, entropies)))
                gradient = self._slopes_with_entropies(hidden[rows], total.matrix, targets[rows, None], columns)
                total.add(rows, gradient, None)
            del gradient
        return total.hidden, None if total.weight is None else total.weight.to(weight.dtype)

    def values_and_gradients(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, coefficients: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
        """Values, and the gradients of coefficients · log_probabilities where wanted, divided by the last result: the
        largest coefficient, so that fp16 gradients of a scaled loss do not underflow before the scale reaches them."""
        log_probabilities, entropies = self.empty_values(hidden)
        total = HeadGradients.start(hidden, weight, self, wanted)
        with early_gradient():
            # One more zero, since an empty tensor has no maximum.
            largest = torch.cat([coefficients.abs(), coefficients.new_full((1,), 1e-30)]).amax()
            factors = coefficients / largest
        for rows in self.rows(hidden):
            scores = self._scores(hidden[rows], total.matrix, targets[rows, None], with_gradient=True)
            log_probabilities[rows], entropies[rows], gradient = scores
            with early_gradient():
                total.add(rows, gradient, factors[rows])
            del scores, gradient
        return log_probabilities, entropies, total.hidden, total.weight, largest

    def empty_values(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden.new_empty(len(hidden), dtype=self.wide), hidden.new_empty(len(hidden), dtype=self.wide)

    def rows(self, hidden: Tensor) -> Iterator[slice]:
        return (slice(start, start + self.size) for start in range(0, len(hidden), self.size))

    def logits(self, hidden: Tensor, matrix: Tensor) -> Tensor:
        return (hidden if self.temperature == 1 else hidden / self.temperature).to(self.dtype) @ matrix.T

    def _scores(
        self, hidden: Tensor, matrix: Tensor, targets: Tensor, *, with_gradient: bool, with_entropies: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A chunk's log-probabilities, entropies and softmax - onehot(target), the last two meaningless unless wanted.

        The last is the gradient of -log p with respect to the logits, before a softcap if there is one.
        """
        logits = self.logits(hidden, matrix)
        if self.compiled and is_computed(logits):
            with early_gradient() if with_gradient else nullcontext():
                target_logits, logsumexps, entropies = loss_rows_(
                    logits, targets, self.bound or 0.0, 0.0, with_gradient, with_entropies
                )
            log_probabilities = (target_logits - logsumexps)[:, 0]
            return log_probabilities, entropies[:, 0] if with_entropies else log_probabilities, logits
        slopes = None if self.bound is None else bound_(logits, self.bound, with_slopes=with_gradient)
        logprobs = self.log_softmax(logits)
        log_probabilities = logprobs.gather(1, targets)[:, 0]
        entropies = log_probabilities
        if with_entropies:
            entropies = logprobs.exp().mul_(logprobs).sum(dim=1).neg_()
        if with_gradient:
            with early_gradient():
                probabilities = logprobs.exp_()
                probabilities.scatter_(1, targets, probabilities.gather(1, targets) - 1)
                if slopes is not None:
                    probabilities *= slopes
        return log_probabilities, entropies, logprobs

    def _slopes_with_entropies(self, hidden: Tensor, matrix: Tensor, targets: Tensor, columns: "_Slopes") -> Tensor:
        """The negative gradient of a loss that reads entropies too; d entropy / d logits = -p · (log p + entropy)."""
        of_targets, of_entropies, entropies = columns
        assert of_targets is not None
        assert of_entropies is not None
        logits = self.logits(hidden, matrix)
        slopes = None if self.bound is None else bound_(logits, self.bound, with_slopes=True)
        logprobs = self.log_softmax(logits)
        probabilities = logprobs.exp()
        gradient = logprobs.add_(entropies).mul_(of_entropies).add_(of_targets).mul_(probabilities)
        gradient.scatter_(1, targets, gradient.gather(1, targets) - of_targets)
        return gradient if slopes is None else gradient.mul_(slopes)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Log-softmax, in place for logits in fp32 or wider."""
        return torch.log_softmax(logits, 1, dtype=self.wide, out=logits if logits.dtype == self.wide else None)


@dataclass
class HeadGradients:
    """Sums of gradients over chunks."""

    inputs: Tensor
    matrix: Tensor
    hidden: Tensor | None
    weight: Tensor | None
    chunks: HeadChunks

    @staticmethod
    def start(hidden: Tensor, weight: Tensor, chunks: HeadChunks, wanted: tuple[bool, bool]) -> "HeadGradients":
        of_hidden = torch.empty_like(hidden) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=chunks.wide) if wanted[1] else None
        return HeadGradients(hidden, weight.to(chunks.dtype), of_hidden, of_weight, chunks)

    def add(self, rows: slice, gradient: Tensor, factors: Tensor | None) -> None:
        """Add the products of a chunk's negative gradient with respect to its logits, each row times its factor."""
        dtype, temperature = self.chunks.dtype, self.chunks.temperature
        scale = -1 / temperature if factors is None else factors[:, None] / -temperature
        gradient = gradient.to(dtype)
        if self.hidden is not None:
            self.hidden[rows] = (gradient @ self.matrix).mul_(scale)
        if self.weight is None:
            return
        inputs = (self.inputs[rows] * scale).to(dtype)
        add_product_(self.weight, gradient, inputs, in_loops=self.chunks.compiled and is_computed(gradient))
