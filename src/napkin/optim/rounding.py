"""Stochastic rounding of fp32 to bf16: up or down at random, so that the mean is exact.

A bf16 weight has 8 significant bits: rounded to nearest, an update of less than 1/512 of it is lost every time. If the
probability of rounding up is the fraction of the way to the next number, the mean of the updates is exact (Gupta et al.
2015; for language models, Zamirai et al. 2020).
"""

import torch
from torch import Tensor


class StochasticRounding:
    """Rounds the updates of a step; its random numbers depend only on seed and step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._key = 0

    def begin(self, step: int) -> None:
        """Seed the random numbers of this step."""
        self._key = (self.seed * 1_000_003 + step) % 2**63
        self._generators.clear()

    @torch.no_grad()
    def __call__(self, targets: list[Tensor], values: list[Tensor]) -> None:
        """Round fp32 `values` into bf16 `targets` of the same shapes; `values` are overwritten."""
        for target, value in zip(targets, values, strict=True):
            if target.dtype != torch.bfloat16:
                target.copy_(value)
                continue
            # bf16 is the upper half of fp32. A random lower half is added to the bits; a carry rounds up.
            bits = value.view(torch.int32)
            noise = self._noise(value)
            bits.add_(noise).add_(2**15).bitwise_and_(-(2**16))
            target.copy_(value)

    def _noise(self, like: Tensor) -> Tensor:
        """Random integers from -2^15 to 2^15 - 1, four of them from each 64-bit draw."""
        if like.device not in self._generators:
            self._generators[like.device] = torch.Generator(like.device).manual_seed(self._key)
        draws = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
        draws.random_(-(2**63), None, generator=self._generators[like.device])
        return draws.view(torch.int16)[: like.numel()].view(like.shape)
