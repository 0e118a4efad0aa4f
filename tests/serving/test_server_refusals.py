"""What a server refuses, and that nothing a client does ends it or makes it grow."""

import http.client
import json
import random
import select
import signal
import socket
import time
from typing import Any

import pytest

from serving.conftest import Serve, Served

LONG: dict[str, Any] = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True}

MALFORMED: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "no JSON": (b"{", "not JSON"),
    "empty": (b"", "not JSON"),
    "a list": (b"[]", "not a JSON object"),
    "not UTF-8": (b'{"prompt": "\xff"}', "not JSON"),
    "half a surrogate": (b'{"prompt": "\\ud800"}', "not JSON"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "not JSON"),
    "infinity": (b'{"prompt": "a", "temperature": 1e999}', "not JSON"),
    "a huge number": (b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", ""),
    "nesting": (b'{"prompt": ' + b"[" * 100_000, "nested"),
    "negative temperature": ({"temperature": -1}, "temperature is -1"),
    "top_p": ({"top_p": 0}, "top_p is 0"),
    "text for a number": ({"temperature": "hot"}, "temperature"),
    "number for a text": ({"prompt": 5}, "prompt"),
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens is -1"),
    "huge max_tokens": ({"max_tokens": 10**30}, "max_tokens"),
    "too many tokens": ({"max_tokens": 5000}, "context"),
    "long prompt": ({"prompt": [65] * 3000}, "context"),
    "very long prompt": ({"prompt": "a" * 200_000}, "cannot fit"),
    "empty ids": ({"prompt": [[]]}, "no token"),
    "no prompt": ({"prompt": None}, "prompt"),
    "empty list": ({"prompt": []}, "empty list"),
    "mixed": ({"prompt": [1, "a"]}, "mixes"),
    "unknown id": ({"prompt": [257]}, "token id 257"),
    "negative id": ({"prompt": [-1]}, "token id -1"),
    "misspelt": ({"temprature": 1}, "did you mean temperature"),
    "n": ({"n": 0}, "n is 0"),
    "too many sequences": ({"prompt": ["a"] * 50, "n": 100}, "5000 sequences"),
    "bias of an unknown token": ({"logit_bias": {"257": 1}}, "token '257'"),
    "bias of a word": ({"logit_bias": {"cat": 1}}, "token 'cat'"),
    "a huge bias": ({"logit_bias": {"5": 1e39}}, "logit_bias adds 1e+39"),
    "a bias out of range": ({"logit_bias": {"5": -100.5}}, "-100 to 100"),
    "a tiny penalty": ({"repetition_penalty": 1e-39}, "repetition_penalty is 1e-39"),
    "a huge penalty": ({"repetition_penalty": 1e39}, "repetition_penalty is 1e+39"),
    "a huge top_k": ({"top_k": 10**300}, "top_k is 1000"),
    "negative top_k": ({"top_k": -2}, "top_k is -2"),
    "min_p": ({"min_p": 1.5}, "min_p is 1.5"),
    "a huge seed": ({"seed": 2**70}, "seed"),
    "a huge n": ({"n": 10**300}, "n is 1000"),
    "a long stop text": ({"stop": ["a", "b" * 1001]}, "1001 characters"),
    "an unknown stop id": ({"stop_token_ids": [10**30]}, "stop_token_ids"),
    "negative stop id": ({"stop_token_ids": [-1]}, "stop_token_ids"),
    "many stop ids": ({"stop_token_ids": [1] * 2000}, "stop_token_ids has 2000"),
    "stop": ({"stop": ""}, "stop"),
    "stops": ({"stop": ["a"] * 100}, "stop has 100"),
    "seed": ({"seed": -1}, "seed"),
    "logprobs": ({"logprobs": 1000}, "logprobs is 1000"),
    "penalty": ({"presence_penalty": 1}, "not supported"),
    "best_of": ({"best_of": 3}, "not supported"),
    "another model": ({"model": "gpt-4"}, "there is no model 'gpt-4'"),
    "stream_options": ({"stream_options": {"include_usage": True}}, "needs stream"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_request_gets_one_clear_line(served: Served, case: str) -> None:
    body, said = MALFORMED[case]
    content = body if isinstance(body, bytes) else json.dumps({"prompt": "a", **body}).encode()
    answer = served.post("/v1/completions", content)
    assert answer.status == (404 if case == "another model" else 400)
    assert said in answer.error


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"messages": []}, "empty"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]}, "reads text only"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, "missing required field"),
        ({"messages": [{"role": "user", "content": "a"}], "top_logprobs": 3}, "needs logprobs"),
        ({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_object"}}, "use text"),
    ],
)
def test_a_malformed_conversation_too(served: Served, body: dict[str, Any], said: str) -> None:
    answer = served.post("/v1/chat/completions", **body)
    assert answer.status == 400
    assert said in answer.error


