"""A calibration: the measured speed of a machine's matrix products, memory and operator calls.

microbenchmarks.py makes one, calibration_cache.py stores it.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec
import numpy as np
from jaxtyping import Float64

from napkin.errors import NapkinError
from napkin.hardware.ceilings import mean_efficiency
from napkin.hardware.conditions import Conditions, NotNegative
from napkin.number_formats import find_format

Positive = Annotated[float, msgspec.Meta(gt=0)]
Size = Annotated[int, msgspec.Meta(gt=0)]

_WEIGHT_OF_SLOW_MEASUREMENTS = 0.2


@dataclass(frozen=True)
class Machine:
    """The machine that a calibration is valid for."""

    device_type: str
    device_name: str
    cores: int
    threads: int
    native_bf16: bool
    torch_version: str


@dataclass(frozen=True)
class MatmulMeasurement:
    """FLOP/s of one [m × k] @ [k × n], 2·m·n·k FLOPs, in one number format."""

    format: str
    m: Size
    n: Size
    k: Size
    flops_per_second: Positive


@dataclass(frozen=True)
class ArrayMeasurement:
    """Bytes/s, read and written together, of `copy` (two arrays) and `add` (three arrays of `array_bytes` each)."""

    array_bytes: Size
    copy_bytes_per_second: Positive
    add_bytes_per_second: Positive


@dataclass(frozen=True)
class CalibrationSettings:
    """The extent of the measurement: matrix products (m, n, k), array sizes in bytes, total seconds.

    The defaults are the shapes of small models: squares, the products of a layer of width 256 on 4096 tokens (wide,
    narrow, and the weight gradient with its long sum), and the thin products of generating one or a few tokens.
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


# A kernel launch takes microseconds, so samples must be long and shapes large to measure the device itself.
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

    `seconds_per_operator` is the overhead of calling an operator. `seconds_per_fresh_byte` is the cost per byte of
    newly mapped memory, in addition to writing it: on a CPU, blocks above 32 MiB are mapped at each allocation and
    zeroed page by page; it is 0 with a caching allocator. `conditions` is what other processes did while it was
    measured; None on a GPU, which they do not share.
    """

    machine: Machine
    measured_at: str
    matmuls: Annotated[tuple[MatmulMeasurement, ...], msgspec.Meta(min_length=1)]
    arrays: Annotated[tuple[ArrayMeasurement, ...], msgspec.Meta(min_length=1)]
    seconds_per_operator: Positive
    seconds_per_fresh_byte: NotNegative
    conditions: Conditions | None = None
    version: Literal[2] = 2

    @property
    def calls_overlap(self) -> bool:
        """True if operator calls overlap with the operators still running, as with a GPU's queue."""
        return self.machine.device_type != "cpu"

    @property
    def fused_share(self) -> float:
        """The share of the catalogue's devices: it is not measured."""
        return mean_efficiency().fused_share

    @property
    def formats(self) -> tuple[str, ...]:
        """The number formats whose matrix products were measured."""
        return tuple(dict.fromkeys(matmul.format for matmul in self.matmuls))

    @property
    def memory_bandwidth(self) -> float:
        """Bytes/s to and from main memory: that of the largest arrays, which fit in no cache."""
        return self.bandwidth(math.inf)

    @property
    def disturbed(self) -> bool:
        """True if other processes used the processor during the measurement, so that the rates may be too low."""
        return self.conditions is not None and self.conditions.busy

    def matmul_peak(self, format_name: str) -> float:
        """The best FLOP/s of any matrix product in that format; those of fp32 for emulated bf16.

        Raises NapkinError if the format was not measured, because it is unknown or not native to the machine.
        """
        return max(matmul.flops_per_second for matmul in self._measured(format_name))

    def matmul_rate(self, format_name: str, m: int, n: int, k: int) -> float:
        """The expected FLOP/s of an [m × k] @ [k × n], at most `matmul_peak`; for a format of 8 bits that was not
        measured that of bf16, which is a lower bound.

        The model: a product takes its 2·m·n·k FLOPs at the peak rate, plus a time proportional to each of its three
        matrices (moved, packed or zeroed once), plus a constant: seconds = p·mnk + a·nk + b·mk + c·mn + d. Divided by
        mnk that is p + a/m + b/n + c/k + d/mnk. The coefficients are non-negative and fitted to the measured shapes,
        with more weight on the fast ones. So thin matrices are slow because of their thin side, tiny products because
        of the call overhead, and large ones approach the peak.
        """
        if min(m, n, k) < 1:
            raise NapkinError(f"a matrix product of {m} × {n} × {k} is empty: every side must be at least 1")
        narrow = find_format(format_name).bits == 8 and find_format(format_name).name not in self.formats
        format_name = "bf16" if narrow else format_name
        peak = self.matmul_peak(format_name)
        seconds_per_flop = _terms(m, n, k) @ np.array(_fit_matmuls(self._measured(format_name)))
        return 1 / max(float(seconds_per_flop), 1 / peak)

    def product_seconds(self, format_name: str, batch: int, m: int, n: int, k: int) -> None:
        """None: this machine has measured rates instead."""

    def attention_rate(
        self, format_name: str, queries: int, keys: int, head_dim: int, *, heads: int = 1, cudnn: bool = False
    ) -> float:
        """The rate of a matrix product of the same sides."""
        return self.matmul_rate(format_name, queries, keys, head_dim)

    def bandwidth(self, bytes_touched: float | int) -> float:
        """Bytes/s of an elementwise operator that reads and writes `bytes_touched` in total, excluding call overhead.

        Small operators run in cache: the rate is interpolated over the logarithm of the size between the measured
        arrays, and constant outside their range.
        """
        arrays = sorted(self.arrays, key=lambda array: array.array_bytes)
        # A copy touches two arrays and an add three: the geometric mean of both rates, at the size in between.
        sizes = [math.log(2.5 * array.array_bytes) for array in arrays]
        rates = [math.sqrt(array.copy_bytes_per_second * array.add_bytes_per_second) for array in arrays]
        return float(np.interp(math.log(max(bytes_touched, 1)), sizes, rates))

    def _measured(self, format_name: str) -> tuple[MatmulMeasurement, ...]:
        name = find_format(format_name).name
        # torch supports bf16 on every device, and computes in fp32 where there are no bf16 instructions. The fp32 rate
        # is then an upper bound, which a probe run corrects.
        counted = "fp32" if name == "bf16" and name not in self.formats else name
        measured = tuple(matmul for matmul in self.matmuls if matmul.format == counted)
        if not measured:
            raise NapkinError(
                f"{self.machine.device_name} does not multiply {format_name} matrices in hardware: "
                f"choose one of {', '.join(self.formats)}"
            )
        return measured


