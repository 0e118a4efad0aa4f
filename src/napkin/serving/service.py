"""The state that all requests of a server share: the model, the engine's thread, limits, the key and the meters; and
connections with deadlines for clients that do not read or do not send.

A request, header and body, has `stalled_seconds` to arrive, however it is cut into pieces. Where there are more
connections than the limit, those make room that have waited longest for a whole request: clients that hold connections
without one keep none from those that have one.
"""

import asyncio
import contextlib
import hmac
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from napkin.errors import NapkinError
from napkin.hardware.host import return_freed_memory
from napkin.inference.engine import Engine
from napkin.inference.loaded_model import LoadedModel
from napkin.inference.paged_cache import bytes_per_token
from napkin.inference.requests import Completion, Progress, Request
from napkin.inference.settings import Sampling
from napkin.serving.limits import (
    FIRST_TOKEN_SECONDS,
    REQUEST_SECONDS,
    TOKEN_SECONDS,
    Counter,
    Histogram,
    Limits,
    number_lines,
)
from napkin.serving.request_body import MOST_LOGPROBS

_TRIM_SECONDS = 60.0
"""Requests of many sizes, in several threads, leave free memory between what is used: it is given back so often."""


class EngineThread:
    """Steps an engine while there is work, and wakes those who wait, all of a step at once.

    Made and used in the event loop. Requests that cannot be computed fail alone; then a plain one tells whether the
    engine still works, and `failure` says why where it does not. Requests are still tried, and one that succeeds ends
    the failure.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failure: str | None = None
        self._probe: Completion | None = None
        self._loop = asyncio.get_running_loop()
        self._watches: dict[Completion, asyncio.Event] = {}
        self._condition = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Completions that are watched: running, waiting, or not yet read to the end."""
        return len(self._watches)

    def submit(self, requests: list[Request], changed: asyncio.Event) -> list[Completion]:
        """Hand requests to the engine, all or none; `changed` is set whenever one of them grew or ended.

        Raises NapkinError for what can never run.
        """
        submitted: list[Completion] = []
        with self._condition:
            try:
                for request in requests:
                    # One after another: those before one that is refused are to be cancelled.
                    submitted.append(self.engine.submit(request))  # noqa: PERF401
            except NapkinError:
                for completion in submitted:
                    self.engine.cancel(completion)
                raise
            finally:
                self._condition.notify()
            self._watches |= dict.fromkeys(submitted, changed)
        return submitted

    def release(self, completions: list[Completion]) -> None:
        """Forget completions, and cancel those that have not ended."""
        with self._condition:
            for completion in completions:
                self._watches.pop(completion, None)
                if completion.finish is None:
                    self.engine.cancel(completion)
            self._condition.notify()

    async def close(self) -> None:
        """End the thread after its step."""
        with self._condition:
            self._closing = True
            self._condition.notify()
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        trimmed = time.monotonic()
        while True:
            with self._condition:
                while not (self._closing or self.engine.has_work):
                    self._condition.wait()
                if self._closing:
                    return
            try:
                stepped = self.engine.step(isolate=True)
            except Exception as error:
                stepped = self.engine.fail_all(error)
            self._judge(stepped)
            with self._condition:
                watches = {watch for completion, _ in stepped if (watch := self._watches.get(completion)) is not None}
            if watches:
                # Once the loop is closed, nothing waits any more.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(lambda all_of=watches: [watch.set() for watch in all_of])
            if time.monotonic() > trimmed + _TRIM_SECONDS:
                return_freed_memory()
                trimmed = time.monotonic()

    def _judge(self, stepped: list[Progress]) -> None:
        """Find out whether the engine works: after a failed request, a plain one shows whether the request or the
        engine is at fault."""
        for completion, _ in stepped:
            is_probe = completion is self._probe
            if is_probe:
                self._probe = None
            if completion.finish != "failed":
                self.failure = self.failure if completion.finish == "cancelled" else None
            elif is_probe:
                self.failure = completion.failure
            elif self._probe is None and self.failure is None:
                self._probe = self.engine.submit(Request([0], 1, Sampling(temperature=0)))


_MOST_LOGPROBS = 2**20
OUTCOMES = ("stop", "length", "cancelled", "timeout", "error", "refused")


