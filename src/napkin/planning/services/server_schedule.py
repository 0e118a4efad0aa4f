"""The schedule of an inference server under a load, simulated event by event, without a model and without torch.

A server computes in steps: one token of every sequence that is generated, and prompts, whole or in pieces. Which of
the two a step computes is the server's `Schedule`:

    vLLM          running sequences first, then pieces of prompts up to a number of tokens per step
    TensorRT-LLM  the same with whole prompts, admitted when all their output has room in the cache
    SGLang        prompts first, in steps of their own; sequences that are generated wait meanwhile

Between two events, the end or the arrival of a request or a full cache, all steps are alike but for a token more in
each sequence. They are one row of the `Timeline`, so that a load of thousands of requests takes some ten thousand rows
however long its answers are.

Of a closed load, whose clients send a request as their last one ends, the order of the events does not depend on what a
step takes: the rows are found first and priced together.
"""

import functools
import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from napkin.errors import NapkinError
from napkin.hardware.service_efficiency import Schedule
from napkin.inference.scheduler import random_arrivals, refuse_unclear_load

Array = NDArray[np.float64]
StepSeconds = Callable[[Any, Any, Any, Any], Any]
"""Seconds of a step by its sequences, their mean tokens in the cache, its tokens of prompts, and pairs of a query and
a key in those; of numbers or of arrays."""

MOST_SIMULATED = 1500
"""Requests of a closed load that are simulated, or four of each client if those are more."""
FEWEST_ROUNDS = 4
MOST_REQUESTS = 50_000
"""More are refused: they would take more than some seconds."""
MOST_ROWS = 500_000


@dataclass(frozen=True)
class Load:
    """Requests that clients send one after another, or that come at random moments.

    The clients' first requests come at the same time, and the fewer each sends, the more of all requests are those.
    """

    concurrency: float | None
    """Requests in flight; None is a load that comes by `rate`."""
    input_tokens: float
    output_tokens: float
    requests_per_client: float = math.inf
    """Number of requests that each client sends; infinity is the steady state, the first left out."""
    shortest: float = 1.0
    """Lengths are drawn evenly between this share of those stated and those stated; at 1 all are equal."""
    mean_output_tokens: float | None = None
    """Answers end at random, as likely after each token, with this mean, and are cut at `output_tokens`; None is the
    lengths that `shortest` says."""
    rate: float | None = None
    """Requests per second, at random moments (a Poisson process)."""
    requests: int = 1000
    """Number of requests that come by `rate`."""
    seed: int = 0
    max_batched_tokens: int | None = None
    """Tokens that one step computes at most; None is the server's."""
    batch_wait_steps: int = 0
    """Steps that prompts wait for others to be computed with (TensorRT-LLM's batch_wait_timeout_iters)."""
    batch_wait_share: float = 1.0
    """Prompts do not wait if the step's tokens reach this fraction of its maximum (batch_wait_max_tokens_ratio)."""

    def __post_init__(self) -> None:
        refuse_unclear_load(self.concurrency, self.rate)
        if not 0 <= self.shortest <= 1:
            raise NapkinError(f"shortest is {self.shortest}: use a share of the stated lengths, from 0 to 1")
        mean = self.mean_output_tokens
        if mean is not None and not 1 <= mean <= self.output_tokens:
            raise NapkinError(
                f"the mean of the output is {mean:,} tokens: use from 1 to the longest, {self.output_tokens:,}"
            )

    @functools.cached_property
    def ending(self) -> float:
        """The probability that an answer ends after a token, with which the mean of those that are cut is the stated
        one: (1 - (1 - p)^longest) / p, found by halving."""
        assert self.mean_output_tokens is not None
        low, high = 0.0, 1 - 1e-9
        for _ in range(60):
            p = (low + high) / 2
            mean = -math.expm1(self.output_tokens * math.log1p(-p)) / p
            low, high = (p, high) if mean > self.mean_output_tokens else (low, p)
        return low

    @property
    def simulated_rounds(self) -> int:
        """Requests per client that are simulated: all, or enough of them for the middle ones to represent the rest."""
        assert self.concurrency is not None
        few = max(FEWEST_ROUNDS, round(MOST_SIMULATED / self.concurrency))
        return few if math.isinf(self.requests_per_client) else max(1, min(few, round(self.requests_per_client)))

    def weights(self, wave: NDArray[np.int64]) -> Array:
        """The weight of each simulated request in a mean over all that are sent: the first and the last of each client
        count once, those between for all that are not simulated, too."""
        rounds = 1 if self.rate is not None else self.simulated_rounds
        if rounds < FEWEST_ROUNDS or self.requests_per_client == rounds:
            return np.ones(len(wave))
        edge = (wave == 0) | (wave == rounds - 1)
        if math.isinf(self.requests_per_client):
            return np.where(edge, 0.0, 1.0)
        return np.where(edge, 1.0, (self.requests_per_client - 2) / (rounds - 2))


