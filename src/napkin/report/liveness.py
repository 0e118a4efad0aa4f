"""How the page of a run in training tells its reader that it is no longer updated.

A process that is killed cannot say so. The page knows when it was written and when the next one is due; a script of a
few lines compares that with the reader's clock, and the Content-Security-Policy allows this script and no other.
"""

import base64
import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from markupsafe import Markup

from napkin.units import format_seconds

REFRESH_SECONDS = 30
# A process on a busy machine may be late without having been killed.
_TIMEOUT_FACTOR, _GRACE_SECONDS = 3, 60.0


class Liveness(NamedTuple):
    """What the template needs."""

    written: str
    """UTC, for people."""
    written_iso: str
    every: str
    timeout: int
    """Seconds without a new page after which the process is presumed dead."""
    script: Markup
    script_hash: str
    """As the Content-Security-Policy writes it."""


def liveness(every: float, *, now: datetime | None = None) -> Liveness:
    """The liveness of a page that is written now and will be replaced in `every` seconds."""
    now = (datetime.now(UTC) if now is None else now).replace(microsecond=0)
    script = Path(__file__).with_name("liveness.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Liveness(
        written=now.strftime("%Y-%m-%d %H:%M:%S UTC"),
        written_iso=now.isoformat(),
        every=f"{every:.0f} s" if every < 120 else format_seconds(every),
        timeout=round(_TIMEOUT_FACTOR * every + _GRACE_SECONDS),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )
