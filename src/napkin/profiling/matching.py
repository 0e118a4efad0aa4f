"""Finds the row of the ledger that each call of a profiled step is: both are the same operators in the same order.

They differ in little. Recording a step makes autograd add gradients out of place where it would add them in place,
`reshape` reports its view under another name, and a few operators are seen by one of both alone.
"""

from collections.abc import Sequence

_ALIKE = {"_reshape_alias": "view", "_unsafe_view": "view"}
_SURE = 3
"""So many operators in a row are to agree before the two are taken to be in step again."""
_FARTHEST = 200
"""Operators that are looked ahead."""


def matched_rows(calls: Sequence[str], rows: Sequence[str]) -> list[int | None]:
    """For each call, by operator, the number of its row; None for one that the ledger does not have.

    >>> matched_rows(["mm", "add_", "extra", "mul", "sum", "exp"], ["mm", "add", "mul", "sum", "exp"])
    [0, 1, None, 2, 3, 4]
    >>> matched_rows(["mm", "add", "mul", "sum", "exp"], ["mm", "promote_types", "add", "mul", "sum", "exp"])
    [0, 2, 3, 4, 5]
    """
    left, right = [_plain(name) for name in calls], [_plain(name) for name in rows]
    found: list[int | None] = []
    row = 0
    while len(found) < len(left):
        call = len(found)
        if row < len(right) and left[call] == right[row]:
            found.append(row)
            row += 1
            continue
        skipped_calls, skipped_rows = _back_in_step(left, right, call, row)
        found += [None] * skipped_calls
        row += skipped_rows
    return found


def _plain(name: str) -> str:
    """The operator without the mark of its in-place form."""
    return _ALIKE.get(name, name.rstrip("_") or name)


def _back_in_step(left: Sequence[str], right: Sequence[str], call: int, row: int) -> tuple[int, int]:
    """How many calls and rows to skip, as few as possible, for what follows to agree."""
    places: dict[tuple[str, ...], int] = {}
    for place in range(row, min(row + _FARTHEST, len(right)) + 1):
        places.setdefault(tuple(right[place : place + _SURE]), place)
    best = (1, 0)
    fewest = 2 * _FARTHEST + 1
    for ahead in range(call, min(call + _FARTHEST, len(left)) + 1):
        # Near the ends fewer are left to agree, and at both ends none.
        place = places.get(tuple(left[ahead : ahead + _SURE]))
        if place is not None and ahead - call + place - row < fewest:
            best = ahead - call, place - row
            fewest = sum(best)
    return best