def better_of(first: Calibration, second: Calibration) -> Calibration:
    """Choose of two calibrations, which must be `comparable`, the one that other processes did not disturb; of two
    alike the faster measurement of each quantity."""
    if first.disturbed != second.disturbed:
        return second if first.disturbed else first
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
    )


def comparable(first: Calibration, second: Calibration) -> bool:
    """True if two calibrations measured the same quantities on the same machine."""

    def quantities(calibration: Calibration) -> list[object]:
        matmuls = [(matmul.format, matmul.m, matmul.n, matmul.k) for matmul in calibration.matmuls]
        return [calibration.machine, *matmuls, *(array.array_bytes for array in calibration.arrays)]

    return quantities(first) == quantities(second)


@functools.lru_cache(maxsize=32)
def _fit_matmuls(measured: tuple[MatmulMeasurement, ...]) -> tuple[float, ...]:
    """The coefficients (p, a, b, c, d) of `Calibration.matmul_rate` by least squares of the relative error."""
    terms = np.stack([matmul.flops_per_second * _terms(matmul.m, matmul.n, matmul.k) for matmul in measured])
    weights = np.ones(len(measured))
    coefficients = np.zeros(terms.shape[1])
    for _ in range(20):
        coefficients = _non_negative_least_squares(terms * weights[:, None], weights)
        # A high rate shows what the machine can do, a low one may be due to other programs: the fit is drawn to the
        # upper edge of the measurements.
        weights = np.where(terms @ coefficients < 1, _WEIGHT_OF_SLOW_MEASUREMENTS, 1.0)
    return tuple(coefficients.tolist())


def _terms(m: int, n: int, k: int) -> Float64[np.ndarray, " 5"]:
    return np.array([1.0, 1 / m, 1 / n, 1 / k, 1 / (m * n * k)])


def _non_negative_least_squares(
    terms: Float64[np.ndarray, "measured terms"], targets: Float64[np.ndarray, " measured"]
) -> Float64[np.ndarray, " terms"]:
    """Least squares, dropping terms with a negative coefficient one by one, the most negative first."""
    coefficients, kept = np.zeros(terms.shape[1]), list(range(terms.shape[1]))
    while kept:
        solution = np.linalg.lstsq(terms[:, kept], targets, rcond=None)[0]
        if solution.min() >= 0:
            coefficients[kept] = solution
            break
        kept.pop(int(solution.argmin()))
    return coefficients