@dataclass(frozen=True)
class Timeline:
    """Steps in the order in which they are computed, and the requests that they serve.

    Arrays over rows: a row is `count` steps that are alike, at the mean of their contexts. Arrays over requests, in
    order of arrival: moments are numbers of rows that have ended.
    """

    sequences: Array
    context: Array
    """Mean tokens in the cache per sequence."""
    prompt_tokens: Array
    pairs: Array
    """Pairs of a query and a key that it sees, of the prompts' tokens."""
    count: Array
    arrival: NDArray[np.int64]
    admission: NDArray[np.int64]
    first: NDArray[np.int64]
    end: NDArray[np.int64]
    inputs: NDArray[np.int64]
    outputs: NDArray[np.int64]
    wave: NDArray[np.int64]
    """0 is the first request of a client."""
    arrival_seconds: Array | None = None
    """Arrival times in seconds, if they do not follow from the steps."""
    idle: Array | None = None
    """Seconds before each row without any request, of a load that comes by rate."""
    preempted: int = 0

    def shares(self, weights: Array) -> tuple[Array, Array]:
        """For a closed load, how much a second of a step in each row adds to the weighted means of the time to first
        token and of the time per output token."""
        weights = weights / weights.sum()

        def added(values: Array, begin: NDArray[np.int64], end: NDArray[np.int64]) -> Array:
            change = np.zeros(len(self.count) + 1)
            np.add.at(change, begin, values)
            np.add.at(change, end, -values)
            return np.cumsum(change)[:-1] * self.count

        per_token = weights / np.maximum(1, self.outputs - 1)
        return added(weights, self.arrival, self.first), added(per_token, self.first, self.end)

    def priced(self, seconds: StepSeconds) -> "Latencies":
        """The latencies of all requests, given the seconds of the steps."""
        each = seconds(self.sequences, self.context, self.prompt_tokens, self.pairs)
        taken = each * self.count
        ends = np.concatenate([[0.0], np.cumsum(taken if self.idle is None else taken + self.idle)])
        sent = ends[self.arrival] if self.arrival_seconds is None else self.arrival_seconds
        first, end = ends[self.first], ends[self.end]
        return Latencies(
            first_token=first - sent,
            per_token=(end - first) / np.maximum(1, self.outputs - 1),
            waiting=ends[self.admission] - sent,
            seconds=float(ends[-1]),
            in_prompts=float(taken[self.prompt_tokens > 0].sum()),
            running=float((taken * self.sequences).sum() / max(1e-30, float(taken[self.sequences > 0].sum()))),
        )


@dataclass(frozen=True)
class Latencies:
    """The seconds of requests: arrays in order of arrival."""

    first_token: Array
    """Seconds until the first token."""
    per_token: Array
    """Per token after the first: those between the first and the last, over the tokens after the first."""
    waiting: Array
    """Seconds until the request was admitted."""
    seconds: float
    """Seconds of the whole load."""
    in_prompts: float
    """Seconds of the steps that compute prompts."""
    running: float
    """Mean number of sequences that are generated at a time."""


