"""The vocabulary divided among ranks: an embedding and a loss of which each rank has the rows of some ids.

Of a chunk's logits [tokens, ids of this rank] ranks exchange a maximum, a sum of exponentials and the target's logit
for each token. Logits of all ids exist on no rank (Shoeybi et al. 2019, section 3).
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from napkin.distributed.collectives import all_gather, all_reduce, in_products_dtype, reduce_scatter
from napkin.kernels.cross_entropy_loss import Vocabulary, linear_cross_entropy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class VocabularyShard(Vocabulary):
    """The ids of this rank, those of ranks before it being smaller. torch.chunk divides them."""

    def __init__(self, vocab_size: int, mesh: "DeviceMesh") -> None:
        each = -(-vocab_size // mesh.size())
        self.first = mesh.get_local_rank() * each
        self.last = min(self.first + each, vocab_size) - 1
        self.group = mesh.get_group()

    def look_up(
        self, tokens: Int[Tensor, "batch position"], rows: Float[Tensor, "ids d_model"]
    ) -> Float[Tensor, "batch part d_model"]:
        """The vectors of all tokens, of which this rank gets its part of the positions."""
        places, elsewhere = self._places(tokens)
        return reduce_scatter(F.embedding(places, rows).masked_fill(elsewhere.unsqueeze(-1), 0), 1, self.group)

    def next_token_loss(
        self,
        hidden: Float[Tensor, "batch part d_model"],
        rows: Float[Tensor, "ids d_model"],
        targets: Int[Tensor, "batch position"],
        *,
        chunk_size: int,
        z_weight: float = 0.0,
        logit_softcap: float | None = None,
    ) -> Float[Tensor, ""]:
        """`napkin.model.loss.next_token_loss` of the hidden states that ranks have parts of; every rank gets it."""
        gathered = rearrange(all_gather(in_products_dtype(hidden), 1, self.group), "b t c -> (b t) c")
        targets = rearrange(targets, "b t -> (b t)")
        settings = {"chunk_size": chunk_size, "z_weight": z_weight, "logit_softcap": logit_softcap}
        return linear_cross_entropy(gathered, rows, targets, vocabulary=self, **settings)

    def softmax(self, logits: Tensor, targets: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """As the base class has it, over the logits of all ranks; the probabilities are those of this rank's ids."""
        places, elsewhere = self._places(targets)
        largest = all_reduce(logits.amax(dim=1, keepdim=True).to(wide), self.group, "max")
        target_logits = logits.gather(1, places).to(wide).masked_fill(elsewhere, 0)
        exponentials = logits.to(wide).sub_(largest).exp_()
        sums = all_reduce(torch.cat((exponentials.sum(dim=1, keepdim=True), target_logits), dim=1), self.group)
        total, target_logits = sums.split(1, dim=1)
        return target_logits, largest + total.log(), exponentials.div_(total)

    def subtract_targets(self, probabilities: Tensor, targets: Tensor) -> None:
        """probabilities - onehot(targets) in place, of the targets that this rank has."""
        places, elsewhere = self._places(targets)
        ones = (~elsewhere).to(probabilities.dtype)
        probabilities.scatter_(1, places, probabilities.gather(1, places) - ones)

    def _places(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of ids, 0 for those of other ranks; and which these are."""
        elsewhere = (ids < self.first) | (ids > self.last)
        return (ids - self.first).masked_fill(elsewhere, 0), elsewhere
