"""[adapter] of a recipe: small matrices that are trained in place of the weights."""

from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError


@dataclass(frozen=True)
class AdapterConfig:
    """Small matrices that are trained in place of the weights."""

    kind: Literal["none", "lora", "dora"] = "none"
    """none trains all weights; lora adds a product of two small matrices to each chosen matrix, and trains only these
    (Hu et al. 2021); dora learns the length of each column besides (Liu et al. 2024)."""

    rank: int = 8
    """Rows of the first small matrix, columns of the second."""

    alpha: float = 16.0
    """The product is multiplied by alpha / rank."""

    modules: tuple[str, ...] = ("attention", "mlp")
    """Whose matrices get one: attention, mlp, head, or the name of a layer, such as mlp.down."""

    seed: int = 0
    """Of the first matrices; the second ones start at 0."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 2**16:
            raise NapkinError(f"adapter.rank is {self.rank}: use 1 to {2**16}")
        if not 0 < self.alpha <= 1e6:
            raise NapkinError(f"adapter.alpha is {self.alpha}: use a number above 0, at most 1e6")
        if not self.modules:
            raise NapkinError("adapter.modules names no layer: name some, such as attention mlp")
