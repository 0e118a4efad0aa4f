"""Starting the studio's server, until a signal ends it."""

import asyncio
import logging
import secrets
import socket
from collections.abc import Callable

import uvicorn

from napkin.files import StrPath
from napkin.serving.loopback import address_of, listening_socket, names_of
from napkin.studio.application import application

_BACKLOG = 128


def serve_studio(
    folder: StrPath,
    *,
    port: int,
    on_start: Callable[[str], None],
    allow_actions: bool = False,
) -> None:
    """Serve the pages, with the runs below a folder, on 127.0.0.1 until SIGTERM or SIGINT; port 0 is a free one. With
    `allow_actions` pages may write and start things, otherwise the studio is read-only.

    `on_start` is called with the address, in which the token is, once connections are taken. Raises NapkinError where
    the port cannot be used.
    """
    host = "127.0.0.1"
    token = secrets.token_urlsafe(24)
    listening = listening_socket(host, port, backlog=_BACKLOG)
    address = f"{address_of(listening)}/?token={token}"
    try:
        config = uvicorn.Config(
            application(token=token, hosts=names_of(host), folder=folder, allow_actions=allow_actions),
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        for name in ("uvicorn", "asyncio"):
            # Errors only: neither logger is to report browsers that disconnect.
            logging.getLogger(name).setLevel(logging.ERROR)
        asyncio.run(_Server(config, lambda: on_start(address)).serve([listening]))
    finally:
        listening.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Take connections, and say so."""
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shut down; requests that take longer than a second, such as a plan, are cancelled, which is not an error."""
        logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)
