"""What a page of a run in training says of itself, so that a reader sees when nobody writes it any more.

A process that is killed cannot say so. The page knows when it was written and how soon the next one is due; a script of
a few lines compares that with the reader's clock, and the Content-Security-Policy lets this script run and no other.
"""

import base64
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from napkin.units import format_seconds

REFRESH_SECONDS = 30
# A machine that is busy with something else is late, and lives.
_LATE, _GRACE_SECONDS = 3, 60.0


class SignOfLife(NamedTuple):
    """What the template needs."""

    written: str
    """UTC, as people read it."""
    written_iso: str
    every: str
    patience: int
    """Seconds without a new page after which the run is taken for dead."""
    script: Markup
    script_hash: str
    """As the policy names it."""


def sign_of_life(every: float, *, now: datetime | None = None) -> SignOfLife:
    """A sign given now, by somebody who means to give the next one in `every` seconds."""
    now = (datetime.now(UTC) if now is None else now).replace(microsecond=0)
    script = Path(__file__).with_name("sign_of_life.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return SignOfLife(
        written=now.strftime("%Y-%m-%d %H:%M:%S UTC"),
        written_iso=now.isoformat(),
        every=f"{every:.0f} s" if every < 120 else format_seconds(every),
        patience=round(_LATE * every + _GRACE_SECONDS),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )
