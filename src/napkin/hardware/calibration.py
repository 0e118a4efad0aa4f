"""How fast this machine really is: matrix products, memory and the cost of calling an operator, measured once.

Everything is the best of many short samples, taken in turns over several seconds: on a shared machine the mean
says how busy the neighbours were, the best says what the hardware gives.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec
import numpy as np
from jaxtyping import Float64

from napkin.errors import NapkinError
from napkin.number_formats import find_format

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(gt=0)]

_WEIGHT_OF_SLOWER_THAN_FITTED = 0.2
_QUIET_WAITING_SHARE = 0.05


@dataclass(frozen=True)
class Machine:
    """What a calibration holds for: measured on one machine, it says nothing about another."""

    device_type: str
    device_name: str
    cores: int
    threads: int
    native_bf16: bool
    torch_version: str


@dataclass(frozen=True)
class MatmulMeasurement:
    """FLOP/s (2·m·n·k a product) of one [m × k] @ [k × n] in one number format."""

    format: str
    m: Size
    n: Size
    k: Size
    flops_per_second: Positive


@dataclass(frozen=True)
class ArrayMeasurement:
    """Bytes/s read and written by `copy` (two arrays) and `add` (three arrays) on arrays of `array_bytes` each."""

    array_bytes: Size
    copy_bytes_per_second: Positive
    add_bytes_per_second: Positive


@dataclass(frozen=True)
class CalibrationSettings:
    """What is measured and for how long: matrix products (m, n, k), array sizes in bytes, seconds in all.

    The defaults are the shapes of small models: squares, and the products of a layer of width 256 on 4096
    tokens (the wide one, the narrow one, and the weight gradient with its long sum), and the thin products of
    generating one token, or a few at once.
    """

    shapes: tuple[tuple[int, int, int], ...] = (
        (128, 128, 128),
        (256, 256, 256),
        (512, 512, 512),
        (1024, 1024, 1024),
        (2048, 2048, 2048),
        (4096, 1024, 256),
        (4096, 256, 1024),
        (256, 1024, 4096),
        (64, 1024, 1024),
        (8, 1024, 1024),
        (1, 1024, 1024),
    )
    array_bytes: tuple[int, ...] = (2**16, 2**19, 2**22, 2**25, 2**27)
    seconds: float = 6.0
    visit_seconds: float = 0.02
    sample_seconds: float = 1e-4


# A launch takes microseconds, so that samples must be long and shapes large to see the device behind the queue.
CUDA_SETTINGS = CalibrationSettings(
    shapes=(
        *((size, size, size) for size in (512, 1024, 2048, 4096, 8192)),
        (16384, 4096, 1024),
        (16384, 1024, 4096),
        (1024, 4096, 16384),
        (64, 4096, 4096),
        (1, 4096, 4096),
    ),
    array_bytes=(2**20, 2**23, 2**26, 2**29),
    sample_seconds=5e-3,
)


@dataclass(frozen=True)
class Calibration:
    """The measured ceilings of one machine.

    `seconds_per_operator` is what calling an operator costs before it computes anything.
    `seconds_per_fresh_byte` is what a byte of newly mapped memory costs on top of writing it: on a CPU, blocks
    beyond 32 MiB come from the system at each allocation and are zeroed page by page; it is 0 where a caching
    allocator reuses them. `waiting_share` is the part of the measuring time that the threads stood waiting for
    a core that others held; None where the system does not tell.
    """

    machine: Machine
    measured_at: str
    matmuls: Annotated[tuple[MatmulMeasurement, ...], msgspec.Meta(min_length=1)]
    arrays: Annotated[tuple[ArrayMeasurement, ...], msgspec.Meta(min_length=1)]
    seconds_per_operator: Positive
    seconds_per_fresh_byte: NotNegative
    waiting_share: NotNegative | None = None
    version: Literal[1] = 1

    @property
    def calls_overlap(self) -> bool:
        """Whether the call of an operator costs nothing while the one before still runs: a GPU has a queue."""
        return self.machine.device_type != "cpu"

    @property
    def formats(self) -> tuple[str, ...]:
        """The number formats whose matrix products were measured."""
        return tuple(dict.fromkeys(matmul.format for matmul in self.matmuls))

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s to and from main memory: of the largest arrays, which no cache holds."""
        return self.bandwidth(math.inf)

    @property
    def disturbed(self) -> bool:
        """Whether other programs held the processor while this was measured, so that it shows too little."""
        return (self.waiting_share or 0) > _QUIET_WAITING_SHARE

    def matmul_peak(self, format_name: str) -> float:
        """The best FLOP/s that any matrix product reached in that format; in fp32 for bf16 that is emulated.

        Raises NapkinError where the format was not measured, being unknown or not native to the machine.
        """
        return max(matmul.flops_per_second for matmul in self._measured(format_name))

    def matmul_rate(self, format_name: str, m: int, n: int, k: int) -> float:
        """The FLOP/s to expect of an [m × k] @ [k × n], never more than `matmul_peak`.

        A product takes its 2·m·n·k FLOPs at the peak rate and, on top, a time proportional to each of its three
        matrices (moved, packed or zeroed once) and a constant: seconds = p·mnk + a·nk + b·mk + c·mn + d. Divided
        by mnk that is p + a/m + b/n + c/k + d/mnk, fitted to the measured shapes with non-negative coefficients
        and nearer to the fast ones than to the slow. So a thin matrix is slow on account of its thin side, a tiny
        product on account of its call, and a large one approaches the peak.
        """
        if min(m, n, k) < 1:
            raise NapkinError(f"a matrix product of {m} × {n} × {k} is empty: every side must be at least 1")
        peak = self.matmul_peak(format_name)
        seconds_per_flop = _terms(m, n, k) @ np.array(_fit_matmuls(self._measured(format_name)))
        return 1 / max(float(seconds_per_flop), 1 / peak)

    def bandwidth(self, bytes_touched: float | int) -> float:
        """Bytes/s of an elementwise operator that reads and writes so many bytes in all, its call not counted.

        Small operators run in cache: the rate is interpolated over the logarithm of the size between the
        measured arrays, and constant beyond them.
        """
        arrays = sorted(self.arrays, key=lambda array: array.array_bytes)
        # A copy touches two arrays and an add three: the rate is the mean of both, at the size between.
        sizes = [math.log(2.5 * array.array_bytes) for array in arrays]
        rates = [math.sqrt(array.copy_bytes_per_second * array.add_bytes_per_second) for array in arrays]
        return float(np.interp(math.log(max(bytes_touched, 1)), sizes, rates))

    def _measured(self, format_name: str) -> tuple[MatmulMeasurement, ...]:
        name = find_format(format_name).name
        # torch multiplies bf16 on every device, and makes fp32 of it where there are no instructions: a bound that
        # nothing reaches, and a microbenchmark shows how far.
        counted = "fp32" if name == "bf16" and name not in self.formats else name
        measured = tuple(matmul for matmul in self.matmuls if matmul.format == counted)
        if not measured:
            raise NapkinError(
                f"{self.machine.device_name} multiplies no {format_name} matrices in hardware: "
                f"choose one of {', '.join(self.formats)}"
            )
        return measured


