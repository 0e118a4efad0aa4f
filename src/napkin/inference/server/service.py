"""What all requests of a server share: the model, the engine's thread, limits, the key and the meters."""

import asyncio
import hmac
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from napkin.inference.engine import Engine
from napkin.inference.kv_blocks import bytes_per_token
from napkin.inference.open_model import OpenModel
from napkin.inference.request import Completion
from napkin.inference.server.engine_thread import EngineThread
from napkin.inference.server.limits import Limits
from napkin.inference.server.metrics import (
    FIRST_TOKEN_SECONDS,
    REQUEST_SECONDS,
    TOKEN_SECONDS,
    Counter,
    Histogram,
    number_lines,
)
from napkin.inference.server.request_body import MOST_LOGPROBS

_MOST_TOLD = 2**20
OUTCOMES = ("stop", "length", "cancelled", "timeout", "error", "refused")


class Meters:
    """What a server measured since it started."""

    def __init__(self) -> None:
        self.requests = Counter(
            "napkin_sequences_total", "Sequences by how they ended; refused counts requests.", "outcome", OUTCOMES
        )
        self.first_token = Histogram(
            "napkin_time_to_first_token_seconds", "From submission to the first token.", FIRST_TOKEN_SECONDS
        )
        self.per_token = Histogram(
            "napkin_time_per_output_token_seconds", "Mean time per token after the first, of a sequence.", TOKEN_SECONDS
        )
        self.duration = Histogram("napkin_request_seconds", "From submission to the end.", REQUEST_SECONDS)

    def ended(self, completion: Completion, outcome: str) -> None:
        """Count a sequence that has ended, or was ended just now."""
        self.requests.add(outcome)
        now = time.perf_counter()
        self.duration.observe(now - completion.submitted_at)
        first, per_token = token_seconds(completion, now)
        if first is not None:
            self.first_token.observe(first)
        if per_token is not None:
            self.per_token.observe(per_token)


def token_seconds(completion: Completion, now: float) -> tuple[float | None, float | None]:
    """Seconds to the first token, and per token after it until the end or now; None where there is none."""
    first, end, n_tokens = completion.first_token_at, completion.finished_at or now, len(completion.draws)
    if first is None:
        return None, None
    return first - completion.submitted_at, None if n_tokens < 2 else (end - first) / (n_tokens - 1)


@dataclass
class Service:
    """One model being served."""

    opened: OpenModel
    engine: Engine
    limits: Limits
    key: str | None = None
    """What clients must present; None where only this machine can connect."""
    created: int = field(default_factory=lambda: int(time.time()))
    meters: Meters = field(default_factory=Meters)
    draining: bool = False
    n_told: int = 0
    """Log-probabilities that answers in flight may have: each takes some hundred bytes."""
    receiving: int = 0
    """Bytes of large bodies that are being received."""
    open: set[asyncio.Transport] = field(default_factory=set)
    """Connections."""
    waiting: dict[asyncio.Transport, float] = field(default_factory=dict)
    """Connections of which no whole request has come, and since when; those that have waited longest first."""
    hosts: frozenset[str] | None = None
    """Names under which clients may address the server, without a key; None is any."""
    _thread: EngineThread | None = None

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: no text of n tokens is longer than n times that."""
        return max(map(len, self.opened.tokenizer.vocabulary))

    @cached_property
    def most_told(self) -> int:
        """Log-probabilities that an answer may have: those of one sequence, whatever the model's context."""
        return max(_MOST_TOLD, self.opened.model.config.context_length * (MOST_LOGPROBS + 1))

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return bytes_per_token(self.opened.model.config, self.opened.model.head_weight.dtype, self.engine.kv)

    def start(self) -> None:
        """Start the engine's thread, in the event loop that will use it."""
        self._thread = EngineThread(self.engine)

    @property
    def thread(self) -> EngineThread:
        """The engine's thread, once started."""
        assert self._thread is not None, "start it first"
        return self._thread

    def is_key(self, given: str) -> bool:
        """Whether a client's key is the right one, in a time that does not tell how much of it is."""
        return self.key is None or hmac.compare_digest(given.encode(errors="replace"), self.key.encode())

    def metrics_text(self) -> str:
        """All meters, for Prometheus."""
        return "".join(f"{line}\n" for line in self._metrics_lines())

    def _metrics_lines(self) -> Iterator[str]:
        meters, stats = self.meters, self.engine.stats()
        for meter in (meters.requests, meters.first_token, meters.per_token, meters.duration):
            yield from meter.lines()
        for name, about, kind, value in (
            ("napkin_prompt_tokens_total", "Tokens of prompts.", "counter", stats.prompt_tokens),
            ("napkin_generated_tokens_total", "Tokens drawn.", "counter", stats.generated_tokens),
            ("napkin_cached_tokens_total", "Tokens of prompts found in shared blocks.", "counter", stats.cached_tokens),
            ("napkin_preemptions_total", "Sequences that gave up their blocks.", "counter", stats.preempted),
            ("napkin_engine_steps_total", "Steps of the engine.", "counter", stats.steps),
            ("napkin_engine_seconds_total", "Seconds within steps.", "counter", stats.seconds),
            ("napkin_sequences_running", "Sequences in the running batch.", "gauge", stats.running),
            ("napkin_sequences_waiting", "Sequences that wait for room.", "gauge", stats.waiting),
            ("napkin_kv_blocks_free", "Blocks of the KV cache that are free.", "gauge", stats.blocks_free),
            ("napkin_kv_blocks_total", "Blocks of the KV cache.", "gauge", stats.blocks_total),
            ("napkin_kv_cache_bytes", "Bytes of the KV cache.", "gauge", stats.cache_bytes),
            ("napkin_connections", "Open connections.", "gauge", len(self.open)),
        ):
            yield from number_lines(name, about, kind, value)
