"""Cross-entropy, the mean of -log p(target): from logits, or fused with the output head, never holding all logits.

For 4096 tokens and a vocabulary of 4096 the logits and their gradient are 134 MB, the largest tensors of a small
model's step. The gradient of the loss with respect to a token's logits is softmax(logits) - onehot(target): it needs
nothing from the backward pass but one factor. So the fused operator computes a chunk of logits, turns it into its
gradient, multiplies that into the gradients of hidden states and weight, and drops it.

What happens between the products has two forms: torch's operators, and a compiled loop for a CPU in which a row of
logits stays in cache while it becomes its gradient, in place: one pass over memory instead of eight.
"""

from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.autocast import dtype_of_product
from napkin.kernels.compiled_loss import add_narrow_, bound_, loss_rows_
from napkin.kernels.cpu_operator import is_computed
from napkin.kernels.early_gradient import early_gradient

# Measured on one CPU core with 4096 tokens of width 256 and a vocabulary of 4096, in fp32 and bf16: 298 and 163 ms.
# 1024 rows take 304 and 176 ms; full logits in autograd 426 and 315 ms, and in fp32 201 MB at their peak instead of 26.
CHUNK_SIZE = 512

_SMALLEST_IN_LOOPS = 2**18
"""Logits from which log probabilities are worth loading the compiled loop."""


def cross_entropy(
    logits: Float[Tensor, "*batch vocab_size"], targets: Int[Tensor, "*batch"], ignore_index: int = -1
) -> Float[Tensor, ""]:
    """The mean of logsumexp(logits) - logits[target] over the targets that are not ignore_index, in fp32.

    0 if every target is ignored.
    """
    logits = logits.float()
    counts = targets != ignore_index
    target_logits = logits.gather(-1, targets.where(counts, 0).unsqueeze(-1)).squeeze(-1)
    losses = (logits.logsumexp(dim=-1) - target_logits).where(counts, 0)
    return losses.sum() / counts.sum().clamp(min=1)


