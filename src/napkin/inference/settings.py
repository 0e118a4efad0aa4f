"""Settings of sampling. Does not import torch: the command line reads this class for its help."""

import math
from dataclasses import dataclass

from napkin.errors import NapkinError

LARGEST_SEED = 2**62


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the same settings and seed draw the same tokens."""

    temperature: float = 0.8
    """Logits are divided by it: below 1, likely tokens become likelier; 0 always takes the likeliest token."""

    top_k: int | None = None
    """Draw among this many likeliest tokens (Fan et al. 2018); None is all."""

    top_p: float = 0.95
    """Draw among the likeliest tokens that together reach this probability (Holtzman et al. 2020); 1 is all."""

    seed: int = 0
    """Seed of the draws; each of several completions uses the next seed."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise NapkinError(f"temperature is {self.temperature}: use a finite number, 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise NapkinError(f"top_k is {self.top_k}: use 1 or more, or leave it out")
        if not 0 < self.top_p <= 1:
            raise NapkinError(f"top_p is {self.top_p}: use a probability above 0, up to 1")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise NapkinError(f"seed is {self.seed}: use 0 to {LARGEST_SEED}")
