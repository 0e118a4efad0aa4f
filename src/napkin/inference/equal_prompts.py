"""Prompts of one pass that are equal: the first is computed, and the others get copies of its keys and values."""

from collections.abc import Sequence

from napkin.inference.engine_sequence import EngineSequence


def firsts_of_equals(sequences: Sequence[EngineSequence]) -> list[int]:
    """For each sequence the number of the first that has the same tokens, as many of them computed.

    >>> from napkin.inference.request import Completion, Request
    >>> prompts = [[1, 2], [3], [1, 2]]
    >>> firsts_of_equals([EngineSequence(Completion(Request(each, 1), 0), each) for each in prompts])
    [0, 1, 0]
    """
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault((each.n_computed, *each.tokens), number) for number, each in enumerate(sequences)]


def blocks_to_copy(
    sequences: Sequence[EngineSequence], counts: Sequence[int], firsts: Sequence[int], block_size: int
) -> tuple[list[int], list[int]]:
    """The blocks in which a pass over counts[i] tokens of sequence i has written, and the same of those that are equal
    to their sequences."""
    blocks: list[int] = []
    others: list[int] = []
    for number, (sequence, count, first) in enumerate(zip(sequences, counts, firsts, strict=True)):
        if number != first:
            end = sequence.n_computed + count
            written = slice(sequence.n_computed // block_size, -(-end // block_size))
            blocks += sequences[first].table[written]
            others += sequence.table[written]
    return blocks, others
