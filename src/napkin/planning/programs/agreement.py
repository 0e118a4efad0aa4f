"""Checks that ranks agree on their collectives: all ranks of a group must call the same ones in the same order."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from napkin.accounting.ledger import CollectiveCall
from napkin.errors import NapkinError
from napkin.units import format_bytes

_SIZES_DIFFER = frozenset({"all_to_all", "scatter", "gather"})
"""Collectives to which ranks may give different numbers of bytes."""
_BETWEEN_TWO = frozenset({"send", "receive"})


def require_agreement(calls: Mapping[int, Iterable[CollectiveCall]], *, of: str) -> None:
    """Raise NapkinError if traced ranks would deadlock, or receive data that is not meant for them.

    `calls` are the collectives of each traced rank, in its order; `of` is the part of the program that they are of.
    """
    in_group: defaultdict[tuple[int, ...], dict[int, list[CollectiveCall]]] = defaultdict(dict)
    messages: defaultdict[tuple[int, int], dict[str, list[int]]] = defaultdict(lambda: {"send": [], "receive": []})
    for rank, of_rank in calls.items():
        for call in of_rank:
            if call.operation not in _BETWEEN_TWO:
                in_group[call.ranks].setdefault(rank, []).append(call)
            elif call.peer is not None:
                pair = (rank, call.peer) if call.operation == "send" else (call.peer, rank)
                messages[pair][call.operation].append(call.data_bytes)
    for group, by_rank in in_group.items():
        for rank in group:
            if rank in calls:
                by_rank.setdefault(rank, [])
        (first, expected), *others = sorted(by_rank.items())
        for rank, found in others:
            _require_same(group, first, expected, rank, found, of)
    for (source, destination), of_pair in messages.items():
        if source not in calls or destination not in calls:
            continue
        sent, received = of_pair["send"], of_pair["receive"]
        for number in range(max(len(sent), len(received))):
            gives = sent[number] if number < len(sent) else None
            takes = received[number] if number < len(received) else None
            if gives != takes:
                raise NapkinError(
                    f"in {of}, message {number + 1} from rank {source} to rank {destination} is "
                    f"{'never sent' if gives is None else format_bytes(gives)} and "
                    f"{'never received' if takes is None else 'received as ' + format_bytes(takes)}: "
                    "let sends and receives match, or ranks wait without end"
                )


def _require_same(
    group: tuple[int, ...], first: int, expected: list[CollectiveCall], rank: int, found: list[CollectiveCall], of: str
) -> None:
    among = f"the group of {len(group)} ranks from {group[0]} to {group[-1]}"
    for number in range(max(len(expected), len(found))):
        one = expected[number] if number < len(expected) else None
        other = found[number] if number < len(found) else None
        if one and other and one.operation == other.operation in _SIZES_DIFFER:
            continue
        if one and other and (one.operation, one.data_bytes) == (other.operation, other.data_bytes):
            continue
        raise NapkinError(
            f"in {of}, collective {number + 1} in {among} is {_described(one)} on rank {first} and "
            f"{_described(other)} on rank {rank}: let both call the same, or ranks wait for each other without end"
        )


def _described(call: CollectiveCall | None) -> str:
    return "none" if call is None else f"{call.operation} of {format_bytes(call.data_bytes)}"
