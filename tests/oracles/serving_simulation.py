"""Continuous batching step by step: a server and its clients, each of which sends a request as its last one ends.

Nothing is averaged or skipped: each step looks at every request. Lengths are given, in the order in which requests are
sent; a request that is sent when a step ends is seen when the next one has ended, unless the server is idle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from napkin.hardware.service_efficiency import Schedule

StepSeconds = Callable[[float, float, float, float], float]
"""Of sequences, their mean context, prompt tokens, and pairs of those tokens and the keys that they see."""


@dataclass
class Request:
    number: int
    inputs: int
    outputs: int
    sent: float
    prompt: int = 0
    computed: int = 0
    generated: int = 0
    first_token: float | None = None
    end: float = 0.0

    @property
    def decodes(self) -> bool:
        return self.generated > 0 and self.computed >= self.prompt

    @property
    def held(self) -> int:
        """Tokens that have room in the cache: all of the prompt, and what was computed after it."""
        return self.prompt if not self.decodes else self.inputs + self.generated - 1


@dataclass
class Server:
    schedule: Schedule
    step_seconds: StepSeconds
    cache_tokens: float
    batch_wait_steps: int = 0
    batch_wait_share: float = 1.0
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    waited: int = 0
    preempted: int = 0

    def step(self, now: float) -> tuple[float, list[Request]]:
        """The time at which the next step ends, and the requests that ended with it."""
        plan = self.schedule
        room = plan.max_batched_tokens - (0 if plan.prompts_first else sum(each.decodes for each in self.running))
        pieces: list[tuple[Request, int]] = []
        blocked = False
        for request in [each for each in self.running if not each.decodes] + self.waiting:
            left = request.prompt - request.computed
            if request in self.waiting:
                if room <= 0 or len(self.running) >= plan.max_running:
                    break
                to_come = sum(each.outputs - each.generated for each in [*self.running, request])
                held = sum(each.held for each in self.running) + request.prompt
                if self.running and held + plan.reserved_output * to_come > self.cache_tokens:
                    break
                self.running.append(request)
            if room <= 0 or (left > room and not plan.cuts_prompts and request.prompt <= plan.max_batched_tokens):
                blocked = True
            if blocked:
                break
            pieces.append((request, min(left, room)))
            room -= min(left, room)
        self.waiting = [each for each in self.waiting if each not in self.running]
        decoding = [each for each in self.running if each.decodes]
        tokens = len(decoding) + sum(n for _, n in pieces)
        if pieces and decoding and self.waited < self.batch_wait_steps:
            if tokens < self.batch_wait_share * plan.max_batched_tokens:
                self.waited += 1
                pieces = []
            else:
                self.waited = 0
        elif pieces:
            self.waited = 0
        if not (pieces and plan.prompts_first):
            while len(self.running) > 1:
                decoding = [each for each in self.running if each.decodes]
                if sum(each.held for each in self.running) + len(decoding) <= self.cache_tokens:
                    break
                computing = [each for each in self.running if not each.decodes]
                last = (computing or decoding)[-1]
                self.running.remove(last)
                last.prompt, last.computed = last.inputs + last.generated, 0
                self.waiting.insert(0, last)
                self.preempted += 1
        pieces = [each for each in pieces if each[0] in self.running]
        decoding = [] if pieces and plan.prompts_first else [each for each in self.running if each.decodes]
        pairs = sum(sum(each.computed + i + 1 for i in range(n)) for each, n in pieces)
        contexts = [each.inputs + each.generated for each in decoding]
        mean = sum(contexts) / len(contexts) if contexts else 0.0
        now += self.step_seconds(len(contexts), mean, sum(n for _, n in pieces), pairs)
        for request in decoding:
            request.generated += 1
        for request, n in pieces:
            request.computed += n
            if request.computed == request.prompt:
                request.generated += 1
                # Sequences are in the order in which their prompts ended.
                self.running.remove(request)
                self.running.append(request)
                if request.first_token is None:
                    request.first_token = now
        ended = [each for each in self.running if each.generated >= each.outputs]
        for request in ended:
            request.end = now
            self.running.remove(request)
        return now, sorted(ended, key=lambda each: (each in [p for p, _ in pieces], each.number))


def simulate(
    server: Server, lengths: Sequence[tuple[int, int]], *, clients: int | None = None, arrivals: Sequence[float] = ()
) -> list[Request]:
    """All requests once they have ended: of clients, or of those that come at given moments."""
    requests: list[Request] = []
    now, coming = 0.0, list[Request]()

    def new(at: float) -> Request:
        inputs, outputs = lengths[len(requests)]
        requests.append(Request(len(requests), inputs, outputs, at, prompt=inputs))
        return requests[-1]

    if clients is not None:
        server.waiting += [new(0.0) for _ in range(min(clients, len(lengths)))]
    done = 0
    while done < len(lengths):
        while clients is None and len(requests) < len(lengths) and arrivals[len(requests)] <= now:
            server.waiting.append(new(arrivals[len(requests)]))
        if not server.running and not server.waiting:
            if clients is None:
                now = arrivals[len(requests)]
            else:
                server.waiting, coming = coming, []
            continue
        before, (now, ended) = coming, server.step(now)
        done += len(ended)
        server.waiting += before
        coming = [new(now) for _ in ended if clients is not None and len(requests) < len(lengths)]
    return requests
