"""A connection that has an end: uvicorn's, with deadlines for clients that do not read or do not send.

A request, header and body, has `stalled_seconds` to arrive, however it is cut into pieces. Where there are more
connections than the limit, those make room that have waited longest for a whole request: clients that hold connections
without one keep none from those that have one.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from napkin.inference.server.service import Service

REQUEST_DUE = "request_due"
"""In a request's state: when it has to be whole, by the event loop's clock."""
_GRACE_SECONDS = 1.0
"""In which a client that is late can still be told so."""
_FIRST_SECONDS = 1.0
"""In which a new connection keeps its place, unless there are twice as many as the limit."""


def connection_class(service: Service) -> type[H11Protocol]:
    """uvicorn's protocol for one service, which counts its connections and has its limits."""

    class Connection(H11Protocol):
        """Closed when the client reads nothing for too long, or has sent no whole request in time."""

        _stalled: asyncio.TimerHandle | None = None
        _overdue: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # Of this connection, not of all.
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
                # What the application says from now on goes nowhere.
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            try:
                super().send_400_response(msg)
            except h11.LocalProtocolError:
                # The answer has begun: nothing else can be said.
                self.transport.abort()

        def pause_writing(self) -> None:
            # What was written stays unread: the answer waits, and no longer than this.
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
