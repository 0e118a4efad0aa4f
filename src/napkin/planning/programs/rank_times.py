"""Seconds of a program's ranks: what each computes, what it waits for, and what of its collectives is hidden.

A collective whose result is waited for before anything else is computed, as those of tensor parallelism, is exposed in
full, and so is an all-to-all. Those of FSDP and DDP overlap with the computation of their pass: only the excess over it
is exposed. Messages between the stages of a pipeline are followed from rank to rank, in the order in which each calls
them: a stage that receives waits until the other has sent.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from napkin.accounting.ledger import CollectiveCall, Ledger, Row
from napkin.accounting.pricing import Price, price_with_launches, roofline_seconds
from napkin.accounting.rank_seconds import Communication
from napkin.hardware.ceilings import CatalogueCeilings
from napkin.hardware.cluster import Interconnect


@dataclass(frozen=True)
class RankTime:
    """The seconds of one rank's step."""

    price: Price
    """Seconds of its operators."""
    exposed_seconds: float
    """Seconds of collectives in which the rank computes nothing."""
    hidden_seconds: float
    """Seconds of collectives while it computes."""
    bubble_seconds: float
    """Seconds of waiting for another stage of a pipeline."""

    @property
    def seconds(self) -> float:
        """Seconds of the step, without waiting for slower ranks."""
        return self.price.seconds + self.exposed_seconds + self.bubble_seconds


def rank_times(
    ledgers: Mapping[int, Ledger], ceilings: CatalogueCeilings, links: Interconnect | None
) -> dict[int, RankTime]:
    """The seconds of each rank, by rank."""
    times: dict[int, RankTime] = {}
    bubbles = _bubbles(ledgers, ceilings, links)
    for rank, ledger in ledgers.items():
        priced = price_with_launches(ledger, ceilings, factor=ceilings.efficiency.factor)
        exposed = hidden = 0.0
        if links is not None:
            blocking = set(_blocking(ledger, ceilings))
            at_once = sum(_seconds(ledger.rows[number].collective, links) for number in blocking)
            beside = dataclasses.replace(
                ledger, rows=tuple(row for number, row in enumerate(ledger.rows) if number not in blocking)
            )
            communication = Communication.of(beside).without("send")
            passes = {name: spent.seconds for name, spent in priced.by_phase.items()}
            longer = communication.exposed_seconds(
                links,
                forward_seconds=passes.get("forward", 0.0),
                backward_seconds=passes.get("backward", 0.0) + passes.get("recompute", 0.0),
            )
            exposed, hidden = at_once + longer, max(0.0, communication.seconds(links) - longer)
        times[rank] = RankTime(priced, exposed, hidden, bubbles[rank])
    return times


def _blocking(ledger: Ledger, ceilings: CatalogueCeilings) -> Iterator[int]:
    """The numbers of the rows of collectives that the computation waits for at once."""
    for number, row in enumerate(ledger.rows):
        if row.collective is None or row.collective.operation in ("send", "receive"):
            continue
        if row.collective.operation == "all_to_all" or _waits_at_once(ledger.rows, number, ceilings):
            yield number


def _waits_at_once(rows: tuple[Row, ...], number: int, ceilings: CatalogueCeilings) -> bool:
    for row in rows[number + 1 :]:
        if row.operator == "wait_tensor":
            return True
        if row.collective is not None or roofline_seconds(row, ceilings):
            return False
    return False


def _seconds(call: CollectiveCall | None, links: Interconnect) -> float:
    if call is None:
        return 0.0
    alone = dataclasses.replace(_EMPTY, collective=call)
    return Communication.of(_of_rows(alone)).seconds(links)


_EMPTY = Row("", "forward", "", "", 0, 0, 0, None, 0, 0, 0, 0)


def _of_rows(*rows: Row) -> Ledger:
    return Ledger(rows, 0, 0, 0, {}, (), {})


def _bubbles(
    ledgers: Mapping[int, Ledger], ceilings: CatalogueCeilings, links: Interconnect | None
) -> dict[int, float]:
    """Seconds for which each rank waits for messages of other ranks, if their ledgers are among these."""
    waited = dict.fromkeys(ledgers, 0.0)
    clocks = dict.fromkeys(ledgers, 0.0)
    programs = {rank: list(_messages(ledger, ceilings, links)) for rank, ledger in ledgers.items()}
    if not any(call is not None for each in programs.values() for _, call in each):
        return waited
    positions = dict.fromkeys(ledgers, 0)
    arrivals: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    taken: defaultdict[tuple[int, int], int] = defaultdict(int)
    moved = True
    while moved:
        moved = False
        for rank, of_rank in programs.items():
            while positions[rank] < len(of_rank):
                seconds, call = of_rank[positions[rank]]
                peer = None if call is None else call.peer
                if call is not None and call.operation == "receive" and peer is not None and peer in ledgers:
                    pair = peer, rank
                    if taken[pair] >= len(arrivals[pair]):
                        break
                    begin = clocks[rank] + seconds
                    arrival = arrivals[pair][taken[pair]]
                    taken[pair] += 1
                    waited[rank] += max(0.0, arrival - begin)
                    clocks[rank] = max(begin, arrival)
                else:
                    clocks[rank] += seconds
                    if call is not None and call.operation == "send" and peer is not None:
                        takes = 0.0 if links is None else _seconds(call, links)
                        arrivals[rank, peer].append(clocks[rank] + takes)
                positions[rank] += 1
                moved = True
    return waited


def _messages(
    ledger: Ledger, ceilings: CatalogueCeilings, links: Interconnect | None
) -> Iterator[tuple[float, CollectiveCall | None]]:
    """The messages of a rank, each with the seconds that it computes before; last the seconds after all of them."""
    blocking = set(_blocking(ledger, ceilings))
    seconds = 0.0
    for number, row in enumerate(ledger.rows):
        call = row.collective
        if call is not None and call.operation in ("send", "receive"):
            yield seconds, call
            seconds = 0.0
        elif call is None:
            seconds += roofline_seconds(row, ceilings)
        elif number in blocking and links is not None:
            seconds += _seconds(call, links)
    yield seconds, None
