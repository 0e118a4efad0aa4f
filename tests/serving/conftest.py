"""A real server in a process of its own, on a free port, and a plain client."""

import http.client
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from oracles.served_model import serving_program
from reliability.harness import Command, Napkin

PATIENCE = 60.0
"""Seconds after which a test gives up on what should happen at once."""


@dataclass
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def error(self) -> str:
        """The message of an error, which has the shape that clients know."""
        assert self.headers["content-type"] == "application/json"
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        message = self.json["error"]["message"]
        assert message
        assert "\n" not in message
        return message

    @property
    def events(self) -> list[Any]:
        """The objects of a stream, which is whole."""
        *events, done, rest = self.content.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass
class Served:
    """A server that runs."""

    command: Command
    port: int
    headers: dict[str, str] = field(default_factory=dict)

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, body, {**self.headers, **headers})
            response = connection.getresponse()
            names = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, names, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, None, **headers)

    def post(self, path: str, body: bytes | None = None, **fields: Any) -> Answer:
        content = json.dumps(fields).encode() if body is None else body
        return self.request("POST", path, content, **{"Content-Type": "application/json"})

    def complete(self, prompt: Any, **fields: Any) -> Any:
        """The choices of a completion."""
        answer = self.post("/v1/completions", model="tiny", prompt=prompt, **fields)
        assert answer.status == 200, answer.content
        return answer.json["choices"]

    def send(self, path: str, *, receive_buffer: int | None = None, **fields: Any) -> socket.socket:
        """A connection on which a request was sent and nothing was read yet."""
        content = json.dumps(fields).encode()
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(PATIENCE)
        connection.connect(("127.0.0.1", self.port))
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection

    def metric(self, name: str) -> float:
        """A metric by its name with labels."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.get("/metrics").content.decode(), re.MULTILINE)
        assert found, name
        return float(found[1])

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            assert time.monotonic() < end, self.get("/metrics").content.decode()
            time.sleep(0.02)

    def wait_until_idle(self) -> None:
        self.wait_until(lambda: self.metric("napkin_sequences_running") + self.metric("napkin_sequences_waiting") == 0)


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def start_server(server: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """Start a server with a key and limits of its own; it is ended with the session."""
    started: list[Served] = []

    def start(**how: Any) -> Served:
        folder = tmp_path_factory.mktemp("served")
        command = Napkin(folder, server).start(program=serving_program(**how), environment=environment)
        end = time.monotonic() + PATIENCE
        while not (address := command.out.read_text() if command.out.exists() else "").endswith("\n"):
            assert time.monotonic() < end, command.err.read_text()
            time.sleep(0.02)
        started.append(Served(command, int(address.strip().rpartition(":")[2])))
        return started[-1]

    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    yield start
    for each in started:
        if each.command.status is None:
            each.command.send(signal.SIGTERM)
            each.command.send(signal.SIGTERM)
            each.command.wait()


@pytest.fixture(scope="session")
def served(start_server: Serve) -> Served:
    """One server for the tests that leave it as it was."""
    return start_server()
