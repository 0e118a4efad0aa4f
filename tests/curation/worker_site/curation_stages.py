"""Stages that only tests have."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from napkin.curation.stage import Dropped, Record


@dataclass(frozen=True)
class FirstOfEachText:
    """Drops all but the first of records with the same text: a stage that has to see all."""

    name: ClassVar[str] = "first"

    def summarize(self, records: Iterable[Record], summary: Path) -> None:
        """A line of identity and text per record."""
        summary.write_text("".join(f"{record.identity}\t{record.text!r}\n" for record in records))

    def decide(self, summaries: Sequence[Path], decisions: Sequence[Path], scratch: Path, memory: int) -> None:
        """A line per copy: its identity, and that of the first."""
        seen: dict[str, str] = {}
        for summary, decision in zip(summaries, decisions, strict=True):
            copies = []
            for line in summary.read_text().splitlines():
                identity, text = line.split("\t")
                if seen.setdefault(text, identity) != identity:
                    copies.append(f"{identity}\t{seen[text]}\n")
            decision.write_text("".join(copies))

    def apply(self, records: Iterable[Record], decisions: Path) -> Iterator[Record | Dropped]:
        """Drop the copies."""
        copies = dict(line.split("\t") for line in decisions.read_text().splitlines())
        for record in records:
            first = copies.get(record.identity)
            yield record if first is None else Dropped("copy", f"of {first}")


@dataclass(frozen=True)
class Fragile:
    """Ends the process, or raises, on some documents; writes in others."""

    name: ClassVar[str] = "fragile"
    version: ClassVar[int] = 2

    def apply(self, record: Record) -> Record | Dropped:
        """What the text says."""
        if "abort" in record.text:
            os._exit(7)
        if "raise" in record.text:
            raise ZeroDivisionError("by nothing")
        if "surrogate" in record.text:
            record.text += "\ud800"
        return record
