"""Tokens routed to each expert in a step, summed over its micro-batches on the device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from napkin.model.moe import Routing


class ExpertCounts:
    """Sums over all routings since the last `clear`."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def clear(self) -> None:
        """Start a new step."""
        self._sums = None

    def add(self, routings: Sequence[Routing]) -> None:
        """Add a forward pass, one routing per layer."""
        rows = torch.stack([torch.cat([each.tokens_per_expert, each.dropped[None]]) for each in routings])
        self._sums = rows if self._sums is None else self._sums + rows

    def read(self) -> tuple[list[list[int]], list[int]] | tuple[None, None]:
        """Tokens of each expert and dropped tokens, by layer; None without experts."""
        if self._sums is None:
            return None, None
        rows = self._sums.tolist()
        return [row[:-1] for row in rows], [row[-1] for row in rows]
