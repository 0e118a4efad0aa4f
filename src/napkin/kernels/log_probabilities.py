"""Log-probabilities of given tokens, and entropies, from hidden states: the logits never all exist at once.

The gradient of a loss that is not a mean of log-probabilities, as in policy gradients or DPO, is not known in the
forward pass. So the backward pass computes each chunk of logits again: a third product more, and the memory of one
chunk instead of all logits.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.cross_entropy_loss import CHUNK_SIZE


def linear_log_probabilities(
    hidden: Float[Tensor, "n d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, " n"],
    *,
    temperature: float = 1.0,
    chunk_size: int = CHUNK_SIZE,
    logit_softcap: float | None = None,
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """log softmax(logits / temperature)[target] and the entropy of softmax(logits / temperature) of each row, in nats,
    in fp32 or wider; logits = hidden · weightᵀ, bounded by a softcap if there is one.

    Both have gradients. At most chunk_size rows of logits are held at a time. Under autocast the products are in
    autocast's dtype.
    """
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    else:
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
    with torch.autocast(device_type, enabled=False):
        return _LogProbabilities.apply(hidden, weight, targets, dtype, temperature, chunk_size, logit_softcap)  # pyright: ignore[reportReturnType]


class _LogProbabilities(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(dtype, torch.float32)
        log_probabilities = hidden.new_empty(len(hidden), dtype=wide)
        entropies = hidden.new_empty(len(hidden), dtype=wide)
        matrix = weight.to(dtype)
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            logprobs, _ = _log_softmax(hidden[rows].to(dtype), matrix, wide, temperature, softcap)
            log_probabilities[rows] = logprobs.gather(1, targets[rows, None])[:, 0]
            entropies[rows] = _entropy(logprobs)
        ctx.save_for_backward(hidden, weight, targets, entropies)
        ctx.settings = dtype, temperature, chunk_size, softcap
        return log_probabilities, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, entropies = ctx.saved_tensors
        dtype, temperature, chunk_size, softcap = ctx.settings
        of_log_probabilities, of_entropies = grad_outputs
        wide = torch.promote_types(dtype, torch.float32)
        matrix = weight.to(dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            inputs = hidden[rows].to(dtype)
            logprobs, slopes = _log_softmax(inputs, matrix, wide, temperature, softcap)
            probabilities = logprobs.exp()
            # d log p(target) = onehot - p; d entropy = -p · (log p + entropy).
            gradient = -probabilities * (
                of_log_probabilities[rows, None] + of_entropies[rows, None] * (logprobs + entropies[rows, None])
            )
            gradient.scatter_add_(1, targets[rows, None], of_log_probabilities[rows, None])
            gradient /= temperature
            if slopes is not None:
                gradient *= slopes
            gradient = gradient.to(dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ matrix
            if grad_weight is not None:
                grad_weight += gradient.T @ inputs
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *[None] * 5


def _log_softmax(
    hidden: Tensor, weight: Tensor, wide: torch.dtype, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of all tokens, and the softcap's slopes if there is one."""
    logits = (hidden @ weight.T).to(wide)
    slopes = None
    if softcap is not None:
        bounded = (logits / softcap).tanh()
        slopes = 1 - bounded.square()
        logits = softcap * bounded
    return (logits / temperature).log_softmax(dim=1), slopes


def _entropy(logprobs: Tensor) -> Tensor:
    return -(logprobs.exp() * logprobs).sum(dim=1)
