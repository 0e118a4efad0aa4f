"""A load on a real server: what it counts itself, and what stands in the way."""

import json
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from napkin.cli import main
from napkin.errors import NapkinError
from napkin.inference.service_load import ServiceLoad
from napkin.serving.http_load import Endpoint, measure_http_load, random_prompts

if TYPE_CHECKING:
    from serving.conftest import Serve, Served


@pytest.mark.parametrize(
    "load",
    [ServiceLoad(6, 12, 7, concurrency=3), ServiceLoad(5, 4, 3, concurrency=None, rate=200.0)],
    ids=["closed", "open"],
)
def test_the_server_made_as_many_tokens_as_the_load_asked_for(served: "Served", load: ServiceLoad) -> None:
    names = ("napkin_prompt_tokens_total", "napkin_generated_tokens_total")
    before = [served.metric(name) for name in names]
    done: list[int] = []
    endpoint = Endpoint.of(f"http://127.0.0.1:{served.port}/v1")
    found = measure_http_load(endpoint, load, random_prompts(load, 200), progress=done.append)
    after = [served.metric(name) for name in names]
    assert after[0] - before[0] == load.requests * load.input_tokens
    assert after[1] - before[1] == load.requests * load.output_tokens
    assert [each.output_tokens for each in found.served] == [load.output_tokens] * load.requests
    assert all(0 < each.time_to_first_token <= found.seconds for each in found.served)
    assert done[-1] == load.requests
    assert found.tokens_per_second == pytest.approx(load.requests * load.output_tokens / found.seconds)


def test_the_command_prints_percentiles_and_json(served: "Served", capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench-serve", f"http://127.0.0.1:{served.port}", "--requests", "4", "--concurrency", "2"]
    asked += ["--input-tokens", "8", "--output-tokens", "4"]
    assert main(asked) == 0
    printed = capsys.readouterr().out
    assert "time to first token, 95%" in printed
    assert "4 requests, 16 tokens in" in printed
    assert main([*asked, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["planned"] is None
    assert told["measured"]["requests"] == 4
    assert told["measured"]["time_per_output_token"]["50"] > 0


def test_a_key_is_sent_and_its_lack_is_told(
    start_server: "Serve", tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    served = start_server(key="open sesame".replace(" ", "-"))
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text("open-sesame\n")
    asked = ["bench-serve", f"http://127.0.0.1:{served.port}", "--requests", "1", "--concurrency", "1"]
    assert main([*asked, "--api-key-file", str(file)]) == 0
    assert main(asked) == 2
    assert "answers 401" in capsys.readouterr().err


def answering(with_what: bytes) -> int:
    """The port of a server that answers one request with these bytes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(with_what)
            connection.shutdown(socket.SHUT_WR)
            # Closed with a part of the request unread, the connection would be reset and the answer lost.
            while connection.recv(65536):
                pass
        listening.close()

    threading.Thread(target=answer, daemon=True).start()
    return listening.getsockname()[1]


OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
BROKEN_OFF = OK + b'data: {"error": {"message": "a\\u001b"}}'


@pytest.mark.parametrize(
    ("address", "says"),
    [
        (lambda: "ftp://127.0.0.1", "is not an address of a server: use one as http://127.0.0.1:8000"),
        (lambda: "http://127.0.0.1:99999", "is not an address: use one as"),
        (lambda: "http://127.0.0.1:9", "does not answer .* start it with `napkin serve`"),
        (lambda: f"http://127.0.0.1:{answering(b'nonsense')}", "does not answer"),
        (lambda: f"http://127.0.0.1:{answering(OK)}", "sent no tokens and no usage"),
        (lambda: f"http://127.0.0.1:{answering(OK + b'data: [1')}", "an event that is not a JSON object"),
        (lambda: f"http://127.0.0.1:{answering(BROKEN_OFF)}", "the server broke off: a $"),
    ],
)
def test_what_is_no_such_server_is_told_in_a_line(address: Callable[[], str], says: str) -> None:
    load = ServiceLoad(1, 2, 2, concurrency=1)
    with pytest.raises(NapkinError, match=says):
        measure_http_load(Endpoint.of(address()), load, [[1, 2]])
