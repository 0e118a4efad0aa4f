"""Requests that cannot be computed, and an engine that fails for a while: others go on, and it begins again."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch

from napkin.inference.engine import Engine
from napkin.inference.requests import Completion, Request
from napkin.inference.settings import Sampling
from napkin.serving.limits import Limits
from napkin.serving.service import REQUEST_DUE, EngineThread, Service, connection_class
from oracles.served_model import tiny_served_model
from serving.conftest import Serve

GREEDY = Sampling(temperature=0)
Complete = Callable[..., Awaitable[Completion]]


def while_it_runs(engine: Engine, scenario: Callable[[EngineThread, Complete], Awaitable[None]]) -> None:
    """Run a scenario, which gets the thread and a function that awaits one request."""

    async def run() -> None:
        thread = EngineThread(engine)

        async def complete(*prompt: int) -> Completion:
            changed = asyncio.Event()
            (completion,) = thread.submit([Request(prompt or (1, 2), 3, GREEDY)], changed)
            while completion.finish is None:
                await asyncio.wait_for(changed.wait(), 60)
                changed.clear()
            thread.release([completion])
            return completion

        try:
            await scenario(thread, complete)
        finally:
            await thread.close()

    asyncio.run(run())


def test_an_engine_whose_device_fails_says_so_until_it_works_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_served_model().model, max_running=2)
    broken, hidden = threading.Event(), engine.model.hidden

    def unsteady(tokens: torch.Tensor, **how: Any) -> torch.Tensor:
        if broken.is_set():
            raise RuntimeError("the device is gone\nfor a while")
        return hidden(tokens, **how)

    monkeypatch.setattr(engine.model, "hidden", unsteady)

    async def scenario(thread: EngineThread, complete: Complete) -> None:
        expected = (await complete()).tokens
        broken.set()
        for _ in range(5):
            failed = await complete()
            assert (failed.finish, failed.failure) == ("failed", "the device is gone")
        while thread.failure is None:
            await asyncio.sleep(0.001)
        assert thread.failure == "the device is gone"
        broken.clear()
        assert (await complete()).tokens == expected
        assert thread.failure is None
        assert engine.pool.n_free == engine.pool.n_blocks

    while_it_runs(engine, scenario)


def test_steps_that_raise_beside_any_sequence_end_what_runs_and_lose_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiny_served_model().model, max_running=2)

    async def scenario(thread: EngineThread, complete: Complete) -> None:
        expected = (await complete()).tokens
        for _ in range(3):
            # The pool itself is broken; failing makes a new one.
            monkeypatch.setattr(engine.pool, "take", lambda: 1 // 0)
            assert (await complete()).finish == "failed"
            assert (await complete()).tokens == expected
            assert engine.pool.n_free == engine.pool.n_blocks
        assert thread.in_flight == 0

    while_it_runs(engine, scenario)


def test_one_clients_poison_is_nobody_elses(start_server: Serve) -> None:
    served = start_server(poisoned=7)
    honest: dict[str, Any] = {"prompt": "Once upon", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    (expected,) = served.complete(**honest)
    running = served.send("/v1/completions", **honest)
    served.wait_until(lambda: served.metric("napkin_sequences_running") == 1)
    for number in range(6):
        answer = served.post(
            "/v1/completions", prompt=[97] * number + [7, 97], n=1 + number % 3, stream=number % 2 == 1
        )
        assert b"NaN" in answer.content
        assert answer.status == (200 if number % 2 else 500)
        assert served.get("/health").status == 200
    content = b""
    while expected["text"].encode()[-20:] not in content:
        content += (received := running.recv(2**16))
        assert received
    assert content.startswith(b"HTTP/1.1 200")
    running.close()
    served.wait_until_idle()
    assert served.get("/health").json == {"status": "ok"}
    assert served.metric("napkin_kv_blocks_free") == served.metric("napkin_kv_blocks_total")
    assert served.complete(**honest) == [expected]


def test_a_request_has_the_seconds_of_the_limit_and_its_connection_a_second_more() -> None:
    """By a clock of the test's own: how soon a machine is at it does not matter."""
    clock, transport = Mock(**{"time.return_value": 100.0}), Mock()
    service = object.__new__(Service)
    service.limits, service.waiting = Limits(stalled_seconds=30.0), {transport: 1.0}
    connection: Any = object.__new__(connection_class(service))
    connection.loop, connection.transport, connection.app_state = clock, transport, {}
    connection._wait_for_request()
    assert connection.app_state == {REQUEST_DUE: 130.0}
    assert clock.call_at.mock_calls == [call(131.0, transport.abort)]
    assert service.waiting == {transport: 100.0}
