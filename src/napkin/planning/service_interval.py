"""How far off the times of a service may be, in nine cases of ten.

On the generations and with the formats that a server's constants were fitted to: what held nine in ten of those
measurements. Elsewhere each constant may differ as generations do: the time moves by its sensitivity to each, times
their spread, all independent (propagation of uncertainty, first order).
"""

import dataclasses
import math
from dataclasses import dataclass

from napkin.hardware.service_efficiency import FITTED, generation_spread
from napkin.planning.service_seconds import Load, Replica, service_times

NINE_IN_TEN = 1.645
"""Standard deviations on either side that hold nine in ten of a normal distribution."""
_STEP = 0.01


@dataclass(frozen=True)
class ServiceInterval:
    """Factors, up or down, that nine in ten measurements are expected within."""

    tpot: float
    ttft: float
    measured: bool
    """Whether such a generation and format was measured."""


def interval_of(replica: Replica, load: Load) -> ServiceInterval:
    """The factors of one replica under a load."""
    server = replica.server
    known = replica.weights in server.formats
    if known and replica.device.compute_capability in server.compute_capabilities:
        return ServiceInterval(server.tpot_factor, server.ttft_factor, measured=True)
    tpot, ttft = 0.0, 0.0
    at = _logs(replica, load)
    for name in FITTED:
        spread = generation_spread()[name]
        if spread:
            moved = dataclasses.replace(server, **{name: getattr(server, name) * math.exp(_STEP)})
            there = _logs(dataclasses.replace(replica, server=moved), load)
            tpot += ((there[0] - at[0]) / _STEP * spread) ** 2
            ttft += ((there[1] - at[1]) / _STEP * spread) ** 2
    return ServiceInterval(
        math.exp(math.hypot(math.log(server.tpot_factor), NINE_IN_TEN * math.sqrt(tpot))),
        math.exp(math.hypot(math.log(server.ttft_factor), NINE_IN_TEN * math.sqrt(ttft))),
        measured=False,
    )


def _logs(replica: Replica, load: Load) -> tuple[float, float]:
    times = service_times(replica, load)
    return math.log(times.time_per_output_token), math.log(times.time_to_first_token)
