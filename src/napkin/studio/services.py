"""Answers for the page of services: a service of a published model over the requests in flight."""

from collections.abc import Callable
from typing import Any

import msgspec

from napkin.hardware.device_file import catalogue
from napkin.hardware.service_efficiency import service_efficiencies
from napkin.model.config import preset, presets
from napkin.planning.services.replica import KV_BYTES, WEIGHT_BYTES, KVFormat, WeightFormat
from napkin.planning.services.service_curve import CONCURRENCIES, service_curves


class ServiceRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A service to plan: a model, devices, and the tokens of a request."""

    preset: str
    on: str
    """Devices, as in "8xH100"."""
    input_tokens: int
    output_tokens: int
    shortest: float = 1.0
    server: str | None = None
    weights: WeightFormat = "bf16"
    kv: KVFormat | None = None
    usd_per_hour: float | None = None


def plan_service_curves(request: ServiceRequest, progress: Callable[[str], None]) -> dict[str, Any]:
    """The curves of a request. Raises NapkinError for what cannot be planned; what `progress` raises ends it."""
    fields = msgspec.structs.asdict(request)
    model, on = preset(fields.pop("preset")), fields.pop("on")
    return service_curves(model, on, progress=progress, **fields).as_values()


def service_catalogue() -> dict[str, Any]:
    """The choices of the page: models, devices with their prices, servers and formats."""
    return {
        "models": list(presets()),
        "devices": {device.name: device.price.usd_per_hour if device.price else None for device in catalogue()},
        "servers": list(service_efficiencies()),
        "weights": list(WEIGHT_BYTES),
        "kv": list(KV_BYTES),
        "concurrencies": CONCURRENCIES,
    }
