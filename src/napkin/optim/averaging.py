"""Exponential moving average of the weights (Polyak & Juditsky 1992; in this form Tarvainen & Valpola 2017)."""

# torch keeps its foreach functions under private names; its own optimizers are built on them.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.optim.base import buckets, wide_dtype
from napkin.optim.shards import local


class WeightAverage:
    """a ← decay · a + (1 - decay) · w after each update: weights that noise of single steps has left.

    It begins as a copy of the parameters, at which a decay near 1 would hold it for long: the t-th update, t counted
    from 1, decays by at most (1 + t) / (10 + t). The average is fp32 whatever the parameters' format: 4 bytes a
    parameter. Of sharded parameters each process averages the rows that it has.
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
        """Begin anew, with the parameters as they are now."""
        self.step = 0
        for average, parameter in zip(self.averages, self.parameters, strict=True):
            local(average).copy_(local(parameter))

    @torch.no_grad()
    def update(self) -> None:
        """Take the parameters as they are now into the average."""
        self.step += 1
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        for bucket in buckets(self.parameters):
            averages = [local(self._average_of[p]) for p in bucket]
            torch._foreach_lerp_(averages, [local(p).detach().to(wide_dtype(p)) for p in bucket], 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The parameters hold the average, in their own format, while the context lasts; then they are put back.

        Meanwhile they are kept aside: memory for another copy of them.
        """
        kept = [parameter.detach().clone() for parameter in self.parameters]
        self._put(self.averages)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            local(parameter).copy_(local(value))
