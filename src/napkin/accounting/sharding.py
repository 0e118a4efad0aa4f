"""What one device of several holds, and what it sends: formulas that stand here and nowhere else.

ddp: each device holds the whole model and its rows of the batch; gradients are all-reduced once per step, and stay
allocated from step to step, because the all-reduce works in their buckets (torch's `gradient_as_bucket_view`).
fsdp: FSDP2, the third stage of ZeRO (Rajbhandari et al. 2020): each device holds 1/n of parameters, gradients and
optimizer state. Units (a block, or all that lies outside of blocks) are all-gathered while they work.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import nn

from napkin.accounting.communication import Collective, Communication
from napkin.accounting.ledger import STATE, Category, Ledger, Moment, Row

OUTSIDE_BYTES = 4
"""Per parameter outside of blocks, which are gathered in fp32."""


BUCKET_BYTES = 25 * 2**20
"""Of gradients that ddp all-reduces at a time: torch's default, `bucket_cap_mb`."""


class HasBlocks(Protocol):
    """A model whose layers can be told apart."""

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """Its layers, in their order."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """All parameters, shared ones once."""
        ...


@dataclass(frozen=True)
class ShardingUnits:
    """Numbers of parameters that fsdp gathers at a time."""

    blocks: tuple[int, ...]
    """Of each block, in their order."""
    outside: int
    """Of embedding, head and whatever else is in no block; gathered in fp32, and kept until the backward pass ends."""

    @classmethod
    def of(cls, model: HasBlocks) -> "ShardingUnits":
        """The units of a model that `fully_shard` wraps block by block, and then as a whole."""
        blocks = tuple(sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks)
        return cls(blocks, sum(parameter.numel() for parameter in model.parameters()) - sum(blocks))

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(self.blocks) + self.outside


@dataclass(frozen=True)
class Sharding:
    """How `world_size` devices hold one model between them."""

    strategy: Literal["none", "ddp", "fsdp"]
    world_size: int
    units: ShardingUnits
    bytes_per_weight: int = 4
    """Of a parameter at rest, and of its gradient."""
    gather_bytes: int = 4
    """Per parameter of a block, as fsdp gathers it."""
    reduce_bytes: int = 4
    """Per gradient of a block, as fsdp adds it up."""

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the parameters that fsdp has whole while a block computes its backward pass: the block's, those of
        the block before it, which is gathered ahead, and what lies outside of blocks."""
        if self.strategy != "fsdp":
            return 0
        blocks = self.units.blocks or (0,)
        pairs = [sum(blocks[i : i + 2]) for i in range(max(1, len(blocks) - 1))]
        return self.gather_bytes * max(pairs) + OUTSIDE_BYTES * self.units.outside

    def device_ledger(self, ledger: Ledger) -> Ledger:
        """A ledger of one device's rows on the whole model, with the peak bytes of a device that holds its part."""
        if self.strategy == "none":
            return ledger
        # What the caching allocator would take in segments is known of the whole model alone.
        ledger = dataclasses.replace(ledger, reserved_bytes=None)
        return self._with_gradients_kept(ledger) if self.strategy == "ddp" else self._with_state_sharded(ledger)

    def _with_gradients_kept(self, ledger: Ledger) -> Ledger:
        kept = self.bytes_per_weight * ledger.parameters
        always = _always_bytes(ledger)
        accumulates = any(number for _, _, number in _in_micro_batches(ledger))

        def peak_of(moment: Moment, row: Row) -> int:
            gradients = moment.state_bytes - always
            if accumulates and row.phase != "optimizer":
                # Until the last micro-batch, gradients add up beside the buckets.
                return moment.bytes_alive + kept
            return moment.bytes_alive + max(0, kept - gradients)

        peak_bytes = max((peak_of(moment, row) for moment, row, _ in _in_micro_batches(ledger)), default=0)
        alive: dict[Category, int] = {**ledger.peak_by_category, "gradients": kept}
        return dataclasses.replace(ledger, peak_bytes=peak_bytes, peak_by_category=_adding_up_to(peak_bytes, alive))

    def _with_state_sharded(self, ledger: Ledger) -> Ledger:
        peak_bytes = fsdp_peak_bytes(
            ledger, self.units, self.world_size, gather_bytes=self.gather_bytes, reduce_bytes=self.reduce_bytes
        )
        alive: dict[Category, int] = {
            category: -(-size // self.world_size) if category in STATE else size
            for category, size in ledger.peak_by_category.items()
            if category != "weight copies"
        }
        alive["weight copies"] = self.gathered_bytes
        return dataclasses.replace(ledger, peak_bytes=peak_bytes, peak_by_category=_adding_up_to(peak_bytes, alive))

    def communication(self, micro_batches: int) -> Communication:
        """The collectives of a step of so many micro-batches."""
        return Communication(tuple(self._collectives(micro_batches)), self.world_size)

    def _collectives(self, micro_batches: int) -> Iterator[Collective]:
        if self.strategy == "ddp":
            in_all = self.bytes_per_weight * self.units.parameters
            buckets = -(-in_all // BUCKET_BYTES)
            yield Collective("all_reduce", "backward", in_all / buckets, buckets)
        if self.strategy == "fsdp":
            outside = OUTSIDE_BYTES * self.units.outside
            yield Collective("all_gather", "forward", outside, micro_batches)
            yield Collective("reduce_scatter", "backward", outside, micro_batches)
            for parameters, blocks in Counter(self.units.blocks).items():
                times = micro_batches * blocks
                yield Collective("all_gather", "forward", self.gather_bytes * parameters, times)
                # Blocks are gathered again for the backward pass; what lies outside of them stays whole in between.
                yield Collective("all_gather", "backward", self.gather_bytes * parameters, times)
                yield Collective("reduce_scatter", "backward", self.reduce_bytes * parameters, times)


def fsdp_peak_bytes(
    ledger: Ledger, units: ShardingUnits, world_size: int, *, gather_bytes: int, reduce_bytes: int
) -> int:
    """The peak of a device that holds 1/n of parameters, gradients and optimizer state, moment by moment of a step.

    `ledger` is of the whole model. Beside the device's part there are, as FSDP2 allocates them: what lies outside of
    blocks, from the first forward to the end of the backward pass; the block at work and, in the backward pass, the one
    before it; the last block until its backward pass; gradients of a unit until they are reduced and scattered; and the
    casts of parameters that are gathered wider than they are multiplied.

    Held against the allocator's events of two ranks, ten recipes of two and four layers: within 1%; with gradient
    accumulation 6% over.
    """
    blocks, outside = units.blocks or (0,), OUTSIDE_BYTES * units.outside
    always = _always_bytes(ledger)
    # Casts of gathered parameters live as long as autocast; blocks that are gathered narrow need none.
    casts = max((moment.weight_copy_bytes for moment in ledger.timeline), default=0)
    casts_outside = casts if gather_bytes == 4 else min(casts, 2 * units.outside)
    peak, gathered_last, last_number = 0, False, 0
    for moment, row, number in _in_micro_batches(ledger):
        gradients = moment.state_bytes - always
        rest = moment.bytes_alive - moment.weight_copy_bytes - moment.state_bytes
        if row.phase == "optimizer":
            peak = max(peak, rest + (always + gradients) // world_size)
            continue
        gathered_last = gathered_last and number == last_number
        last_number, block, backward = number, _block_of(row.module), not row.in_forward_pass
        whole = outside + min(moment.weight_copy_bytes, casts_outside)
        if block is not None:
            whole += gather_bytes * blocks[block]
            gathered_last |= block == len(blocks) - 1
            if backward and block:
                whole += gather_bytes * blocks[block - 1]
        elif gathered_last:
            whole += gather_bytes * blocks[-1]
        scattered = gradients
        if number == 0:
            # Blocks behind this one have given their gradients away; all others are whole until they are complete.
            behind = blocks[block + 1 :] if block is not None else blocks
            scattered = min(gradients, 4 * sum(behind)) if backward and gradients > outside else 0
            whole += gradients - scattered
        elif backward or gathered_last:
            # Beside the gradients that were added up so far: those of this micro-batch, whole until they are scattered
            # (outside of blocks with the input of the scattering and its output), and the input of a block's.
            whole += 3 * outside + (gather_bytes * blocks[block] if block is not None else 0)
            whole += reduce_bytes * max(blocks)
        peak = max(peak, rest + whole + (always + scattered) // world_size)
    return peak


def _always_bytes(ledger: Ledger) -> int:
    """Bytes of parameters and optimizer state, which are always there: what comes and goes is gradients."""
    return min((moment.state_bytes for moment in ledger.timeline), default=0)


def _in_micro_batches(ledger: Ledger) -> Iterator[tuple[Moment, Row, int]]:
    """Each moment with the row that ran, and the number of its micro-batch."""
    number, before = 0, "forward"
    for moment in ledger.timeline:
        row = ledger.rows[moment.row]
        number += row.in_forward_pass and before in ("backward", "recompute")
        before = "forward" if row.in_forward_pass else row.phase
        yield moment, row, number


@functools.cache
def _block_of(module: str) -> int | None:
    """The number of the block that a module's path lies in."""
    found = re.match(r"blocks\.(\d+)(?:\.|$)", module)
    return int(found[1]) if found else None


def _adding_up_to(peak_bytes: int, alive: dict[Category, int]) -> dict[Category, int]:
    """The peak may have moved to another moment: what is alive then, more or less, is counted as temporaries."""
    difference = peak_bytes - sum(alive.values())
    return {**alive, "temporaries": max(0, alive.get("temporaries", 0) + difference)} if difference else alive
