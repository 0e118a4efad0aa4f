"""A causal convolution of each channel by itself: y[t] = bias + Σ weight[k] · x[t - width + 1 + k] (Gu & Dao 2023)."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

Inputs = Float[Tensor, "batch position channels"]
Documents = Int[Tensor, "batch position"] | None


def causal_convolution(
    x: Inputs,
    weight: Float[Tensor, "channels 1 width"],
    bias: Float[Tensor, " channels"] | None,
    *,
    before: Float[Tensor, "batch width_less_1 channels"] | None = None,
    documents: Documents = None,
    document_before: Int[Tensor, " batch"] | None = None,
) -> Inputs:
    """The convolution over positions; before the first there are zeros, or `before`, of document `document_before`.

    Where `documents` is given, inputs of other documents count as zeros.
    """
    width, length = weight.shape[-1], x.shape[1]
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if documents is None and before is None:
        # The operator pads, so that only x itself is kept for the backward pass.
        return F.conv1d(x.mT, weight, bias, padding=width - 1, groups=len(weight))[..., :length].mT
    padded = F.pad(x, (0, 0, width - 1, 0)) if before is None else torch.cat((before.to(x.dtype), x), dim=1)
    if documents is None:
        return F.conv1d(padded.mT, weight, bias, groups=len(weight)).mT
    first = documents[:, :1] if document_before is None else document_before[:, None]
    padded_documents = torch.cat((first.expand(-1, width - 1), documents), dim=1)
    result = x * weight[:, 0, -1]
    for tap in range(width - 1):
        together = padded_documents[:, tap : tap + length] == documents
        result = result + padded[:, tap : tap + length] * together[..., None] * weight[:, 0, tap]
    return result if bias is None else result + bias
