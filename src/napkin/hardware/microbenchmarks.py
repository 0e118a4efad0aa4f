"""The microbenchmarks of a calibration: matrix products, array operations and an empty call.

Each takes many short samples, interleaved with the others over several seconds, and keeps the fastest: on a shared
machine the mean depends on the load of others, the fastest on the hardware alone. Where the fastest samples do not
agree, more are taken. `competition.py` says how samples are taken beside other processes.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import torch
from torch import Tensor

from napkin.errors import NapkinError
from napkin.hardware.calibration import (
    ArrayMeasurement,
    Calibration,
    CalibrationSettings,
    Machine,
    MatmulMeasurement,
)
from napkin.hardware.competition import WINDOW_SECONDS, Conditions, Sample, Sampler, agree
from napkin.hardware.host import usable_cores
from napkin.machine_code.processor import cpu_name, has_native_bf16
from napkin.number_formats import FORMATS

_LONGER = 2
"""The factor of the time that measuring may take until the fastest samples agree."""


def measure(device_type: str, settings: CalibrationSettings, progress: Callable[[float], None]) -> Calibration:
    """Run all microbenchmarks for about `settings.seconds`, at least twice each."""
    machine = current_machine(device_type)
    precision = torch.get_float32_matmul_precision()
    try:
        with torch.no_grad():
            matmuls = {
                (name, shape): _matmul_benchmark(name, shape, device_type)
                for name in _formats(device_type, machine.native_bf16)
                for shape in settings.shapes
            }
            arrays = _ArrayMicrobenchmarks(settings.array_bytes, device_type)
            conditions = _run([*matmuls.values(), *arrays.all()], device_type, settings, progress)
    finally:
        torch.set_float32_matmul_precision(precision)
    return Calibration(
        machine=machine,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        matmuls=tuple(
            MatmulMeasurement(name, *shape, 2 * math.prod(shape) / benchmark.best_seconds)
            for (name, shape), benchmark in matmuls.items()
        ),
        arrays=arrays.measurements(),
        seconds_per_operator=arrays.call.best_seconds,
        seconds_per_fresh_byte=arrays.seconds_per_fresh_byte() if device_type == "cpu" else 0.0,
        conditions=conditions,
    )


def current_machine(device_type: str) -> Machine:
    """The machine as it is now. Raises NapkinError for a device that is not available."""
    if device_type not in ("cpu", "cuda"):
        raise NapkinError(f"{device_type!r} cannot be calibrated: use cpu or cuda")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise NapkinError("'cuda' cannot be calibrated: torch finds no such device, use cpu")
    on_cuda = device_type == "cuda"
    return Machine(
        device_type=device_type,
        device_name=torch.cuda.get_device_name() if on_cuda else cpu_name(),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        native_bf16=torch.cuda.is_bf16_supported(including_emulation=False) if on_cuda else has_native_bf16(),
        torch_version=str(torch.__version__),
    )


@dataclass
class _Microbenchmark:
    """An operator to time; `float32_precision` is torch's setting for fp32 matrix products meanwhile."""

    run: Callable[[], object]
    float32_precision: str = "highest"
    calls: int = 1
    samples: list[Sample] = field(default_factory=list)
    best_seconds: float = math.inf


def _formats(device_type: str, native_bf16: bool) -> list[str]:
    """Formats with native matrix products: emulated bf16 on a CPU takes many times as long as fp32."""
    on_cuda = device_type == "cuda"
    ampere = on_cuda and torch.cuda.get_device_capability() >= (8, 0)
    return ["fp32", *["tf32"] * ampere, *["fp16"] * on_cuda, *["bf16"] * native_bf16]


def _matmul_benchmark(name: str, shape: tuple[int, int, int], device_type: str) -> _Microbenchmark:
    m, n, k = shape
    dtype = getattr(torch, FORMATS[name].torch_name or "float32")
    # A separate generator: calibrating must not change the random numbers of a seeded run.
    generator = torch.Generator(device_type).manual_seed(0)

    def operand(rows: int, columns: int) -> Tensor:
        return torch.rand(rows, columns, generator=generator, device=device_type).to(dtype)

    left, right, product = operand(m, k), operand(k, n), torch.empty(m, n, dtype=dtype, device=device_type)
    return _Microbenchmark(
        lambda: torch.mm(left, right, out=product), float32_precision="high" if name == "tf32" else "highest"
    )