def test_other_paths_methods_and_types_are_refused(served: Served) -> None:
    assert served.get("/v2").status == 404
    assert served.get("/v1/completions").status == 405
    assert served.get("/v1/completions").error
    answer = served.request("POST", "/v1/completions", b"{}", **{"Content-Type": "text/plain"})
    assert answer.status == 415
    assert "Content-Type" in answer.error
    answer = served.get("/v1/models", Host="attacker.example")
    assert answer.status == 421


def test_a_key_is_asked_for(start_server: Serve) -> None:
    served = start_server(key="open-sesame")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic open-sesame"}):
        for path in ("/v1/models", "/metrics"):
            answer = served.get(path, **headers)
            assert answer.status == 401
            assert answer.json["error"]["code"] == "invalid_api_key"
    assert served.get("/health").status == 200
    served.headers["Authorization"] = "Bearer open-sesame"
    assert served.get("/v1/models", Host="name.example").status == 200
    assert served.complete("a", max_tokens=2, ignore_eos=True)


def test_limits_are_named(start_server: Serve) -> None:
    served = start_server(max_body_bytes=1000, max_requests=2, max_tokens_per_request=1000)
    answer = served.post("/v1/completions", prompt="a" * 2000)
    assert answer.status == 413
    assert "1000 bytes" in answer.error
    answer = served.post("/v1/completions", prompt="a", max_tokens=1500)
    assert answer.status == 400
    assert "at most 1000" in answer.error
    running = [served.send("/v1/completions", **LONG | {"max_tokens": 900, "stream": True}) for _ in range(2)]
    served.wait_until(lambda: served.metric("napkin_sequences_running") == 2)
    answer = served.post("/v1/completions", prompt="a")
    assert answer.status == 429
    assert answer.headers["retry-after"] == "1"
    assert "2 sequences are in flight" in answer.error
    for connection in running:
        connection.close()
    served.wait_until_idle()
    assert served.complete("a", max_tokens=2)


def test_a_request_has_its_time(start_server: Serve) -> None:
    served = start_server(request_seconds=0.05)
    answer = served.post("/v1/completions", **LONG)
    assert answer.status == 504
    assert "longer than 0.05 s" in answer.error
    answer = served.post("/v1/completions", **LONG, stream=True)
    *_, last, end = answer.content.decode().split("\n\n")
    assert end == ""
    assert "longer than" in json.loads(last.removeprefix("data: "))["error"]["message"]
    served.wait_until_idle()
    assert served.metric('napkin_sequences_total{outcome="timeout"}') == 2


def test_a_cut_connection_ends_its_requests(served: Served) -> None:
    before = served.metric('napkin_sequences_total{outcome="cancelled"}')
    generated = served.metric("napkin_generated_tokens_total")
    for stream in (False, True):
        connection = served.send("/v1/completions", **LONG, n=3, stream=stream)
        served.wait_until(lambda: served.metric("napkin_sequences_running") == 3)
        if stream:
            assert connection.recv(10)
        connection.close()
        served.wait_until_idle()
    assert served.metric('napkin_sequences_total{outcome="cancelled"}') == before + 6
    assert served.metric("napkin_generated_tokens_total") < generated + 6 * LONG["max_tokens"]
    assert served.metric("napkin_kv_blocks_free") == served.metric("napkin_kv_blocks_total")


