"""A few documents of each rule that drops some, and of those that remain: those whose identities hash lowest.

So they are the same in every run and for any number of workers, and a random sample of the documents.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

from napkin.curation.stage import Record

LONGEST_TEXT = 4000
"""Characters kept of a sample; of a longer text, its beginning."""
_MOST_RULES = 1000
"""Most rules per shard that are told apart, of a stage whose rules are not a small set."""


@dataclass(frozen=True, order=True)
class Sample:
    """A document that was dropped, or that remained: then `stage` is -1 and `rule` is empty."""

    stage: int
    """The stage's number in the pipeline, from 0."""
    rule: str
    rank: str
    """The hash by which it was chosen."""
    identity: str
    detail: str
    address: str
    characters: int
    text: str


class Samples:
    """The lowest `most` of each rule."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_rule: dict[tuple[int, str], list[_Reversed]] = {}

    def offer(self, record: Record, stage: int = -1, rule: str = "", detail: str = "") -> None:
        """Keep a document if it is among the lowest."""
        rank = blake2b(record.identity.encode(errors="replace"), digest_size=8).hexdigest()
        if self._is_wanted(stage, rule, rank):
            text = record.text or record.content[:LONGEST_TEXT].decode(errors="replace")
            shown = text[:LONGEST_TEXT].encode(errors="replace").decode()
            characters = len(record.text or record.content)
            self.add(Sample(stage, rule, rank, record.identity, detail, record.address, characters, shown))

    def add(self, sample: Sample) -> None:
        """Keep a sample if it is among the lowest of its rule."""
        if not self._is_wanted(sample.stage, sample.rule, sample.rank):
            return
        of_rule = self._of_rule.setdefault((sample.stage, sample.rule), [])
        heapq.heappush(of_rule, _Reversed(sample))
        if len(of_rule) > self._most:
            heapq.heappop(of_rule)

    def _is_wanted(self, stage: int, rule: str, rank: str) -> bool:
        of_rule = self._of_rule.get((stage, rule))
        if of_rule is None:
            return self._most > 0 and len(self._of_rule) < _MOST_RULES
        return len(of_rule) < self._most or rank < of_rule[0].sample.rank

    def sorted(self) -> Iterable[Sample]:
        """All of them, by stage, rule and hash."""
        return sorted(each.sample for of_rule in self._of_rule.values() for each in of_rule)


@dataclass(frozen=True)
class _Reversed:
    """The highest is the first of a heap."""

    sample: Sample

    def __lt__(self, other: "_Reversed") -> bool:
        return self.sample > other.sample
