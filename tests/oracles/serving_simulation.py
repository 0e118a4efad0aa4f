"""Continuous batching step by step: a server and its clients, each of which sends a request as its last one ends.

Nothing is averaged: each request has its own arrival, its own context and its own first token. A step computes one
token of each sequence that is generated and, first come first served, prompts up to a number of tokens, whole or in
pieces; it takes what a function says.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

StepSeconds = Callable[[float, float, float, float], float]
"""Of sequences, their mean context, prompt tokens, and pairs of those tokens and the keys that they see."""


@dataclass
class Request:
    client: int
    inputs: int
    outputs: int
    arrival: float
    computed: int = 0
    generated: int = 0
    first_token: float = 0.0
    end: float = 0.0


@dataclass
class Server:
    step_seconds: StepSeconds
    max_batched_tokens: int
    slots: int
    running: list[Request] = field(default_factory=list)
    waiting: deque[Request] = field(default_factory=deque)

    def step(self, now: float) -> tuple[float, list[Request]]:
        """The time at which the next step ends, and the requests that ended with it."""
        budget, pairs, computed = self.max_batched_tokens, 0.0, 0
        prompts: list[Request] = []
        for request in list(self.waiting):
            if budget <= 0 or (not request.computed and len(self.running) + len(prompts) >= self.slots):
                break
            piece = min(budget, request.inputs - request.computed)
            # A prompt that does not fit whole waits, unless it is longer than any step.
            if piece < request.inputs - request.computed and request.inputs <= self.max_batched_tokens:
                break
            pairs += sum(request.computed + i + 1 for i in range(piece))
            budget, computed = budget - piece, computed + piece
            request.computed += piece
            prompts.append(request)
        contexts = [request.inputs + request.generated for request in self.running]
        now += self.step_seconds(len(contexts), float(np.mean(contexts)) if contexts else 0.0, computed, pairs)
        for request in self.running:
            request.generated += 1
        for request in prompts:
            if request.computed == request.inputs:
                self.waiting.remove(request)
                request.generated, request.first_token = 1, now
                self.running.append(request)
        ended = [request for request in self.running if request.generated >= request.outputs]
        for request in ended:
            request.end = now
            self.running.remove(request)
        return now, ended


def simulate(
    step_seconds: StepSeconds,
    *,
    clients: int,
    rounds: int,
    inputs: tuple[int, int],
    outputs: tuple[int, int],
    max_batched_tokens: int,
    slots: int = 10**9,
    seed: int = 0,
) -> tuple[float, float]:
    """Mean time to first token and mean time per output token of all requests, of lengths drawn evenly from ranges."""
    draw = np.random.default_rng(seed)
    server, now, done = Server(step_seconds, max_batched_tokens, slots), 0.0, []
    left = clients * rounds

    def send(client: int, at: float) -> None:
        nonlocal left
        if left:
            left -= 1
            lengths = (int(draw.integers(*inputs, endpoint=True)), int(draw.integers(*outputs, endpoint=True)))
            server.waiting.append(Request(client, *lengths, at))

    for client in range(clients):
        send(client, 0.0)
    while server.running or server.waiting:
        now, ended = server.step(now)
        done += ended
        for request in ended:
            send(request.client, now)
    first = float(np.mean([request.first_token - request.arrival for request in done]))
    return first, float(np.mean([(request.end - request.first_token) / (request.outputs - 1) for request in done]))