class Meters:
    """The meters of a server since it started."""

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

    opened: LoadedModel
    engine: Engine
    limits: Limits
    key: str | None = None
    """What clients must present; None where only this machine can connect."""
    created: int = field(default_factory=lambda: int(time.time()))
    meters: Meters = field(default_factory=Meters)
    draining: bool = False
    n_logprobs: int = 0
    """Log-probabilities that answers in flight may have: each takes some hundred bytes."""
    receiving: int = 0
    """Bytes of large bodies that are being received."""
    open: set[asyncio.Transport] = field(default_factory=set)
    """Connections."""
    waiting: dict[asyncio.Transport, float] = field(default_factory=dict)
    """Connections without a complete request, and since when; the oldest first."""
    hosts: frozenset[str] | None = None
    """Names under which clients may address the server, without a key; None is any."""
    _thread: EngineThread | None = None

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token: no text of n tokens is longer than n times that."""
        return max(map(len, self.opened.tokenizer.vocabulary))

    @cached_property
    def most_logprobs(self) -> int:
        """Log-probabilities that an answer may have: those of one sequence, whatever the model's context."""
        return max(_MOST_LOGPROBS, self.opened.model.config.context_length * (MOST_LOGPROBS + 1))

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers."""
        return bytes_per_token(self.opened.model.config, self.opened.model.dtype, self.engine.kv)

    def start(self) -> None:
        """Start the engine's thread, in the event loop that will use it."""
        self._thread = EngineThread(self.engine)

    @property
    def thread(self) -> EngineThread:
        """The engine's thread, once started."""
        assert self._thread is not None, "start it first"
        return self._thread

    def is_key(self, given: str) -> bool:
        """Compare a client's key with the right one in constant time."""
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
            ("napkin_proposed_tokens_total", "Tokens proposed for passes.", "counter", stats.proposed_tokens),
            ("napkin_tested_tokens_total", "Proposals accepted or rejected.", "counter", stats.tested_tokens),
            ("napkin_accepted_tokens_total", "Proposals accepted.", "counter", stats.accepted_tokens),
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


REQUEST_DUE = "request_due"
"""Key in a request's state of the deadline by which the request must be complete, by the event loop's clock."""
_GRACE_SECONDS = 1.0
"""Seconds in which a late client can still be sent an error."""
_FIRST_SECONDS = 1.0
"""Seconds in which a new connection is not closed, unless there are twice as many as the limit."""


def connection_class(service: Service) -> type[H11Protocol]:
    """uvicorn's protocol for one service, which counts its connections and has its limits."""

    class Connection(H11Protocol):
        """Closed when the client reads nothing for too long, or has sent no whole request in time."""

        _stalled: asyncio.TimerHandle | None = None
        _overdue: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # For this connection only.
            self.app_state = dict(self.app_state)
            service.open.add(transport)
            self._wait_for_request()
            self._make_room()

        def connection_lost(self, exc: Exception | None) -> None:
            service.open.discard(self.transport)
            service.waiting.pop(self.transport, None)
            for timer in (self._stalled, self._overdue):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None and not (self.cycle.more_body or self.cycle.response_complete):
                service.waiting.pop(self.transport, None)
                if self._overdue is not None:
                    self._overdue.cancel()

        def send_400_response(self, msg: str) -> None:
            if self.cycle is not None:
                # From here on, output of the application is discarded.
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            try:
                super().send_400_response(msg)
            except h11.LocalProtocolError:
                # The answer has begun, so no error can be sent.
                self.transport.abort()

        def pause_writing(self) -> None:
            # The client does not read: the answer waits, but no longer than this.
            super().pause_writing()
            self._stalled = self.loop.call_later(service.limits.stalled_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stalled is not None:
                self._stalled.cancel()

        def on_response_complete(self) -> None:
            # First, since the next request may be here already.
            self._wait_for_request()
            super().on_response_complete()

        def _make_room(self) -> None:
            most, now = service.limits.max_connections, self.loop.time()
            while len(service.open) > most:
                # The connections that were accepted just now have not been listened to yet.
                waiting, since = next(iter(service.waiting.items()))
                if waiting is self.transport or (since > now - _FIRST_SECONDS and len(service.open) <= 2 * most):
                    return
                del service.waiting[waiting]
                service.open.discard(waiting)
                waiting.abort()

        def _wait_for_request(self) -> None:
            if self._overdue is not None:
                self._overdue.cancel()
            now = self.loop.time()
            service.waiting.pop(self.transport, None)
            service.waiting[self.transport] = now
            due = now + service.limits.stalled_seconds
            self.app_state[REQUEST_DUE] = due
            self._overdue = self.loop.call_at(due + _GRACE_SECONDS, self.transport.abort)

    return Connection
