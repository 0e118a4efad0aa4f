"""Exponential moving average of the weights (Polyak & Juditsky 1992; in this form Tarvainen & Valpola 2017)."""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.optim.base import buckets, wide_dtype
from napkin.optim.saved_state import local


class WeightAverage:
    """a ← decay · a + (1 - decay) · w after each update, which averages out the noise of single steps.

    The average starts as a copy of the parameters, near which a decay close to 1 would keep it for long: the decay of
    the t-th update, t counted from 1, is at most (1 + t) / (10 + t). The average is fp32 for parameters of any dtype, 4
    bytes per parameter. Of sharded parameters each rank averages its own rows.
    """

    def __init__(self, parameters: Iterable[Tensor], decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise NapkinError(f"decay is {decay}: use 0 to below 1")
        self.decay = decay
        self.step = 0
        self.parameters = list(parameters)
        self.averages = [p.detach().to(wide_dtype(p), copy=True) for p in self.parameters]
        self._average_of = dict(zip(self.parameters, self.averages, strict=True))

    @torch.no_grad()
    def begin(self) -> None:
        """Restart from the parameters as they are now."""
        self.step = 0
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            local(average).copy_(local(parameter))

    @torch.no_grad()
    def update(self) -> None:
        """Update the average with the parameters as they are now."""
        self.step += 1
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        for bucket in buckets(self.parameters):
            averages = [local(self._average_of[p]) for p in bucket]
            torch._foreach_lerp_(averages, [local(p).detach().to(wide_dtype(p)) for p in bucket], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the context the parameters hold the average, in their own dtype; then they are restored.

        Meanwhile a copy of them takes memory.
        """
        kept = [parameter.detach().clone() for parameter in self.parameters]
        self._copy_into_parameters(self.averages)
        try:
            yield
        finally:
            self._copy_into_parameters(kept)

    @torch.no_grad()
    def _copy_into_parameters(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            local(parameter).copy_(local(value))
