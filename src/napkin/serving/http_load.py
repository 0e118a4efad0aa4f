"""A load of requests on a server with OpenAI's completions interface, and what they see over HTTP.

A thread stands for each client. The time to first token runs from before the request is sent to the first piece of
text; that per output token, over the tokens after it.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from urllib.parse import urlsplit

from napkin.errors import NapkinError
from napkin.inference.service_load import Served, ServiceLoad, ServiceMeasurement

LONGEST_LINE = 2**20
"""The most bytes in a line of an answer; longer lines are not server-sent events of this interface."""
TIMEOUT = 600.0
MOST_CLIENTS = 1000


@dataclass(frozen=True)
class Endpoint:
    """The address of a server."""

    host: str
    port: int
    path: str
    key: str | None = None

    @classmethod
    def of(cls, address: str, key: str | None = None) -> "Endpoint":
        """Parse an address such as http://127.0.0.1:8000. Raises NapkinError for another scheme."""
        try:
            parts = urlsplit(address)
            port = parts.port or 80
        except ValueError:
            raise NapkinError(f"'{address}' is not an address: use one as http://127.0.0.1:8000") from None
        if parts.scheme != "http" or not parts.hostname:
            raise NapkinError(f"'{address}' is not an address of a server: use one as http://127.0.0.1:8000")
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, f"{path}/v1/completions", key)


def measure_http_load(
    endpoint: Endpoint,
    load: ServiceLoad,
    prompts: Sequence[list[int] | str],
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> ServiceMeasurement:
    """Send a load and wait for all answers; request i has prompt i, modulo their number.

    Raises NapkinError where the server cannot be reached, refuses a request, or answers in another format.
    """
    if load.concurrency is not None and load.concurrency > MOST_CLIENTS:
        raise NapkinError(f"concurrency is {load.concurrency}: one process sends for at most {MOST_CLIENTS} clients")
    work: SimpleQueue[int] = SimpleQueue()
    for number in range(load.requests):
        work.put(number)
    arrivals = load.arrivals() if load.rate is not None else [0.0] * load.requests
    served: dict[int, Served] = {}
    failures: list[NapkinError] = []
    begin = time.perf_counter()

    def client() -> None:
        while not failures:
            try:
                number = work.get_nowait()
            except Empty:
                return
            time.sleep(max(0.0, arrivals[number] - (time.perf_counter() - begin)))
            try:
                served[number] = _ask(endpoint, load, prompts[number % len(prompts)], number)
            except NapkinError as failure:
                failures.append(failure)

    # An open load has as many clients as may ever wait: each takes the next arrival.
    n_clients = load.concurrency if load.concurrency is not None else min(load.requests, MOST_CLIENTS)
    clients = [threading.Thread(target=client, daemon=True) for _ in range(n_clients)]
    for each in clients:
        each.start()
    for each in clients:
        while each.is_alive():
            each.join(0.2)
            progress(len(served))
    if failures:
        raise failures[0]
    return ServiceMeasurement(tuple(served[number] for number in sorted(served)), time.perf_counter() - begin)


def random_prompts(load: ServiceLoad, vocab_size: int) -> list[list[int]]:
    """Prompts of random token ids."""
    draw = random.Random(load.seed)
    return [[draw.randrange(vocab_size) for _ in range(load.input_tokens)] for _ in range(load.requests)]


def _ask(endpoint: Endpoint, load: ServiceLoad, prompt: list[int] | str, number: int) -> Served:
    body = {
        "prompt": prompt,
        "max_tokens": load.output_tokens,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    begin = time.perf_counter()
    first = last = None
    tokens = 0
    try:
        with closing(http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=TIMEOUT)) as connection:
            connection.request("POST", endpoint.path, json.dumps(body), headers)
            answer = connection.getresponse()
            with closing(answer):
                if answer.status != http.client.OK:
                    raise NapkinError(
                        f"{endpoint.host}:{endpoint.port} answers {answer.status}: {_said(answer.read(4096))}"
                    )
                for event in _events(answer):
                    last = time.perf_counter()
                    if any(choice.get("text") for choice in event.get("choices", ())):
                        first = first or last
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
    except (OSError, http.client.HTTPException) as error:
        raise NapkinError(
            f"{endpoint.host}:{endpoint.port} does not answer ({error}): start it with `napkin serve`"
        ) from None
    if last is None or not tokens:
        raise NapkinError(f"{endpoint.host}:{endpoint.port} sent no tokens and no usage: is it such a server?")
    # Tokens may have no text yet, such as the first bytes of a character.
    first = first or last
    return Served(first - begin, (last - first) / max(1, tokens - 1), tokens)


def _events(answer: http.client.HTTPResponse) -> Iterator[dict]:
    while line := answer.readline(LONGEST_LINE):
        text = line.strip()
        if not text.startswith(b"data:"):
            continue
        data = text[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise NapkinError("the server sent an event that is not a JSON object: is it one with OpenAI's interface?")
        if "error" in event:
            raise NapkinError(f"the server broke off: {_said(data)}")
        yield event


def _said(body: bytes) -> str:
    """The message of an error, in one line of printable characters."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = body.decode("utf-8", "replace")
    return "".join(character if character.isprintable() else " " for character in str(message))[:300]
