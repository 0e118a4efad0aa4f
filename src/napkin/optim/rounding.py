"""Stochastic rounding of fp32 to bf16: up or down at random, so that the mean is exact.

A bf16 weight has 8 significant bits: an update of less than 1/512 of it would be rounded away each time. Rounded up
with the probability that is its share of the step between two neighbours, it arrives in the mean (Gupta et al. 2015;
for language models, Zamirai et al. 2020).
"""

import torch
from torch import Tensor


class StochasticRounding:
    """Rounds the updates of a step; what it draws follows from seed and step alone."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._key = 0

    def begin(self, step: int) -> None:
        """The next numbers are those of this step."""
        self._key = (self.seed * 1_000_003 + step) % 2**63
        self._generators.clear()

    @torch.no_grad()
    def __call__(self, targets: list[Tensor], values: list[Tensor]) -> None:
        """Round fp32 `values` into bf16 `targets` of the same shapes; `values` are overwritten."""
        for target, value in zip(targets, values, strict=True):
            if target.dtype != torch.bfloat16:
                target.copy_(value)
                continue
            # bf16 is the upper half of fp32. A random lower half is added to the bits; what carries rounds up.
            bits = value.view(torch.int32)
            noise = self._noise(value)
            bits.add_(noise).add_(2**15).bitwise_and_(-(2**16))
            target.copy_(value)

    def _noise(self, like: Tensor) -> Tensor:
        """Numbers from -2^15 to 2^15 - 1, four to a draw."""
        if like.device not in self._generators:
            self._generators[like.device] = torch.Generator(like.device).manual_seed(self._key)
        draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
        draws.random_(-(2**63), None, generator=self._generators[like.device])
        return draws.view(torch.int16)[: like.numel()].view(like.shape)
