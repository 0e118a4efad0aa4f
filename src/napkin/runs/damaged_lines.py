"""metrics.damaged.jsonl: lines of metrics.jsonl that were damaged, kept aside with what was found. Only added to.

    {"line": 17, "after_step": 16, "reason": "its checksum is ...", "content": "{\"step\": 1w, ..."}

`content` has a character per byte of the line (ISO 8859-1), so that the bytes can be restored.
"""

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from napkin.runs.json_file import read_if_present

DAMAGED_FILE = "metrics.damaged.jsonl"


@dataclass(frozen=True)
class DamagedLine:
    """A line of metrics.jsonl that is left out."""

    number: int
    """Counted from 1."""
    after_step: int
    """The step of the last intact line before it."""
    reason: str
    content: bytes

    def text(self) -> str:
        """Its line of metrics.damaged.jsonl."""
        record = {
            "line": self.number,
            "after_step": self.after_step,
            "reason": self.reason,
            "content": self.content.decode("latin-1"),
        }
        return json.dumps(record) + "\n"


def keep_aside(metrics: Path, lines: Iterable[DamagedLine]) -> None:
    """Add lines to the file beside `metrics`, synced to the disk; those that a killed process had added are not
    repeated."""
    path = metrics.with_name(DAMAGED_FILE)
    known = set((read_if_present(path) or b"").splitlines(keepends=True))
    new = [line for line in (each.text().encode() for each in lines) if line not in known]
    if not new:
        return
    # A line that a kill cut off is ended first.
    begin = b"" if not known or (read_if_present(path) or b"").endswith(b"\n") else b"\n"
    with open(path, "ab") as file:
        file.write(begin + b"".join(new))
        file.flush()
        os.fsync(file.fileno())


def count_kept_aside(metrics: Path) -> tuple[int, set[int]]:
    """How many lines are kept aside, and after which steps they stood."""
    steps: set[int] = set()
    lines = [line for line in (read_if_present(metrics.with_name(DAMAGED_FILE)) or b"").splitlines() if line.strip()]
    for line in lines:
        # This file may be damaged too: what it says only explains a gap.
        with contextlib.suppress(ValueError, RecursionError, KeyError):
            step = msgspec.json.decode(line, type=dict[str, Any])["after_step"]
            if isinstance(step, int):
                steps.add(step)
    return len(lines), steps
