"""What a loss does with a chunk of logits in place: on a CPU, a compiled loop in which a row stays in cache."""

from typing import Any

import torch
from torch import Tensor

from napkin.kernels.compiled.loading import float_bits, load_for_training
from napkin.kernels.cpu_operator import cpu_operator
from napkin.kernels.rows_on_threads import on_threads


def _fake_loss_rows(
    logits: Tensor, targets: Tensor, softcap: float, z_weight: float, with_gradient: bool, with_entropies: bool
) -> tuple[Tensor, Tensor, Tensor]:
    column = targets.shape
    target_logits, logsumexps = (logits.new_empty(column, dtype=torch.float32) for _ in range(2))
    entropies = logits.new_empty(column if with_entropies else (column[0], 0), dtype=torch.float32)
    return target_logits, logsumexps, entropies


@cpu_operator(
    "compiled_loss_rows_(Tensor(a!) logits, Tensor targets, float softcap, float z_weight, bool with_gradient, "
    "bool with_entropies) -> (Tensor, Tensor, Tensor)",
    _fake_loss_rows,
)
def loss_rows_(
    logits: Tensor, targets: Tensor, softcap: float, z_weight: float, with_gradient: bool, with_entropies: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows of logits [n, vocab_size], the targets' logits, logsumexp and, if wanted, entropies, one column each.

    Targets have one column. Logits are bounded by a softcap unless it is 0. with_gradient, they become the gradient of
    logsumexp - target's logit + z_weight · logsumexp², in place.
    """
    load_for_training()
    from napkin.kernels.compiled.loss_rows import loss_rows

    target_logits, logsumexps, entropies = _fake_loss_rows(
        logits, targets, softcap, z_weight, with_gradient, with_entropies
    )
    n_rows, n = logits.shape
    smallest, largest = (int(end) for end in targets.aminmax()) if n_rows else (0, 0)
    # The loop checks nothing.
    if smallest < 0 or largest >= n:
        raise IndexError(f"targets from {smallest} to {largest} are outside of a vocabulary of {n}")
    addresses = (targets.data_ptr(), target_logits.data_ptr(), logsumexps.data_ptr(), entropies.data_ptr())
    options = (n, float_bits(softcap), float_bits(z_weight), with_gradient, with_entropies)

    def arguments(start: int, stop: int, buffer: int) -> tuple[Any, ...]:
        return (logits.data_ptr(), logits.dtype == torch.bfloat16, *addresses, start, stop, *options, buffer)

    on_threads(loss_rows, arguments, n_rows, n, 3 * n)
    return target_logits, logsumexps, entropies


@cpu_operator("compiled_add_(Tensor(a!) total, Tensor part) -> ()", lambda total, part: None)
def add_narrow_(total: Tensor, part: Tensor) -> None:
    """total += part, fp32 and bf16, without a wide copy of the part."""
    load_for_training()
    from napkin.kernels.compiled.loss_rows import add_narrow

    on_threads(
        add_narrow, lambda start, stop, buffer: (total.data_ptr(), part.data_ptr(), start, stop), total.numel(), 1, 0
    )


def bound_(logits: Tensor, cap: float, *, with_slopes: bool) -> Tensor | None:
    """Bound logits in place; the derivative of cap · tanh(x / cap), which is 1 - tanh², if it is wanted."""
    logits.div_(cap).tanh_()
    slopes = logits.square().neg_().add_(1) if with_slopes else None
    logits.mul_(cap)
    return slopes
