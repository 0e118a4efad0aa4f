"""A deep linear model: square linear layers, one after another, and a head to one number.

It is all matrix products, so it is the smallest model on which to compare the rule 6·N·T with the count. They differ in
one term: the first layer needs no gradient of its input.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from napkin.errors import NapkinError
from napkin.model.linear import Linear


class DeepLinear(nn.Module):
    """n_layers matrices of d_model × d_model and a head of d_model × 1, without activations.

    Raises NapkinError for sizes below 1.
    """

    def __init__(self, d_model: int, n_layers: int, *, seed: int = 0) -> None:
        super().__init__()
        for name, size in (("d_model", d_model), ("n_layers", n_layers)):
            if size < 1:
                raise NapkinError(f"{name} is {size}: use a number above 0")
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(Linear(d_model, d_model, generator=generator) for _ in range(n_layers))
        self.head = Linear(d_model, 1, generator=generator)

    def forward(self, x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch"]:
        """One number per vector."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x).squeeze(-1)
