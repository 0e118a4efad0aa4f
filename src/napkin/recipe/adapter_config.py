"""[adapter] of a recipe: small matrices that are trained in place of the weights."""

from dataclasses import dataclass
from typing import Literal

from napkin.errors import NapkinError
from napkin.model.adapter_names import refuse_unknown


@dataclass(frozen=True)
class AdapterConfig:
    """Small matrices that are trained in place of the weights."""

    kind: Literal["none", "lora", "dora"] = "none"
    """none trains all weights; lora adds a product of two small matrices to each chosen matrix, and trains only these
    (Hu et al. 2021); dora learns the length of each row besides (Liu et al. 2024)."""

    rank: int = 8
    """Rows of the first small matrix, columns of the second."""

    alpha: float = 16.0
    """The product is multiplied by alpha / rank."""

    modules: tuple[str, ...] = ("attention", "mlp")
    """Whose matrices get one: attention, mlp, head, or one matrix of each block: attention.query, attention.key,
    attention.value, attention.output, mlp.gate, mlp.up, mlp.down."""

    seed: int = 0
    """Of the first matrices; the second ones start at 0."""

    frozen: Literal["auto", "fp32"] = "auto"
    """What frozen matrices are held in: auto is the format that products read them in, with bf16 half the bytes for the
    same numbers; fp32 keeps all digits for the model that adapters are merged into."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 2**16:
            raise NapkinError(f"adapter.rank is {self.rank}: use 1 to {2**16}")
        if not 0 < self.alpha <= 1e6:
            raise NapkinError(f"adapter.alpha is {self.alpha}: use a number above 0, at most 1e6")
        if not self.modules:
            raise NapkinError("adapter.modules names nothing: name some, such as attention mlp")
        refuse_unknown(self.modules)