class _Request:
    """A request of the simulation; the moments are numbers of rows."""

    __slots__ = (
        *("number", "inputs", "outputs", "wave", "arrival", "admission", "first", "end"),
        *("computed", "generated", "begun", "version", "prompt"),
    )

    def __init__(self, number: int, inputs: int, outputs: int, wave: int, arrival: int) -> None:
        self.number, self.inputs, self.outputs, self.wave, self.arrival = number, inputs, outputs, wave, arrival
        self.admission = self.first = self.end = -1
        # A request that gave its place back computes its own tokens as part of its prompt.
        self.prompt, self.computed, self.generated = inputs, 0, 0
        self.begun = self.version = 0


def simulate_schedule(
    load: Load,
    schedule: Schedule,
    cache_tokens: float,
    pairs: Callable[[float], float],
    seconds: StepSeconds | None = None,
) -> Timeline:
    """Find the steps of a server under a load; `seconds` are needed where requests come by rate.

    `cache_tokens` have room in the cache; `pairs` are those of a whole prompt of so many tokens.

    Raises NapkinError where not one request fits.
    """
    simulation = _Simulation(load, schedule, cache_tokens, pairs, seconds)
    simulation.run()
    return simulation.timeline()


class _Simulation:
    def __init__(
        self,
        load: Load,
        schedule: Schedule,
        cache_tokens: float,
        pairs: Callable[[float], float],
        seconds: StepSeconds | None,
    ) -> None:
        self.load, self.schedule, self.cache_tokens, self.pairs = load, schedule, cache_tokens, pairs
        self.seconds = seconds
        self.budget = load.max_batched_tokens or schedule.max_batched_tokens
        tokens = load.input_tokens + load.output_tokens
        if tokens > cache_tokens:
            raise NapkinError(f"a request of {tokens:,.0f} tokens does not fit into a cache of {cache_tokens:,.0f}")
        self.draw = random.Random(load.seed)
        self.arrivals: list[float] = []
        self.now = self.gap = 0.0
        if load.rate is not None:
            if seconds is None:
                raise NapkinError("which requests have come by rate depends on what steps take: give seconds")
            self.clients = self.total = load.requests
        else:
            assert load.concurrency is not None
            self.clients = max(1, round(load.concurrency))
            self.total = self.clients * load.simulated_rounds
        if self.total > MOST_REQUESTS:
            raise NapkinError(
                f"{self.total:,} requests are to be simulated, at most {MOST_REQUESTS:,} can be: use a smaller "
                "concurrency, fewer requests, or more devices"
            )
        self.waiting: deque[_Request] = deque()
        self.coming: list[_Request] = []
        """Requests that are sent while the next step is computed, and seen after it."""
        self.requests: list[_Request] = []
        self.computing: list[_Request] = []
        """Admitted requests whose prompts are not yet computed completely."""
        self.decoding: dict[int, _Request] = {}
        """Sequences that are generated, in order of admission."""
        self.ends: list[tuple[int, int, int]] = []
        """A heap of the decode step after which a sequence ends, its number and its version."""
        self.n_decoded = 0
        """Decode steps until now."""
        self.context = 0
        """Tokens of all sequences that are generated, the newest of each included."""
        self.tokens_in_cache = 0
        """Tokens in the cache, with those of prompts that are admitted."""
        self.to_come = 0
        """Tokens that admitted requests have still to generate."""
        self.n_ended = self.preempted = self.n_waited = 0
        self.rows: list[tuple[int, float, int, float, int]] = []
        self.idle: list[float] = []

    def run(self) -> None:
        closed = self.load.rate is None
        if self.load.rate is not None:
            self.arrivals = random_arrivals(self.draw, self.load.rate, self.total)
        if closed:
            self.waiting.extend(self._new() for _ in range(min(self.clients, self.total)))
        while self.n_ended < self.total:
            while not closed and len(self.requests) < self.total and self.arrivals[len(self.requests)] <= self.now:
                self.waiting.append(self._new())
            if not (self.waiting or self.computing or self.decoding):
                if closed:
                    self._arrive()
                else:
                    coming = self.arrivals[len(self.requests)]
                    self.gap, self.now = self.gap + coming - self.now, coming
                continue
            pieces = self._pieces()
            if pieces and not self._waits(pieces):
                self._compute(pieces)
            else:
                self._decode()

    def _new(self) -> _Request:
        number, load = len(self.requests), self.load
        lengths = (self._length(load.input_tokens), self._output_length())
        request = _Request(number, *lengths, number // self.clients, len(self.rows))
        self.requests.append(request)
        return request

    def _length(self, tokens: float) -> int:
        longest = max(1, round(tokens))
        return self.draw.randint(max(1, math.ceil(self.load.shortest * longest)), longest)

    def _output_length(self) -> int:
        load = self.load
        if load.mean_output_tokens is None:
            return self._length(load.output_tokens)
        longest, p = max(1, round(load.output_tokens)), load.ending
        if p < 1e-12:
            return longest
        # How many tokens it takes until one ends: a geometric distribution, by its inverse.
        return min(longest, 1 + int(math.log1p(-self.draw.random()) / math.log1p(-p)))

    def _arrive(self) -> None:
        self.waiting.extend(self.coming)
        self.coming.clear()

    def _pieces(self) -> list[tuple[_Request, int]]:
        """The pieces of prompts that the next step may compute; requests are admitted for them, first come first."""
        schedule = self.schedule
        if not self.waiting and not self.computing:
            return []
        room = self.budget - (0 if schedule.prompts_first else len(self.decoding))
        pieces: list[tuple[_Request, int]] = []

        def take(request: _Request) -> bool:
            nonlocal room
            left = request.prompt - request.computed
            # A prompt that is longer than any step is cut in any case.
            if room <= 0 or (left > room and not schedule.cuts_prompts and request.prompt <= self.budget):
                return False
            pieces.append((request, min(left, room)))
            room -= min(left, room)
            return True

        for request in self.computing:
            if not take(request):
                return pieces
        while self.waiting and room > 0 and len(self.decoding) + len(self.computing) < schedule.max_running:
            request = self.waiting[0]
            to_come = self.to_come + request.outputs - request.generated
            grown = self.tokens_in_cache + request.prompt + schedule.reserved_output * to_come
            # The first one always has room: it was checked before the start.
            if grown > self.cache_tokens and (self.decoding or self.computing):
                break
            self.waiting.popleft()
            self.tokens_in_cache += request.prompt
            self.to_come = to_come
            if request.admission < 0:
                request.admission = len(self.rows)
            self.computing.append(request)
            if not take(request):
                break
        return pieces

    def _waits(self, pieces: list[tuple[_Request, int]]) -> bool:
        """Whether prompts wait another step for others, while sequences are generated."""
        tokens = len(self.decoding) + sum(n for _, n in pieces)
        if (
            self.decoding
            and self.n_waited < self.load.batch_wait_steps
            and tokens < self.load.batch_wait_share * self.budget
        ):
            self.n_waited += 1
            return True
        self.n_waited = 0
        return False

    def _row(self, decoded: int, prompt_tokens: int, pairs: float, count: int) -> None:
        if len(self.rows) >= MOST_ROWS:
            raise NapkinError(
                f"the load takes more than {MOST_ROWS:,} different steps: use fewer requests or shorter prompts"
            )
        context = self.context / decoded + (count - 1) / 2 if decoded else 0.0
        row = (decoded, context, prompt_tokens, pairs, count)
        self.rows.append(row)
        if self.seconds is not None and self.arrivals:
            self.now += float(self.seconds(*row[:4])) * count
            self.idle.append(self.gap)
            self.gap = 0.0
        if decoded:
            self.n_decoded += count
            self.context += count * decoded
            self.tokens_in_cache += count * decoded
            self.to_come -= count * decoded
        self._arrive()

    def _compute(self, pieces: list[tuple[_Request, int]]) -> None:
        """A step with prompts, and a token of each sequence where the schedule mixes them."""
        if not self.schedule.prompts_first:
            self._make_room()
            pieces = [each for each in pieces if each[0] in self.computing] if self.preempted else pieces
        decoded = 0 if self.schedule.prompts_first else len(self.decoding)
        pairs = sum(self.pairs(each.computed + n) - self.pairs(each.computed) for each, n in pieces)
        self._row(decoded, sum(n for _, n in pieces), pairs, 1)
        self._end_those_done()
        for request, n in pieces:
            request.computed += n
            if request.computed < request.prompt:
                continue
            self.computing.remove(request)
            request.generated += 1
            self.to_come -= 1
            if request.first < 0:
                request.first = len(self.rows)
            if request.generated >= request.outputs:
                self.tokens_in_cache -= request.prompt
                self._end(request)
                continue
            request.begun = self.n_decoded
            self.decoding[request.number] = request
            self.context += request.inputs + request.generated
            heapq.heappush(
                self.ends, (self.n_decoded + request.outputs - request.generated, request.number, request.version)
            )

    def _decode(self) -> None:
        """Steps without a prompt, until something happens."""
        self._make_room()
        decoded = len(self.decoding)
        while self.requests[self.ends[0][1]].version != self.ends[0][2]:
            heapq.heappop(self.ends)
        count = self.ends[0][0] - self.n_decoded
        if self.coming or self.computing or (self.waiting and self.load.batch_wait_steps):
            count = 1
        if self.schedule.reserved_output < 1:
            count = min(count, max(1, int((self.cache_tokens - self.tokens_in_cache) // decoded)))
        if self.arrivals and len(self.requests) < self.total:
            count = self._until(self.arrivals[len(self.requests)] - self.now, count)
        self._row(decoded, 0, 0.0, count)
        self._end_those_done()

    def _until(self, left: float, most: int) -> int:
        """The fewest steps without a prompt that take so many seconds; `most` if those take less."""
        seconds, decoded = self.seconds, len(self.decoding)
        assert seconds is not None

        def taken(count: int) -> float:
            return count * float(seconds(decoded, self.context / decoded + (count - 1) / 2, 0, 0.0))

        # Steps become longer with their contexts.
        count = max(1, min(most, math.ceil(left / taken(1))))
        while count > 1 and taken(count - 1) >= left:
            count -= 1
        return count

    def _make_room(self) -> None:
        """Give back what the sequences that came last hold, until the others have room for a token each."""
        while (
            self.tokens_in_cache + len(self.decoding) > self.cache_tokens
            and len(self.decoding) + len(self.computing) > 1
        ):
            if self.computing:
                last = self.computing.pop()
                self.tokens_in_cache -= last.prompt
            else:
                last = self.decoding.popitem()[1]
                last.generated += self.n_decoded - last.begun
                self.context -= last.inputs + last.generated
                self.tokens_in_cache -= last.inputs + last.generated - 1
                last.version += 1
            self.to_come -= last.outputs - last.generated
            last.prompt, last.computed = last.inputs + last.generated, 0
            self.waiting.appendleft(last)
            self.preempted += 1

    def _end_those_done(self) -> None:
        while self.ends and self.ends[0][0] <= self.n_decoded:
            _, number, version = heapq.heappop(self.ends)
            request = self.requests[number]
            if version == request.version:
                del self.decoding[number]
                self.context -= request.inputs + request.outputs
                self.tokens_in_cache -= request.inputs + request.outputs - 1
                self._end(request)

    def _end(self, request: _Request) -> None:
        request.end = len(self.rows)
        self.n_ended += 1
        if self.load.rate is None and len(self.requests) < self.total:
            self.coming.append(self._new())

    def timeline(self) -> Timeline:
        sequences, context, prompt_tokens, pairs, count = np.array(self.rows, float).T
        names = ("arrival", "admission", "first", "end", "inputs", "outputs", "wave")
        moments = {name: np.array([getattr(each, name) for each in self.requests]) for name in names}
        return Timeline(
            sequences,
            context,
            prompt_tokens,
            pairs,
            count,
            **moments,
            arrival_seconds=np.array(self.arrivals) if self.arrivals else None,
            idle=np.array(self.idle) if self.arrivals else None,
            preempted=self.preempted,
        )
