"""The messages between the process that asks for a rehearsal and the child that runs the script."""

from dataclasses import dataclass

import msgspec

from napkin.accounting.ledger import Ledger

EXITS = "it exits with"
"""Begins the obstacle of a script that ends itself."""


@dataclass(frozen=True)
class Highest:
    """The most memory that a script took as far as it was rehearsed: in a step, an evaluation, or before both."""

    bytes: int
    reserved_bytes: int
    place: str


class Request(msgspec.Struct):
    """The rehearsal that the parent asks for."""

    script: str
    arguments: list[str]
    on: str
    setup: str | None
    folder: str
    answer: str
    """The file that the answer is written to."""
    seconds: float
    """Time limit; if a step is counted by then, the answer has what is known so far."""
    all_on_device: bool = False
    torch: str | None = None
    """The release of torch that the script will run under, if not the one here."""


class Answer(msgspec.Struct):
    """The outcome that the child process writes."""

    ledger: Ledger | None = None
    highest: Highest | None = None
    obstacle: dict[str, str] | None = None
    updates: int = 0
    on_host: bool = False
    notes: list[str] = []
    absent: list[str] = []
    environment: dict[str, str | None] = {}
