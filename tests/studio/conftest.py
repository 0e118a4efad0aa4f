"""A studio in a process of its own, on a free port, with a client that is no browser."""

import http.client
import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from oracles.browser import Browser
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


@dataclass
class Studio:
    """A studio that runs."""

    command: Command
    port: int
    token: str

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def ask(
        self,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        with_token: bool = True,
        as_page: bool = True,
    ) -> Answer:
        """Ask once; a body is posted as JSON, bytes as they are. `as_page` is with what a browser says of a request of
        the studio's own page."""
        key = {"authorization": f"Bearer {self.token}"} if with_token else {}
        key |= {"sec-fetch-site": "same-origin"} if as_page else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, content, {**key, **(headers or {})})
        answer = connection.getresponse()
        told = Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
        connection.close()
        return told


@contextmanager
def started(napkin: Napkin, *arguments: str) -> Iterator[Studio]:
    """A studio until the block ends; then it ends without a traceback."""
    command = napkin.start("studio", "--port", "0", *arguments)
    end, found = time.monotonic() + PATIENCE, None
    while found is None:
        assert time.monotonic() < end, command.err.read_text()
        time.sleep(0.02)
        printed = command.out.read_text() if command.out.exists() else ""
        found = re.search(r"http://127\.0\.0\.1:([0-9]+)/\?token=(\S+)", printed)
    yield Studio(command, int(found[1]), found[2])
    command.send(signal.SIGINT)
    assert command.wait() in (0, 130, -signal.SIGINT)
    assert "Traceback" not in command.err.read_text()


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory, server: subprocess.Popen[str]) -> Iterator[Studio]:
    with started(Napkin(tmp_path_factory.mktemp("studio"), server)) as studio:
        yield studio


@pytest.fixture(scope="module")
def opened(studio: Studio, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that the studio has let in, for the tests of a file."""
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.open(studio.address)
        yield browser


@pytest.fixture
def browser(opened: Browser, studio: Studio) -> Iterator[Browser]:
    """That browser, in which a test leaves no error of a script and nothing that the policy refused."""
    yield opened
    assert opened.complaints == []
