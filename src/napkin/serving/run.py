"""Starting the server, and ending it: after SIGTERM or SIGINT what runs is finished, what is new is refused."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import uvicorn

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.loaded_model import LoadedModel
from napkin.inference.prefix_store import PrefixStore, prefix_message
from napkin.serving.application import application
from napkin.serving.limits import Limits
from napkin.serving.loopback import address_of, is_loopback, listening_socket, names_of
from napkin.serving.service import Service, connection_class

MOST_HEADER_BYTES = 2**16
_BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""
_MOST_ACCEPTED = 64
_OTHER_FILES = 128
"""Open files that are not connections."""


def serve(
    opened: LoadedModel,
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    key: str | None = None,
    limits: Limits | None = None,
    prefixes: PrefixStore | None = None,
    on_start: Callable[[str], None] = lambda address: None,
    on_message: Callable[[str], None] = lambda message: None,
) -> None:
    """Serve a model until SIGTERM or SIGINT; a second signal does not wait for requests to finish.

    With `prefixes` the engine begins with those of the last server of the same model, and leaves its own at the end.

    `on_start` is called with the address once connections are taken; port 0 is a free one. Raises NapkinError where
    the address cannot be used, and where other machines could connect without a key.
    """
    if key is None and not is_loopback(host):
        raise NapkinError(f"host {host} can be reached from elsewhere: a key is needed, or use 127.0.0.1")
    service = Service(opened, engine, _within_file_limit(limits or Limits()), key)
    if key is None:
        service.hosts = names_of(host)
    listening = listening_socket(host, port, backlog=_BACKLOG)
    if prefixes is not None:
        on_message(prefix_message(prefixes.restore(engine), engine, "restored"))
    address = address_of(listening)
    try:
        config = uvicorn.Config(
            application(service),
            http=connection_class(service),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            # Connections that are accepted at a time, and read before more of a flood push them out.
            backlog=max(1, min(_MOST_ACCEPTED, service.limits.max_connections // 8)),
        )
        for name in ("uvicorn", "asyncio"):
            # Errors only: neither logger is to report clients that disconnect.
            logging.getLogger(name).setLevel(logging.ERROR)
        asyncio.run(_Server(config, service, lambda: on_start(address)).serve([listening]))
        if prefixes is not None:
            on_message(prefix_message(prefixes.keep(engine), engine, "kept"))
    finally:
        listening.close()


class _Server(uvicorn.Server):
    """uvicorn's server, which finishes requests before it closes anything."""

    def __init__(self, config: uvicorn.Config, service: Service, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._service, self._on_start = service, on_start
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections, and say so."""
        await super().startup(sockets)
        if self.started:
            for each in sockets or ():
                each.listen(_BACKLOG)
            self._loop = asyncio.get_running_loop()
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for a signal, between two instructions of the main thread."""
        if self._service.draining or not self.started:
            self.should_exit = self.force_exit = True
            # A request that is cut off would otherwise be logged with a traceback.
            logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
            return
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._start_draining)

    def _start_draining(self) -> None:
        self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        end = self._loop.time() + self._service.limits.drain_seconds
        while self._service.thread.in_flight and not self.should_exit and self._loop.time() < end:
            await asyncio.sleep(0.02)
        # Answers that are complete have a moment to be read; what still runs is cancelled with its connection.
        self.config.timeout_graceful_shutdown = 1
        self.should_exit = True


def _within_file_limit(limits: Limits) -> Limits:
    """Limits with no more connections than the system allows open files, of which each connection takes one, and for a
    moment two. The limit of the system is raised as far as allowed."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        if most != resource.RLIM_INFINITY:
            return replace(limits, max_connections=max(1, min(limits.max_connections, (most - _OTHER_FILES) // 2)))
    return limits