def target_log_probabilities(logits: Float[Tensor, "n vocab_size"], targets: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """log softmax(logits)[target] of each row, in fp32 or wider; without a gradient.

    Many logits in bf16 on a CPU are read once, by the loss's compiled loop.
    """
    if logits.dtype == torch.bfloat16 and logits.numel() >= _SMALLEST_IN_LOOPS and is_computed(logits):
        target_logits, logsumexp, _ = loss_rows_(logits.detach(), targets.unsqueeze(1), 0.0, 0.0, False, False)
    else:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        target_logits, logsumexp = logits.gather(1, targets.unsqueeze(1)), logits.logsumexp(dim=1, keepdim=True)
    return (target_logits - logsumexp).squeeze(1)


def linear_cross_entropy(
    hidden: Float[Tensor, "n d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, " n"],
    *,
    chunk_size: int = CHUNK_SIZE,
    ignore_index: int = -1,
    z_weight: float = 0.0,
    logit_softcap: float | None = None,
    vocabulary: "Vocabulary | None" = None,
    compiled: bool = False,
) -> Float[Tensor, ""]:
    """cross_entropy(hidden · weightᵀ, targets), with at most chunk_size rows of logits held at a time.

    With a z_weight, z_weight · mean(logsumexp(logits)²) is added (Chowdhery et al. 2022, section 5). With a
    logit_softcap, logits are bounded before all else, as cap · tanh(logit / cap) (Gemma Team 2024). `vocabulary` says
    which ids the rows of `weight` are; None is all of them. `compiled` takes the compiled loop where there is one: for
    all ids, on a CPU, in fp32 and bf16.

    Under autocast the products are in autocast's dtype; softmax, loss and the weight's gradient are fp32. Gradients
    are computed and kept in the forward pass, and the backward pass only scales them: in place, so a second backward
    pass through the same loss raises a RuntimeError.
    """
    device_type = hidden.device.type
    dtype = dtype_of_product(hidden, weight)
    # Dtypes are chosen here, operator by operator.
    settings = (dtype, chunk_size, ignore_index, z_weight, logit_softcap, vocabulary or Vocabulary(), compiled)
    with torch.autocast(device_type, enabled=False):
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return _LinearCrossEntropy.apply(hidden, weight, targets, *settings)  # pyright: ignore[reportReturnType]
        total, _, _ = _chunked(hidden, weight, targets, *settings, wanted=(False, False))
        return total / _count(targets, ignore_index)


class Vocabulary:
    """What the loss needs of the ids that a matrix has rows for: here all ids."""

    def softmax(self, logits: Tensor, targets: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The targets' logits, logsumexp and probabilities of a chunk; overwrites logits that are already in `wide`.

        Targets, their logits and logsumexp have one column.
        """
        target_logits = logits.gather(1, targets).to(wide)
        largest = logits.amax(dim=1, keepdim=True).to(wide)
        probabilities = torch.softmax(logits, dim=1, dtype=wide, out=logits if logits.dtype == wide else None)
        # log(largest probability) = largest logit - logsumexp, so softmax's sum of exponentials serves for logsumexp
        # too. The largest probability is at least 1/vocab_size, so its logarithm is safe.
        logsumexp = largest - probabilities.amax(dim=1, keepdim=True).log()
        return target_logits, logsumexp, probabilities

    def subtract_targets(self, probabilities: Tensor, targets: Tensor) -> None:
        """probabilities - onehot(targets), in place."""
        probabilities.scatter_(1, targets, probabilities.gather(1, targets) - 1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any) -> Tensor:
        total, grad_hidden, grad_weight = _chunked(hidden, weight, targets, *settings, wanted=ctx.needs_input_grad[:2])
        count = _count(targets, settings[2])
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *gradients, count = ctx.saved_tensors
        # Dividing by the count only now keeps fp16 gradients of a scaled loss from underflowing before the scale
        # reaches them.
        factor = grad_outputs[0] / count
        scaled = (
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, *[None] * 8)


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    dtype: torch.dtype,
    chunk_size: int,
    ignore_index: int,
    z_weight: float,
    logit_softcap: float | None,
    vocabulary: Vocabulary,
    compiled: bool,
    *,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum of the losses, and its gradients with respect to hidden and weight where `wanted`."""
    wide = torch.promote_types(dtype, torch.float32)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    total = torch.zeros((), dtype=wide, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if wanted[0] else None
    grad_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        counts = (targets[rows] != ignore_index).unsqueeze(1)
        chosen = targets[rows].unsqueeze(1).where(counts, 0)
        # A row of zeros adds nothing to the weight's gradient: cheaper here than clearing a row of logits later.
        inputs = hidden[rows].masked_fill(~counts, 0)
        logits = inputs @ weight.T
        in_loops = compiled and type(vocabulary) is Vocabulary and is_computed(logits)
        if in_loops:
            with early_gradient() if any(wanted) else nullcontext():
                target_logits, logsumexp, _ = loss_rows_(
                    logits, chosen, logit_softcap or 0.0, z_weight, any(wanted), False
                )
            gradient = logits
        else:
            target_logits, logsumexp, gradient = _plain_loss_rows(
                logits, chosen, logit_softcap, z_weight, vocabulary, wide, with_gradient=any(wanted)
            )
        losses = logsumexp - target_logits
        if z_weight:
            losses += z_weight * logsumexp.square()
        total += losses.where(counts, 0).sum()
        if not any(wanted):
            continue
        with early_gradient():
            gradient = gradient.to(dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[rows])
                grad_hidden[rows].masked_fill_(~counts, 0)
            if grad_weight is not None and dtype == wide:
                grad_weight.addmm_(gradient.T, inputs)
            elif grad_weight is not None and in_loops and dtype == torch.bfloat16:
                add_narrow_(grad_weight, gradient.T @ inputs)
            elif grad_weight is not None:
                grad_weight += gradient.T @ inputs
    return total, grad_hidden, grad_weight


def _plain_loss_rows(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    z_weight: float,
    vocabulary: Vocabulary,
    wide: torch.dtype,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The targets' logits and logsumexp, one column each, and the gradient of the sum of losses with respect to the
    logits, in `wide`: meaningless unless wanted. The logits are overwritten."""
    slopes = None if softcap is None else bound_(logits, softcap, with_slopes=with_gradient)
    target_logits, logsumexp, probabilities = vocabulary.softmax(logits, targets, wide)
    if with_gradient:
        with early_gradient():
            if z_weight:
                # The gradient of logsumexp² is 2 · logsumexp · softmax.
                probabilities *= 1 + 2 * z_weight * logsumexp
            vocabulary.subtract_targets(probabilities, targets)
            if slopes is not None:
                probabilities *= slopes
    return target_logits, logsumexp, probabilities


def _count(targets: Tensor, ignore_index: int) -> Tensor:
    return (targets != ignore_index).sum().clamp(min=1)