def test_cuts_and_nonsense_at_any_byte_leave_the_server_as_it_was(served: Served) -> None:
    draw = random.Random(0)
    body = json.dumps({"prompt": "abc", "max_tokens": 50, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
    for _ in range(60):
        sent = bytearray(whole[: draw.randrange(len(whole) + 1)])
        for _ in range(draw.choice([0, 0, 1, 5])):
            if sent:
                sent[draw.randrange(len(sent))] = draw.randrange(256)
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(sent)
            if draw.random() < 0.3:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    served.wait_until_idle()
    served.wait_until(lambda: served.metric("napkin_connections") == 1)
    assert served.complete("abc", max_tokens=2)


def test_clients_that_do_not_read_or_do_not_send_are_cut_off(start_server: Serve) -> None:
    served = start_server(stalled_seconds=0.3)
    unread = served.send("/v1/completions", receive_buffer=4096, **LONG, logprobs=100, stream=True)
    # The answer has some ten megabytes, of which the system's buffers take a few.
    silent = socket.create_connection(("127.0.0.1", served.port))
    unfinished = socket.create_connection(("127.0.0.1", served.port))
    unfinished.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\n")
    unfinished.sendall(b"Content-Length: 100\r\n\r\n{")
    for connection in (silent, unfinished):
        connection.settimeout(60)
    assert silent.recv(1) == b""
    assert b"408" in unfinished.recv(100)
    served.wait_until(lambda: served.metric('napkin_sequences_total{outcome="cancelled"}') == 1)
    served.wait_until(lambda: served.metric("napkin_connections") == 1)
    for connection in (unread, silent, unfinished):
        connection.close()


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def trickled(served: Served, sent: bytes, trickle: bytes) -> bytes:
    """What comes back, and the end of the connection, where the last bytes come one by one."""
    answer = b""
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(sent)
        connection.settimeout(0.02)
        for byte in trickle:
            try:
                connection.sendall(bytes([byte]))
                piece = connection.recv(1000)
            except TimeoutError:
                continue
            except OSError:
                return answer
            answer += piece
            if not piece:
                return answer
    pytest.fail(f"all of it was waited for: {answer[:100]}")


def test_a_request_has_one_deadline_however_it_is_cut_into_pieces(start_server: Serve) -> None:
    served = start_server(stalled_seconds=0.3)
    length = b"Content-Length: 1000\r\n\r\n"
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    assert trickled(served, b"POST /v1/completions HTTP/1.1\r\nX: ", b"a" * 1000) == b""
    assert trickled(served, HEAD + length, b" " * 1000).startswith(b"HTTP/1.1 408")
    assert trickled(served, HEAD + chunked, b"1\r\n \r\n" * 200).startswith(b"HTTP/1.1 408")
    # An answer that does not wait for the body is no way around.
    get = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert trickled(served, get + length, b" " * 1000).startswith(b"HTTP/1.1 200")
    served.wait_until(lambda: served.metric("napkin_connections") == 1)


@pytest.mark.parametrize("n", [60, pytest.param(10_000, marks=pytest.mark.torture)])
def test_connections_without_a_whole_request_make_room_for_those_with_one(start_server: Serve, n: int) -> None:
    served = start_server(max_connections=20, stalled_seconds=60)
    others: list[socket.socket] = []
    try:
        for number in range(n):
            # One address has too few ports for ten thousand that are open or closing.
            source = (f"127.0.0.{2 + number % 9}", 0)
            others += [socket.create_connection(("127.0.0.1", served.port), source_address=source)]
            others[-1].sendall(HEAD + b"Content-Length: 10\r\n\r\n{"[: number % 30])
            if number % (n // 20) == 0:
                assert served.get("/health").status == 200
                assert served.get("/v1/models").status == 200
        assert served.metric("napkin_connections") <= 40
    finally:
        for each in others:
            each.close()
    served.wait_until(lambda: served.metric("napkin_connections") == 1)


def test_connections_beyond_the_limit_are_refused_politely_where_all_have_a_request(start_server: Serve) -> None:
    served = start_server(max_connections=3)
    running = [served.send("/v1/completions", **LONG, stream=True) for _ in range(3)]
    for each in running:
        assert each.recv(10)
    answer = served.get("/v1/models")
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    assert "more than 3 connections" in answer.error
    assert served.get("/health").status == 200
    for each in running:
        each.close()
    served.wait_until(lambda: served.get("/v1/models").status == 200)


def test_bodies_that_are_large_and_not_whole_are_bounded_together(start_server: Serve) -> None:
    served = start_server(max_body_bytes=200_000, stalled_seconds=60)
    part = HEAD + b"Content-Length: 200000\r\n\r\n" + b" " * 199_000
    others = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(24)]
    for each in others:
        each.sendall(part)
        each.settimeout(60)
    # Sixteen of them fit.
    served.wait_until(lambda: len(select.select(others, [], [], 0)[0]) == 8)
    refused = select.select(others, [], [], 0)[0]
    assert all(each.recv(100).startswith(b"HTTP/1.1 503") for each in refused)
    assert served.complete("a", max_tokens=1)
    for each in others:
        each.close()
    served.wait_until(lambda: served.metric("napkin_connections") == 1)
    assert served.post("/v1/completions", b" " * 199_000 + b'{"prompt":"a"}').status == 200


def test_log_probabilities_of_answers_are_bounded_together(start_server: Serve) -> None:
    served = start_server()
    # 101 for each of 256 · 2,000 tokens.
    answer = served.post("/v1/completions", prompt=[[65] * 1999] * 256, max_tokens=1, echo=True, logprobs=100)
    assert answer.status == 400
    assert str(256 * 2000 * 101) in answer.error
    running = [served.send("/v1/completions", **LONG, n=5, logprobs=100) for _ in range(4)]
    served.wait_until(lambda: served.metric("napkin_sequences_running") == 8)
    served.wait_until(lambda: served.metric("napkin_sequences_waiting") == 12)
    answer = served.post("/v1/completions", **LONG, n=2, logprobs=100)
    assert answer.status == 429
    for each in running:
        each.close()
    served.wait_until_idle()
    assert served.complete("a", max_tokens=1, logprobs=100)


@pytest.mark.parametrize(
    ("host", "is_known"),
    [
        *((known, True) for known in ("localhost", "LocalHost:1", "127.0.0.1:80", "[::1]:8000", "[0:0::1]")),
        *((other, False) for other in ("[::1].evil.com", "127.0.0.1:80@evil.com", "localhost@evil.com", "127.0.0.1.")),
        *((other, False) for other in ("localhost.evil.com", "localhost:80:80", "localhost:x", "[::1", "::1", "")),
        *((other, False) for other in ("localhost,evil.com", "evil.com#@localhost", "[127.0.0.1]", "[::1%lo]", "a b")),
    ],
)
def test_a_host_is_known_as_a_whole_or_refused(served: Served, host: str, is_known: bool) -> None:
    answer = served.get("/v1/models", Host=host)
    assert answer.status == (200 if is_known else 421)


@pytest.mark.parametrize(
    "origin",
    ["http://evil.com", "null", "", "http://localhost:1", "http://localhost@evil.com", "file://", "http://localhost/"],
)
def test_an_unknown_origin_is_refused(served: Served, origin: str) -> None:
    for path in ("/v1/models", "/health", "/"):
        assert served.get(path, Host="localhost", Origin=origin).status == 403
    own = served.get("/v1/models", Host="localhost:7", Origin="http://LOCALHOST:7")
    assert own.status == 200


def test_what_is_no_http_is_answered_and_leaves_no_trace_in_the_log(start_server: Serve) -> None:
    served = start_server(stalled_seconds=0.5)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    for sent, status in (
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + bytes(500), 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 421),
        (b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.com\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 200_000, 400),
        (HEAD + b"Content-Length: -1\r\n\r\n", 400),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (HEAD + chunked + b"2\r\n{}\r\nGARBAGE\r\n", 400),
        (HEAD + chunked + b"zz\r\n", 400),
        # Refused before its body is read, of which the rest is no body.
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n" + chunked + b"2\r\n{}\r\nGARBAGE\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + chunked + b"GARBAGE\r\n", 400),
    ):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.settimeout(60)
            connection.sendall(sent)
            assert connection.recv(100).startswith(f"HTTP/1.1 {status} ".encode())
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.settimeout(60)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + chunked + b"2\r\n{}\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        connection.sendall(b"GARBAGE\r\n")
        while connection.recv(1000):
            pass
    for method in ("OPTIONS", "TRACE", "CONNECT", "PATCH", "get", "FOO"):
        assert served.request(method, "/v1/models").status == 405
    served.wait_until(lambda: served.metric("napkin_connections") == 1)
    assert served.command.err.read_text() == ""