def calibrate(
    device_type: str = "cpu",
    *,
    settings: CalibrationSettings | None = None,
    progress: Callable[[float], None] | None = None,
) -> Calibration:
    """Measure this machine now, in about `settings.seconds`; `progress` is told the fraction done, 0 to 1.

    Uses as many threads as torch does. Raises NapkinError for a device that is not there.
    """
    from napkin.hardware import probes

    chosen = settings or (CUDA_SETTINGS if device_type == "cuda" else CalibrationSettings())
    return probes.measure(device_type, chosen, progress or (lambda _: None))


def faster_of(first: Calibration, second: Calibration) -> Calibration:
    """Two calibrations in one: the faster measurement of each thing; they must be `measured_alike`."""
    return replace(
        second,
        matmuls=tuple(
            max(pair, key=lambda matmul: matmul.flops_per_second)
            for pair in zip(first.matmuls, second.matmuls, strict=True)
        ),
        arrays=tuple(
            ArrayMeasurement(
                one.array_bytes,
                max(one.copy_bytes_per_second, other.copy_bytes_per_second),
                max(one.add_bytes_per_second, other.add_bytes_per_second),
            )
            for one, other in zip(first.arrays, second.arrays, strict=True)
        ),
        seconds_per_operator=min(first.seconds_per_operator, second.seconds_per_operator),
        seconds_per_fresh_byte=min(first.seconds_per_fresh_byte, second.seconds_per_fresh_byte),
        waiting_share=min(first.waiting_share or 0.0, second.waiting_share or 0.0),
    )


def measured_alike(first: Calibration, second: Calibration) -> bool:
    """Whether two calibrations measured the same things on the same machine."""

    def things(calibration: Calibration) -> list[object]:
        matmuls = [(matmul.format, matmul.m, matmul.n, matmul.k) for matmul in calibration.matmuls]
        return [calibration.machine, *matmuls, *(array.array_bytes for array in calibration.arrays)]

    return things(first) == things(second)


@functools.lru_cache(maxsize=32)
def _fit_matmuls(measured: tuple[MatmulMeasurement, ...]) -> tuple[float, ...]:
    """The coefficients (p, a, b, c, d) of `Calibration.matmul_rate` by least squares of the relative error."""
    terms = np.stack([matmul.flops_per_second * _terms(matmul.m, matmul.n, matmul.k) for matmul in measured])
    weights = np.ones(len(measured))
    coefficients = np.zeros(terms.shape[1])
    for _ in range(20):
        coefficients = _non_negative_least_squares(terms * weights[:, None], weights)
        # A high rate proves what the machine can do, a low one may be a neighbour's fault: the law is drawn
        # towards the upper edge of the measurements.
        weights = np.where(terms @ coefficients < 1, _WEIGHT_OF_SLOWER_THAN_FITTED, 1.0)
    return tuple(coefficients.tolist())


def _terms(m: int, n: int, k: int) -> Float64[np.ndarray, " 5"]:
    return np.array([1.0, 1 / m, 1 / n, 1 / k, 1 / (m * n * k)])


def _non_negative_least_squares(
    terms: Float64[np.ndarray, "measured terms"], targets: Float64[np.ndarray, " measured"]
) -> Float64[np.ndarray, " terms"]:
    """Terms whose coefficient comes out negative are left out one by one, the most negative first."""
    coefficients, kept = np.zeros(terms.shape[1]), list(range(terms.shape[1]))
    while kept:
        solution = np.linalg.lstsq(terms[:, kept], targets, rcond=None)[0]
        if solution.min() >= 0:
            coefficients[kept] = solution
            break
        kept.pop(int(solution.argmin()))
    return coefficients
