"""Crowds of clients that cut, stall, flood and talk nonsense, beside honest ones: nothing dies, and nothing grows."""

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from serving.conftest import Serve, Served
from serving.test_server_refusals import LONG, MALFORMED

HONEST: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
MAX_BODY = 2**20
GROWTH_BYTES = 32 * 2**20
"""Less than a crowd's bodies and unread answers have together, many times over."""


class Crowd:
    """Clients of one server; each kind is a method."""

    def __init__(self, served: Served, expected: str, seed: int) -> None:
        self.served, self.expected, self.draw = served, expected, random.Random(seed)
        self.left_open: list[socket.socket] = []

    def honest(self) -> None:
        (choice,) = self.served.complete(**HONEST)
        assert choice["text"] == self.expected

    def malformed(self) -> None:
        name = self.draw.choice(list(MALFORMED))
        body = MALFORMED[name][0]
        answer = self.served.post(
            "/v1/completions", body if isinstance(body, bytes) else json.dumps({"prompt": "a", **body}).encode()
        )
        assert answer.status in (400, 404), name

    def huge(self) -> None:
        """A prompt that cannot fit; or a body beyond the limit, which the server need not read to its end."""
        size = self.draw.choice([MAX_BODY // 2, 4 * MAX_BODY])
        try:
            answer = self.served.post("/v1/completions", json.dumps({"prompt": "a" * size}).encode())
        except OSError:
            assert size > MAX_BODY
            return
        assert answer.status == (400 if size < MAX_BODY else 413)

    def cut(self) -> None:
        """Leaves in the middle of a stream, sometimes with a reset."""
        connection = self.served.send("/v1/completions", **LONG, n=self.draw.randint(1, 3), stream=True)
        connection.recv(self.draw.choice([1, 100, 10_000]))
        if self.draw.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()

    def partial(self) -> None:
        """Leaves, or stays, before its request is whole."""
        connection = socket.create_connection(("127.0.0.1", self.served.port))
        whole = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        whole += b'Content-Length: 100\r\n\r\n{"prompt": "abc", '
        connection.sendall(whole[: self.draw.randrange(len(whole) + 1)])
        if self.draw.random() < 0.5:
            connection.close()
        else:
            self.left_open.append(connection)

    def unread(self) -> None:
        """Asks for megabytes and reads none of them."""
        self.left_open.append(
            self.served.send("/v1/completions", receive_buffer=4096, **LONG, logprobs=100, stream=True)
        )

    def flood(self) -> None:
        """More connections at once than the server takes, with nothing to say."""
        opened: list[socket.socket] = []
        try:
            opened.extend(socket.create_connection(("127.0.0.1", self.served.port), timeout=60) for _ in range(150))
        finally:
            for each in opened:
                each.close()

    def come(self, n: int) -> None:
        """So many clients, one after another."""
        kinds: list[Callable[[], None]] = [self.malformed, self.huge, self.cut, self.partial]
        for number in range(n):
            # A flood leaves no place for others while it lasts, and clients that do not read keep the engine busy.
            self.draw.choice([*kinds, self.unread] if number % 5 == 0 else [*kinds, self.honest])()


@pytest.mark.torture
def test_crowds_of_hostile_clients_leave_the_server_as_it_was(start_server: Serve) -> None:
    served = start_server(max_body_bytes=MAX_BODY, stalled_seconds=1.0, max_connections=100, max_requests=200)
    process = psutil.Process(served.command.pid)
    (choice,) = served.complete(**HONEST)
    sizes: list[int] = []
    files: list[int] = []
    for phase in range(4):
        crowds = [Crowd(served, choice["text"], seed=10 * phase + number) for number in range(6)]
        failures: list[BaseException] = []

        def visit(crowd: Crowd, failures: list[BaseException] = failures) -> None:
            try:
                crowd.come(40)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=visit, args=(crowd,)) for crowd in crowds]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        crowds[0].flood()
        served.wait_until(lambda: served.get("/health").status == 200)
        served.wait_until_idle()
        served.wait_until(lambda: served.metric("napkin_connections") == 1)
        assert served.metric("napkin_kv_blocks_free") == served.metric("napkin_kv_blocks_total")
        crowds[0].honest()
        for each in (connection for crowd in crowds for connection in crowd.left_open):
            each.close()
        time.sleep(0.2)
        sizes.append(process.memory_info().rss)
        files.append(process.num_fds())
    # The first crowd warms up what allocators and caches keep.
    assert sizes[-1] < sizes[0] + GROWTH_BYTES, sizes
    assert files[-1] <= files[0] + 2, files
    assert served.command.err.read_text() == ""
