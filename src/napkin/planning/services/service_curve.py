"""A service over its load: how long a request takes, and what all devices give, for each number of requests in flight.

Each further request shares the weights that a step reads, until arithmetic, the cache's bytes or the room for sequences
bind: from there on more requests only wait longer. The knee is where that begins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from napkin.errors import NapkinError
from napkin.model.config import ModelConfig
from napkin.planning.services.replica import ServiceTimes
from napkin.planning.services.service_plan import ServiceDegree, ServicePlan
from napkin.planning.services.service_planner import plan_service

CONCURRENCIES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""The numbers of requests in flight, on all devices together, that a curve has by default."""


@dataclass(frozen=True)
class ServicePoint:
    """Throughput and latency of one degree of tensor parallelism with a number of requests in flight."""

    concurrency: int
    degree: ServiceDegree
    times: ServiceTimes
    tokens_per_second: float
    """Output tokens of all devices."""
    request_seconds: float
    """Seconds from sending a request to its last token, on the average."""

    @property
    def power(self) -> float:
        """Tokens per second over the seconds of a request: Kleinrock's power (1979), greatest at the knee."""
        return self.tokens_per_second / self.request_seconds

    @property
    def waits(self) -> bool:
        """True where more requests are in flight than are computed at a time."""
        return self.concurrency / self.degree.replicas > self.degree.sequences


@dataclass(frozen=True)
class ServiceCurve:
    """The points of one degree of tensor parallelism, the fewest requests in flight first."""

    tensor: int
    points: tuple[ServicePoint, ...]
    reason: str | None
    """Reason why no point could be planned; None if some were."""

    @property
    def knee(self) -> ServicePoint | None:
        """The point of most power: beyond it the seconds of a request grow faster than the tokens per second."""
        return max(self.points, key=lambda point: point.power, default=None)


@dataclass(frozen=True)
class ServiceCurves:
    """The curves of all degrees, and the plan of one load, which has what they share."""

    plan: ServicePlan
    curves: tuple[ServiceCurve, ...]

    def best(self, ttft: float | None = None, tpot: float | None = None) -> ServicePoint | None:
        """The point of most tokens per second with mean times within limits in seconds, or None."""
        points = [point for curve in self.curves for point in curve.points if _is_within(point, ttft, tpot)]
        return max(points, key=lambda point: point.tokens_per_second, default=None)

    def as_values(self) -> dict[str, Any]:
        """The curves for programs: bytes, seconds, tokens per second and dollars."""
        shared = self.plan.as_values()
        for name in ("concurrency", "degrees", "draft", "requests_per_client"):
            del shared[name]
        return {
            **shared,
            "curves": [
                {
                    "tensor": curve.tensor,
                    "reason": curve.reason,
                    "knee": curve.knee and curve.knee.concurrency,
                    "points": [_values(point) for point in curve.points],
                }
                for curve in self.curves
            ],
        }


def service_curves(
    model: ModelConfig,
    on: str,
    *,
    output_tokens: int,
    concurrencies: Sequence[int] = CONCURRENCIES,
    progress: Callable[[str], None] = lambda doing: None,
    **others: Any,
) -> ServiceCurves:
    """Plan a service on accelerators under each number of requests in flight, by degree of tensor parallelism.

    `others` are what `plan_service` takes: tokens of a prompt, server, formats, tensor, price. Raises NapkinError as it
    does, and where no number of requests is named.
    """
    if not concurrencies:
        raise NapkinError("concurrencies is empty: name a number of requests in flight")
    plans: list[tuple[int, ServicePlan]] = []
    for concurrency in sorted(set(concurrencies)):
        progress(f"planning {concurrency:,} requests in flight")
        plans.append(
            (concurrency, plan_service(model, on, concurrency=concurrency, output_tokens=output_tokens, **others))
        )
    curves = []
    for index, first in enumerate(plans[0][1].degrees):
        degrees = [(concurrency, plan.degrees[index]) for concurrency, plan in plans]
        points = tuple(
            point for concurrency, degree in degrees if (point := _point(concurrency, degree, output_tokens))
        )
        curves.append(ServiceCurve(first.tensor, points, None if points else first.reason))
    return ServiceCurves(plans[0][1], tuple(curves))


def _point(concurrency: int, degree: ServiceDegree, output_tokens: int) -> ServicePoint | None:
    """The point of a load, or None where the service does not fit.

    By Little's law the seconds of a request are the requests in flight divided by the requests per second.
    """
    if degree.times is None or degree.tokens_per_second is None:
        return None
    seconds = concurrency * output_tokens / degree.tokens_per_second
    return ServicePoint(concurrency, degree, degree.times, degree.tokens_per_second, seconds)


def _is_within(point: ServicePoint, ttft: float | None, tpot: float | None) -> bool:
    return (ttft is None or point.times.time_to_first_token <= ttft) and (
        tpot is None or point.times.time_per_output_token <= tpot
    )


_SHOWN = "replicas weight_bytes kv_pool_bytes sequences decode_intensity usd_per_million_tokens".split()


def _values(point: ServicePoint) -> dict[str, Any]:
    values = point.degree.as_values()
    return {
        "concurrency": point.concurrency,
        "tokens_per_second": point.tokens_per_second,
        "request_seconds": point.request_seconds,
        "waits": point.waits,
        "ttft": point.times.time_to_first_token,
        "tpot": point.times.time_per_output_token,
        "ttft_percentiles": values["time_to_first_token"],
        "tpot_percentiles": values["time_per_output_token"],
        **{name: values[name] for name in (*_SHOWN, "tokens_per_second_interval", "interval")},
    }
