"""Tokens routed to each expert in a step, summed over its micro-batches on the device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from napkin.model.moe import Routing


class ExpertCounts:
    """Sums over all routings since the last `clear`."""

    def __init__(self, n_routers: int = 0, n_experts: int = 0) -> None:
        """`n_routers` is how many the model has, on this rank or another, and `n_experts` how many each can choose."""
        self.n_routers, self.n_experts = n_routers, n_experts
        self._sums: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Start a new step."""
        self._sums = {}

    def add(self, routings: Sequence[Routing], first: int = 0) -> None:
        """Add a forward pass through some layers in a row, one routing per layer; `first` is the first router's
        number."""
        for number, routing in enumerate(routings, start=first):
            row = torch.cat([routing.tokens_per_expert, routing.dropped[None]])
            self._sums[number] = self._sums[number] + row if number in self._sums else row

    def read(
        self, sum_over_ranks: Callable[[Tensor], Tensor] = lambda counts: counts, device: torch.device | None = None
    ) -> tuple[list[list[int]], list[int]] | tuple[None, None]:
        """Tokens of each expert and dropped tokens, by layer; None without experts.

        With `sum_over_ranks` those of all ranks, also in layers that are not on this one; `device` is where it counts.
        """
        if not self.n_routers:
            return None, None
        missing = torch.zeros(self.n_experts + 1, dtype=torch.int64, device=device)
        rows = torch.stack([self._sums.get(number, missing) for number in range(self.n_routers)])
        counts = sum_over_ranks(rows).tolist()
        return [row[:-1] for row in counts], [row[-1] for row in counts]
