"""A load of requests on an engine, and what they see: time to first token, time per output token."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from napkin.errors import NapkinError
from napkin.inference.engine import Engine
from napkin.inference.requests import Completion, Request
from napkin.inference.scheduler import random_arrivals, refuse_unclear_load
from napkin.inference.settings import Sampling


@dataclass(frozen=True)
class ServiceLoad:
    """Requests of one size."""

    requests: int
    """Number of requests."""
    input_tokens: int
    output_tokens: int
    concurrency: int | None = 16
    """Clients that each send their next request when the last one has ended; None is an open load by `rate`."""
    rate: float | None = None
    """Requests per second, at random moments (a Poisson process)."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "input_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise NapkinError(f"{name} is {getattr(self, name)}: use 1 or more")
        refuse_unclear_load(self.concurrency, self.rate)
        if self.concurrency is not None and self.concurrency < 1:
            raise NapkinError(f"concurrency is {self.concurrency}: use 1 or more")

    def arrivals(self) -> list[float]:
        """Arrival times of the requests of an open load, in seconds after the start."""
        assert self.rate is not None
        return random_arrivals(random.Random(self.seed), self.rate, self.requests)


@dataclass(frozen=True)
class Served:
    """The seconds that one request waited for its tokens."""

    time_to_first_token: float
    time_per_output_token: float
    """Seconds per token after the first."""
    output_tokens: int


@dataclass(frozen=True)
class ServiceMeasurement:
    """The measured latencies and rates of all requests of a load."""

    served: tuple[Served, ...]
    seconds: float
    """Seconds from the first request to the end of the last."""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all requests per second of the whole load."""
        return sum(each.output_tokens for each in self.served) / self.seconds

    def first_token(self, percentile: float) -> float:
        """Percentile of the seconds to the first token."""
        return percentile_of([each.time_to_first_token for each in self.served], percentile)

    def per_token(self, percentile: float) -> float:
        """Percentile of the seconds per output token."""
        return percentile_of([each.time_per_output_token for each in self.served], percentile)


def percentile_of(values: Sequence[float], percentile: float) -> float:
    """A percentile by linear interpolation between the two nearest values.

    >>> percentile_of([1.0, 2.0, 4.0], 75)
    3.0
    """
    ordered = sorted(values)
    place = (len(ordered) - 1) * percentile / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def measure_load(engine: Engine, load: ServiceLoad) -> ServiceMeasurement:
    """Send a load of random prompts to an engine that has no other requests."""
    waiting = [_request(engine, load, number) for number in range(load.requests)]
    arrivals = load.arrivals() if load.rate is not None else []
    completions: list[Completion] = []
    begin = time.perf_counter()
    in_flight = done = 0
    while done < load.requests:
        now = time.perf_counter() - begin
        while waiting and (
            arrivals[len(completions)] <= now if load.concurrency is None else in_flight < load.concurrency
        ):
            completions.append(engine.submit(waiting.pop(0)))
            in_flight += 1
        if not engine.has_work:
            time.sleep(max(0.0, arrivals[len(completions)] - (time.perf_counter() - begin)))
            continue
        ended = sum(completion.finish is not None for completion, _ in engine.step())
        in_flight, done = in_flight - ended, done + ended
    return ServiceMeasurement(tuple(map(_served, completions)), time.perf_counter() - begin)


def _request(engine: Engine, load: ServiceLoad, number: int) -> Request:
    draw = random.Random(load.seed * 1_000_003 + number)
    vocabulary = engine.model.config.vocab_size
    prompt = [draw.randrange(vocabulary) for _ in range(load.input_tokens)]
    # Drawn, since random prompts of an untrained model repeat themselves greedily; nothing may end a request early.
    return Request(prompt, load.output_tokens, Sampling(temperature=1.0, top_p=1.0, seed=number))


def _served(completion: Completion) -> Served:
    first, last = completion.first_token_at, completion.finished_at
    assert first is not None
    assert last is not None
    more = max(1, len(completion.draws) - 1)
    return Served(first - completion.submitted_at, (last - first) / more, len(completion.draws))
