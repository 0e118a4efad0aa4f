"""Votes between two answers to one prompt, a line of JSON each, and the models' ranking by them.

A line is read by `napkin evaluate votes`, which rates models, and by `napkin tune preference`, which trains on the
answers to conversations of which one was preferred:

| field | contents |
|---|---|
| `a`, `b`, `winner`, `item` | the models, the one that was shown first as `a`; a, b or tie; the prompt's SHA-256 |
| `verdict` | a, b, tie or both bad, of which the last is a tie for ratings |
| `prompt`, `chosen`, `rejected` | messages and two answers, where one answer to a conversation was preferred |
| `asked`, `answers` | the messages or the text, and both answers, otherwise |
| `models`, `settings`, `finishes`, `time` | each model's step, number format and checksum of weights; how tokens were
drawn, with the seed; how each answer ended; UTC |
"""

import json
import os
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from napkin.errors import NapkinError, first_line
from napkin.evaluation.pairwise import ratings_of, read_votes

VOTES_FILE = "votes.jsonl"
Verdict = Literal["a", "b", "tie", "both bad"]


@dataclass(frozen=True)
class Ballot:
    """Two answers to one prompt, and which is better."""

    asked: list[dict[str, str]] | str
    """The messages of a conversation, or a text that is continued."""
    models: tuple[str, str]
    answers: tuple[str, str]
    finishes: tuple[str, str]
    verdict: Verdict
    settings: dict[str, Any]
    about: tuple[dict[str, Any], dict[str, Any]]
    """The identity of each model."""

    def line(self) -> dict[str, Any]:
        """The vote as its file has it."""
        winner = self.verdict if self.verdict in ("a", "b") else "tie"
        item = sha256(json.dumps(self.asked).encode()).hexdigest()
        line: dict[str, Any] = {"a": self.models[0], "b": self.models[1], "winner": winner, "item": item}
        line["verdict"] = self.verdict
        if winner == "tie" or isinstance(self.asked, str):
            line |= {"asked": self.asked, "answers": self.answers}
        else:
            better = "ab".index(winner)
            line |= {"prompt": self.asked, "chosen": self.answers[better], "rejected": self.answers[1 - better]}
        provenance = {"models": self.about, "settings": self.settings, "finishes": self.finishes}
        return line | provenance | {"time": datetime.now(UTC).isoformat(timespec="seconds")}


class Votes:
    """The votes of a folder, in votes.jsonl."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / VOTES_FILE
        self._lock = threading.Lock()

    def add(self, ballot: Ballot) -> None:
        """Append a vote, synced to disk when this returns. Raises NapkinError where it cannot be written."""
        data = json.dumps(ballot.line()).encode() + b"\n"
        try:
            with self._lock, open(self.path, "ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    # A line that a crash cut off spoils no other.
                    data = data if file.read(1) == b"\n" else b"\n" + data
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise NapkinError(f"the vote is not kept: '{self.path}' cannot be written ({error.strerror})") from None

    def ranking(self) -> dict[str, Any]:
        """The number of votes, and the models by their ratings with intervals of 95%, or why there are none."""
        if not self.path.exists():
            return {"file": str(self.path), "votes": 0, "models": [], "because": None}
        votes, models, because = [], [], None
        try:
            votes = read_votes(self.path)
            models = ratings_of(votes).models
        except NapkinError as error:
            because = first_line(error)
        return {"file": str(self.path), "votes": len(votes), "models": models, "because": because}
