"""One call of a collective, as a row of a ledger has it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One call of a collective, as one rank sees it."""

    operation: str
    """As `Interconnect.seconds` names them; besides these "receive", "broadcast", "scatter", "gather" and "reduce"."""
    data_bytes: int
    """Of the whole tensor: what each rank has after an all-gather, before a reduce-scatter, before and after an
    all-reduce; what it gives to an all-to-all, or sends."""
    ranks: tuple[int, ...]
    """Those that take part; of a send, the sender and the receiver are among them."""
    peer: int | None = None
    """Of a send or receive, the other rank."""

    @property
    def group_size(self) -> int:
        """Number of ranks that take part."""
        return len(self.ranks)
