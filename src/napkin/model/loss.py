"""The training loss of a language model: cross-entropy, the head's z-loss and the losses of routers."""

from collections.abc import Sequence

from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from napkin.kernels.cross_entropy_loss import linear_cross_entropy
from napkin.kernels.fused_cross_entropy import fused_linear_cross_entropy
from napkin.model.moe import Routing


def next_token_loss(
    hidden: Float[Tensor, "batch position d_model"],
    head_weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, "batch position"],
    *,
    chunk_size: int,
    z_weight: float = 0.0,
    logit_softcap: float | None = None,
    compiled: bool = False,
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats per token, targets of -1 ignored, plus z_weight · mean(logsumexp(logits)²).

    At most chunk_size rows of logits exist at a time; they are bounded by a softcap if there is one. `compiled` is as
    in `linear_cross_entropy`.
    """
    return linear_cross_entropy(
        rearrange(hidden, "b t c -> (b t) c"),
        head_weight,
        rearrange(targets, "b t -> (b t)"),
        chunk_size=chunk_size,
        z_weight=z_weight,
        logit_softcap=logit_softcap,
        compiled=compiled,
    )


def fused_next_token_loss(
    hidden: Float[Tensor, "batch position d_model"],
    head_weight: Float[Tensor, "vocab_size d_model"],
    targets: Int[Tensor, "batch position"],
    *,
    chunk_size: int,
    z_weight: float = 0.0,
    logit_softcap: float | None = None,
    narrow_weight: Float[Tensor, "vocab_size d_model"] | None = None,
) -> Float[Tensor, ""]:
    """`next_token_loss` by `fused_linear_cross_entropy`."""
    return fused_linear_cross_entropy(
        rearrange(hidden, "b t c -> (b t) c"),
        head_weight,
        rearrange(targets, "b t -> (b t)"),
        chunk_size=chunk_size,
        z_weight=z_weight,
        logit_softcap=logit_softcap,
        narrow_weight=narrow_weight,
    )


def add_router_losses(
    loss: Float[Tensor, ""],
    routings: Sequence[Routing],
    *,
    balance_weight: float,
    z_weight: float,
    n_routers: int | None = None,
) -> Float[Tensor, ""]:
    """The loss plus the weighted mean of the routers' balance losses and z-losses.

    Where these are some routers of a model, `n_routers` is how many it has: the loss plus their part of the mean.
    """
    n_routers = n_routers or len(routings)
    for routing in routings:
        loss = loss + (balance_weight * routing.balance_loss + z_weight * routing.z_loss) / n_routers
    return loss
