"""A connection that does not wait for ever: uvicorn's, with limits for clients that do not read or do not send."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from napkin.inference.server.service import Service


def connection_class(service: Service) -> type[H11Protocol]:
    """uvicorn's protocol for one service, which counts its connections and has its limits."""

    class Connection(H11Protocol):
        """Closed when the client reads nothing for too long, or sends no whole request."""

        _stalled: asyncio.TimerHandle | None = None
        _silent: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            service.connections += 1
            self._wait_for_request()

        def connection_lost(self, exc: Exception | None) -> None:
            service.connections -= 1
            for timer in (self._stalled, self._silent):
                if timer is not None:
                    timer.cancel()
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            # What was written stays unread: the answer waits, and no longer than this.
            super().pause_writing()
            self._stalled = self.loop.call_later(service.limits.stalled_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stalled is not None:
                self._stalled.cancel()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._wait_for_request()

        def _wait_for_request(self) -> None:
            if self._silent is not None:
                self._silent.cancel()
            self._silent = self.loop.call_later(service.limits.stalled_seconds, self._close_silent)

        def _close_silent(self) -> None:
            if self.cycle is None or self.cycle.response_complete:
                self.transport.abort()

    return Connection