def test_sigterm_finishes_what_runs_and_refuses_what_is_new(start_server: Serve) -> None:
    served = start_server()
    waiting = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    waiting.request("GET", "/health")
    assert waiting.getresponse().read()
    running = served.send("/v1/completions", **LONG | {"max_tokens": 600, "stream": True})
    served.wait_until(lambda: served.metric("napkin_sequences_running") == 1)
    served.command.send(signal.SIGTERM)
    deadline = time.monotonic() + 60
    while True:
        answer = served.get("/health")
        if answer.status == 503:
            break
        assert time.monotonic() < deadline
    assert answer.json == {"status": "draining"}
    answer = served.post("/v1/completions", prompt="a")
    assert answer.status == 503
    assert "stopping" in answer.error
    content = b""
    with running:
        while b"[DONE]" not in content and (piece := running.recv(2**16)):
            content += piece
    waiting.close()
    events = [json.loads(line[6:]) for line in content.split(b"\r\n") if line.startswith(b"data: {")]
    assert events
    assert b'"finish_reason":"length"' in content
    assert served.command.wait() == 0
    assert served.command.err.read_text() == ""


def test_requests_that_take_too_long_after_sigterm_are_cut_off(start_server: Serve) -> None:
    served = start_server(drain_seconds=0.05)
    running = served.send("/v1/completions", **LONG, stream=True)
    assert running.recv(10)
    served.command.send(signal.SIGTERM)
    content = b""
    with running:
        while piece := running.recv(2**16):
            content += piece
    assert b"[DONE]" not in content
    assert served.command.wait() == 0
