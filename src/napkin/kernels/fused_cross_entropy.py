"""Cross-entropy of the output head whose chunks of logits become their own gradient in place (Hsu et al. 2024, Liger).

The products are torch's; between them one operator reads each logit twice and writes it once. A chunk has about as many
numbers as the hidden states, so that its memory does not count.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from napkin.kernels.autocast import dtype_of_product
from napkin.kernels.early_gradient import early_gradient
from napkin.kernels.triton.usable import runs_triton


def fused_linear_cross_entropy(
    hidden: Float[Tensor, "n d_model"],
    weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, " n"],
    *,
    chunk_size: int | None = None,
    ignore_index: int = -1,
    z_weight: float = 0.0,
    logit_softcap: float | None = None,
    narrow_weight: Float[Tensor, "vocab_size d_model"] | None = None,
) -> Float[Tensor, ""]:
    """`napkin.kernels.linear_cross_entropy` for a GPU, with the same formats: under autocast products in its dtype.

    `narrow_weight` is the weight in that dtype, where somebody has it already.
    A chunk_size of None is n · d_model / vocab_size rows, rounded up to a power of two, 128 at least.
    """
    device_type = hidden.device.type
    dtype = dtype_of_product(hidden, weight)
    if chunk_size is None:
        chunk_size = max(128, 1 << (-(-hidden.numel() // len(weight)) - 1).bit_length())
    settings = (narrow_weight, dtype, chunk_size, ignore_index, z_weight, logit_softcap or 0.0)
    with torch.autocast(device_type, enabled=False):
        return _FusedCrossEntropy.apply(hidden, weight, targets, *settings)  # pyright: ignore[reportReturnType]


class _FusedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, *settings: Any) -> Tensor:
        narrow_weight, dtype, chunk_size, ignore_index, z_weight, softcap = settings
        ctx.dtypes = hidden.dtype, weight.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype) if narrow_weight is None else narrow_weight
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        count = (targets != ignore_index).sum().clamp(min=1)
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            logits = hidden[rows] @ weight.T
            total += _in_place(
                logits, targets[rows], ignore_index, z_weight, softcap, wants_hidden or wants_weight
            ).sum()
            with early_gradient():
                if grad_hidden is not None:
                    torch.mm(logits, weight, out=grad_hidden[rows])
                if grad_weight is not None:
                    grad_weight += logits.T @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_weight, count)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *gradients, count = ctx.saved_tensors
        # Divided only now, as in `linear_cross_entropy`: fp16 gradients of a scaled loss must not underflow before.
        factor = grad_outputs[0] / count
        scaled = (
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return (*scaled, *[None] * 7)


def in_place_reference(
    logits: Tensor, targets: Tensor, ignore_index: int, z_weight: float, softcap: float, wants_gradient: bool
) -> Tensor:
    """The loss of each row, 0 where its target is ignored; the logits become the gradient of their sum, if wanted."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    bounded = torch.tanh(wide / softcap) if softcap else None
    wide = wide if bounded is None else softcap * bounded
    counts = (targets != ignore_index)[:, None]
    chosen = targets[:, None].where(counts, 0)
    logsumexp = wide.logsumexp(dim=1, keepdim=True)
    losses = (logsumexp - wide.gather(1, chosen) + z_weight * logsumexp.square()).where(counts, 0)
    if wants_gradient:
        slope = (wide - logsumexp).exp() * (1 + 2 * z_weight * logsumexp)
        slope.scatter_add_(1, chosen, -torch.ones_like(losses))
        slope = slope if bounded is None else slope * (1 - bounded.square())
        logits.copy_(slope.where(counts, 0))
    return losses[:, 0]


@torch.library.custom_op(
    "napkin::fused_cross_entropy_",
    mutates_args=("logits",),
    schema="(Tensor(a!) logits, Tensor targets, int ignore_index, float z_weight, float softcap, bool wants_gradient) "
    "-> Tensor",
)
def _in_place(logits: Tensor, *others: Any) -> Tensor:
    if not runs_triton(logits):
        return in_place_reference(logits, *others)
    from napkin.kernels.triton.cross_entropy import cross_entropy_in_place

    return cross_entropy_in_place(logits, *others)


@_in_place.register_fake
def _(logits: Tensor, *others: Any) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))
