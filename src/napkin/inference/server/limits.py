"""Limits of a server. Does not import torch: the command line reads this class for its help."""

import math
from dataclasses import dataclass, fields

from napkin.errors import NapkinError


@dataclass(frozen=True)
class Limits:
    """What clients may use; what exceeds a limit is refused with an error that names it."""

    max_body_bytes: int = 8 * 2**20
    """Bytes of a request; more is answered with status 413."""

    max_tokens_per_request: int | None = None
    """Tokens of prompt and completion, all choices of a request together; None is what the model can take, for each."""

    max_requests: int = 256
    """Sequences in flight, running and waiting; more are answered with status 429 and Retry-After."""

    max_connections: int = 1024
    """Open connections. For one more, that one is closed which has waited longest for a request to be whole; where all
    of them have one, more requests are answered with status 503, but for /health."""

    request_seconds: float = 600.0
    """Seconds after which a request ends, with status 504 or an error in its stream."""

    stalled_seconds: float = 30.0
    """Seconds in which a client has to send a whole request, header and body, and for which it may not read what was
    sent, before its connection is closed."""

    drain_seconds: float = 30.0
    """Seconds that requests have to finish after SIGTERM."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            # NaN fails the comparison.
            if value is not None and not 0 < value < math.inf and not (field.name == "drain_seconds" and value == 0):
                raise NapkinError(f"{field.name} is {value}: use a finite number above 0")