class _ArrayMicrobenchmarks:
    """Copies and additions on slices of three large arrays, a copy to newly allocated memory, and an empty call."""

    def __init__(self, array_bytes: tuple[int, ...], device_type: str) -> None:
        longest = max(array_bytes) // 4
        first, second, third = (torch.ones(longest, device=device_type) for _ in range(3))
        self.sizes = array_bytes
        self.copies = {size: _copy_benchmark(first[: size // 4], third[: size // 4]) for size in array_bytes}
        self.adds = {
            size: _add_benchmark(first[: size // 4], second[: size // 4], third[: size // 4]) for size in array_bytes
        }
        self.fresh_copy = _Microbenchmark(lambda: first.clone())
        one = torch.ones(1, device=device_type)
        self.call = _Microbenchmark(lambda: torch.add(one, one))

    def all(self) -> list[_Microbenchmark]:
        return [*self.copies.values(), *self.adds.values(), self.fresh_copy, self.call]

    def measurements(self) -> tuple[ArrayMeasurement, ...]:
        return tuple(
            ArrayMeasurement(
                size, 2 * size / self._beyond_call(self.copies[size]), 3 * size / self._beyond_call(self.adds[size])
            )
            for size in self.sizes
        )

    def seconds_per_fresh_byte(self) -> float:
        largest = max(self.sizes)
        return max(0.0, self.fresh_copy.best_seconds - self.copies[largest].best_seconds) / largest

    def _beyond_call(self, benchmark: _Microbenchmark) -> float:
        # At least half the time must be work: an overestimated call overhead must not make a small copy infinitely
        # fast.
        return max(benchmark.best_seconds - self.call.best_seconds, benchmark.best_seconds / 2)


def _copy_benchmark(source: Tensor, target: Tensor) -> _Microbenchmark:
    return _Microbenchmark(lambda: target.copy_(source))


def _add_benchmark(first: Tensor, second: Tensor, target: Tensor) -> _Microbenchmark:
    return _Microbenchmark(lambda: torch.add(first, second, out=target))


def _run(
    benchmarks: list[_Microbenchmark],
    device_type: str,
    settings: CalibrationSettings,
    progress: Callable[[float], None],
) -> Conditions | None:
    """Time all microbenchmarks in turns; returns what other processes did meanwhile."""

    def sample(sampler: Sampler, benchmark: _Microbenchmark) -> Sample:
        torch.set_float32_matmul_precision(benchmark.float32_precision)
        return sampler.sample(benchmark.run, benchmark.calls)

    def visit(sampler: Sampler, benchmark: _Microbenchmark) -> None:
        end = time.perf_counter() + settings.visit_seconds
        while True:
            benchmark.samples.append(sample(sampler, benchmark))
            if time.perf_counter() >= end:
                return

    start, rounds, left = time.perf_counter(), 0, benchmarks
    with Sampler(device_type, window=min(WINDOW_SECONDS, settings.seconds)) as sampler:
        # The first call compiles kernels and touches memory; the second determines the number of calls per sample.
        for benchmark in benchmarks:
            sample(sampler, benchmark)
            benchmark.calls = max(1, math.ceil(settings.sample_seconds / sample(sampler, benchmark).clock))
        while rounds < 2 or (left and time.perf_counter() < start + _LONGER * settings.seconds):
            for benchmark in left:
                visit(sampler, benchmark)
            rounds += 1
            if time.perf_counter() >= start + settings.seconds:
                left = [each for each in benchmarks if not agree(sampler.undisturbed(each.samples))]
            progress(min(1.0, (time.perf_counter() - start) / settings.seconds))
        progress(1.0)
        conditions = sampler.conditions()
    for benchmark in benchmarks:
        benchmark.best_seconds = sampler.fastest(benchmark.samples)
    return conditions
