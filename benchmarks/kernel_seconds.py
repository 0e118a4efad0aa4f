"""Seconds of single kernels beside those that were measured: products, attention of prompts, collectives.

    python benchmarks/kernel_seconds.py MEASURED                a table by device, and what is furthest off
    python benchmarks/kernel_seconds.py MEASURED --transfer     each generation's curves on the other's devices
    python benchmarks/kernel_seconds.py MEASURED --fit          fit and write hardware/kernel_curves.toml: minutes

MEASURED is a folder of CSV files: tables of AIConfigurator (ai-dynamo/aiconfigurator, Apache-2.0), which are not part
of this project: of products m, n, k; of attention batch_size, isl, num_heads, num_key_value_heads, head_dim,
kv_cache_dtype; of collectives op_name, nccl_dtype, num_gpus, message_size (numbers, not bytes); each with device and
latency in ms. Files whose name begins with "gemm", "attention_prefill" and "nccl" are read.

A fifth of the shapes, by n and k of a product and by heads and length of attention, is not fitted to: `held_out`. Loss
is that of the logarithm of seconds, linear for large errors. Fitting needs SciPy.
"""

import argparse
import csv
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from napkin.errors import NapkinError
from napkin.hardware.device import Device
from napkin.hardware.device_file import find_device
from napkin.hardware.kernel_curves import (
    AttentionCurve,
    Chip,
    CollectiveCurve,
    KernelCurves,
    ProductCurve,
    attention_curve,
    chip_of,
    curves_of,
    kernel_curves,
    product_curve,
)
from result_files import existing, heading, write_result

TABLE = Path(__file__).parents[1] / "src" / "napkin" / "hardware" / "kernel_curves.toml"
ROWS = 1100
"""Products that are fitted to: more change little, and take longer."""
OUTLIER = {"product": 0.07, "attention": 0.07, "collective": 0.05}
# Start, least and most of each constant.
PRODUCT = {
    "launch_seconds": (2.4e-6, 1e-6, 5e-6),
    "vector_launch_seconds": (2.4e-6, 0.5e-6, 5e-6),
    "vector_iteration_seconds": (1e-9, 1e-11, 1e-8),
    "peak_share": (0.9, 0.6, 1.0),
    "sustained_share": (0.93, 0.6, 1.0),
    "sustained_seconds": (4e-4, 1e-4, 2e-3),
    "tile_loss": (1.0, 0.1, 60),
    "idle_share": (0.5, 0.05, 1.0),
    "fill_seconds": (3e-6, 1e-8, 9e-6),
    "fill_exponent": (0.6, 0.01, 5.0),
    "iteration_seconds": (0.1e-6, 1e-8, 6e-7),
    "residency": (4, 0.5, 8),
    "operand_bandwidth": (150e9, 30e9, 1e12),
    "cached_bandwidth": (50e9, 20e9, 200e9),
    "memory_bandwidth": (60e9, 20e9, 1e12),
    "memory_share": (0.85, 0.5, 1.0),
    "memory_seconds": (0.5e-6, 1e-8, 4e-6),
    "cache_share": (0.7, 0.2, 2.0),
    "cache_sharpness": (8, 0.5, 12),
    "sharpness": (3.5, 1.2, 12),
    "split_seconds": (2e-6, 1e-7, 5e-6),
    "split_traffic": (0.5, 0.01, 5),
}
ATTENTION = {
    "launch_seconds": (10e-6, 5e-6, 2e-5),
    "sequence_seconds": (2e-8, 1e-10, 1e-6),
    "peak_share": (0.7, 0.3, 1.0),
    "idle_share": (0.5, 0.05, 1.0),
    "tail_share": (0.7, 0.02, 1.5),
    "fill_seconds": (2e-6, 1e-8, 2e-5),
    "key_seconds": (0.3e-6, 1e-9, 5e-6),
    "residency": (1.5, 1.0, 4.0),
    "key_tile": (100.0, 32, 256),
    "memory_share": (0.8, 0.3, 1.0),
    "sharpness": (1.3, 1.0, 10),
    "write_share": (0.8, 0.2, 1.0),
    "write_token_seconds": (0.1e-6, 1e-10, 5e-6),
    "write_head_seconds": (0.05e-6, 1e-11, 2e-6),
    "fp8_seconds": (2e-6, 1e-8, 1e-5),
    "fp8_query_bytes": (4.0, 0.1, 12),
    "fp8_cache_bytes": (8.0, 0.5, 30),
    "fp8_factor": (1.0, 0.3, 2.0),
}
HEAD_DIMS = {"64": (0.8, 0.3, 1.5), "192": (1.0, 0.5, 1.5), "256": (1.0, 0.3, 1.5), "512": (0.5, 0.05, 1.5)}
QUERY_TILES = {
    # FlashAttention-2 has tiles of 128 rows; FlashAttention-3 those of its tile_size.h, and 64 where heads are widest.
    "ampere": {"128": 128},
    "hopper": {"64": 192, "128": 128, "256": 128, "512": 64},
}
COLLECTIVE = {
    "start_seconds": (5e-6, 1e-7, 5e-5),
    "hop_seconds": (0.7e-6, 1e-8, 1e-5),
    "simple_hop_seconds": (1.5e-6, 1e-8, 3e-5),
    "low_latency_share": (0.03, 0.003, 0.5),
    "low_latency_128_share": (0.4, 0.05, 0.9),
    "simple_share": (0.75, 0.3, 1.0),
    "low_latency_128_seconds": (2e-6, 1e-8, 3e-5),
    "simple_seconds": (8e-6, 1e-8, 6e-5),
    "own_share": (0.4, 0.02, 1.5),
}
SWITCH = {"switch_share": (0.55, 0.4, 0.7)}
OPERATIONS = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}
GENERATIONS = {"ampere": "A100-SXM-80GB", "hopper": "H100-SXM-80GB"}
"""The device of each generation whose measurements are fitted to."""


BLACKWELL = {"peak_share": 0.85, "sustained_share": 0.75}
"""No table of these was fitted to. The best product that was published of a B200 (published_kernels.csv) reaches 0.776
of the peak; on A100 and H100 the tables' best are 1.05 to 1.09 of the best of that source. What power leaves of it lies
between Hopper's 0.87 and SimuMax's B200, whose large products reach 0.6 of the rate of its small ones."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Measurements of one kind of kernel on one device."""

    device: Device
    kernel: str
    shape: np.ndarray
    """A column for each."""
    seconds: np.ndarray

    @property
    def chip(self) -> Chip:
        return chip_of(self.device, "bf16")

    @property
    def held_out(self) -> np.ndarray:
        """True for the fifth of the shapes that is not fitted to."""
        if self.kernel == "product":
            mixed = (self.shape[2] * 7919 + self.shape[3] * 104729).astype(int) // 32
        elif self.kernel == "attention":
            mixed = (self.shape[2] * 31 + self.shape[3] * 17 + self.shape[1] / 16 * 7).astype(int)
        else:
            # By size: each second power of two but one.
            mixed = np.log2(self.shape[1]).round().astype(int)
        return mixed % 5 == 0

    def only(self, chosen: np.ndarray) -> "Measured":
        return dataclasses.replace(self, shape=self.shape[:, chosen], seconds=self.seconds[chosen])

    def predicted(self, curves: KernelCurves) -> np.ndarray:
        """Seconds by a generation's curves."""
        if self.kernel == "product":
            parts = [product_curve(part, self.chip, curves.product) for part in _in_parts(self.shape)]
            return np.concatenate(parts)
        if self.kernel == "attention":
            return attention_curve(self.shape, self.chip, curves.attention)
        link = self.device.link_bandwidth
        assert link is not None
        found = [
            curves.collective_seconds(self.kernel, data, int(ranks), link, in_switch=bool(floating))  # pyright: ignore[reportArgumentType]
            for ranks, data, floating in self.shape.T
        ]
        return np.array(found)


def _in_parts(shape: np.ndarray) -> Sequence[np.ndarray]:
    """Of a size that fits into the processor's cache."""
    return np.array_split(shape, max(1, shape.shape[1] // 500), axis=1)


def read_measured(folder: Path) -> list[Measured]:
    """All kernels of all devices."""
    columns: dict[tuple[str, str], list[tuple[Sequence[float], float]]] = {}
    for path in sorted(folder.glob("*.csv")):
        for row in csv.DictReader(path.open(encoding="utf-8")) if _reader(path) else ():
            found = _reader(path)(row)
            # Some rows of collectives do not name their device.
            device = row["device"] or {"h100_sxm": "H100", "a100_sxm": "A100"}.get(row["system_id"], row["system_id"])
            columns.setdefault((device, found[0]), []).append((found[1], float(row["latency"]) / 1e3))
    measured: dict[tuple[str, str], Measured] = {}
    for (name, kernel), rows in columns.items():
        try:
            device = find_device(name)
        except NapkinError:
            device = find_device(name.split("_")[0])
        shape, seconds = np.array([shape for shape, _ in rows]).T, np.array([seconds for _, seconds in rows])
        if (before := measured.get((device.name, kernel))) is not None:
            shape = np.concatenate([before.shape, shape], axis=1)
            seconds = np.concatenate([before.seconds, seconds])
        measured[device.name, kernel] = Measured(device, kernel, shape, seconds)
    return list(measured.values())


def _reader(path: Path) -> Callable[[dict[str, str]], tuple[str, Sequence[float]]]:
    """The function from a row of such a file to a kernel and its shape; None for other files."""
    readers = {"gemm": _product, "attention_prefill": _attention, "nccl": _collective}
    return next((reader for name, reader in readers.items() if path.name.startswith(name)), None)  # pyright: ignore[reportReturnType]


def _product(row: dict[str, str]) -> tuple[str, Sequence[float]]:
    return "product", (1.0, float(row["m"]), float(row["n"]), float(row["k"]))


def _attention(row: dict[str, str]) -> tuple[str, Sequence[float]]:
    names = ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim")
    # Of 0 KV heads are those that have as many as heads.
    values = [float(row[name]) for name in names]
    values[3] = values[3] or values[2]
    return "attention", (*values, float(row["kv_cache_dtype"] == "fp8"))


def _collective(row: dict[str, str]) -> tuple[str, Sequence[float]]:
    width = {"half": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "float": 4}[row["nccl_dtype"]]
    size = width * float(row["message_size"])
    return OPERATIONS[row["op_name"]], (float(row["num_gpus"]), size, float(row["nccl_dtype"] != "int8"))


def fitted(
    measured: Measured,
    spec: dict[str, tuple[float, float, float]],
    curve_of: Callable[[dict[str, float]], KernelCurves],
) -> dict[str, float]:
    """The constants of one curve."""
    from scipy.optimize import least_squares  # pyright: ignore[reportMissingImports]

    kind = measured.kernel if measured.kernel in OUTLIER else "collective"
    starts, least, most = np.log(np.array([spec[name] for name in spec])).T

    def residuals(logs: np.ndarray) -> np.ndarray:
        curves = curve_of(dict(zip(spec, map(float, np.exp(logs)), strict=True)))
        return np.log(measured.predicted(curves) / measured.seconds) / OUTLIER[kind]

    best: Any = None
    # The fastest of three protocols has many local optima.
    for attempt in range(8 if kind == "collective" else 1):
        moved = starts + np.random.default_rng(attempt).normal(0, 0.3, len(starts)) * bool(attempt)
        found = least_squares(
            residuals,
            np.clip(moved, least + 1e-3, most - 1e-3),
            bounds=(least, most),
            loss="soft_l1",
            diff_step=3e-3,
            max_nfev=22 if kind == "product" else 60,
        )
        best = found if best is None or found.cost < best.cost else best
    return dict(zip(spec, (float(f"{value:.4g}") for value in np.exp(best.x)), strict=True))


def fit_generation(name: str, measured: Sequence[Measured], known: KernelCurves) -> KernelCurves:
    """The curves of one generation, from what was measured on its device."""
    device = find_device(GENERATIONS[name])
    for each in measured:
        if each.device.name == device.name:
            print(f"fitting {each.kernel} of {device.name}", file=sys.stderr)
            known = fit_kernel(name, each.only(~each.held_out), known)
    return known


def fit_kernel(name: str, seen: Measured, known: KernelCurves) -> KernelCurves:
    """The curves with those of one kernel fitted."""
    if seen.kernel == "product":
        some = seen.only(np.random.default_rng(0).permutation(len(seen.seconds))[:ROWS])
        curve = fitted(some, PRODUCT, lambda found: dataclasses.replace(known, product=ProductCurve(**found)))
        return dataclasses.replace(known, product=ProductCurve(**curve))
    if seen.kernel == "attention":
        wide = len(QUERY_TILES[name]) > 1

        def attention(values: dict[str, float]) -> KernelCurves:
            own: dict[str, Any] = {key: value for key, value in values.items() if key not in HEAD_DIMS}
            factors = {"128": 1.0} | {dim: values[dim] for dim in HEAD_DIMS if dim in values}
            curve = AttentionCurve(**own, head_dim_factors=factors, query_tiles=QUERY_TILES[name], packs_groups=wide)
            return dataclasses.replace(known, attention=curve)

        spec = {key: value for key, value in ATTENTION.items() if wide or "fp8" not in key}
        return attention(fitted(seen, spec | (HEAD_DIMS if wide else {}), attention))

    def collective(values: dict[str, float]) -> KernelCurves:
        changed: dict[str, Any] = {seen.kernel: CollectiveCurve(**values)}
        return dataclasses.replace(known, **changed)

    switch = name == "hopper" and seen.kernel == "all_reduce"
    return collective(fitted(seen, COLLECTIVE | (SWITCH if switch else {}), collective))


def blackwell_of(hopper: KernelCurves, known: KernelCurves) -> KernelCurves:
    """Hopper's curves, whose clock is the same, with `BLACKWELL`."""
    parts = {part: getattr(hopper, part) for part in ("attention", *OPERATIONS.values())}
    return dataclasses.replace(known, product=dataclasses.replace(hopper.product, **BLACKWELL), **parts)


def described(predicted: np.ndarray, seconds: np.ndarray) -> str:
    errors = predicted / seconds - 1
    sizes = np.abs(errors)
    return f"{np.median(sizes):.1%} | {np.quantile(sizes, 0.9):.1%} | {np.median(errors):+.1%} | {len(sizes)}"


def roofline(measured: Measured) -> np.ndarray | None:
    """Seconds of products and attention by hand: 0.8 of the peak, 0.85 of the bandwidth, a launch."""
    chip = measured.chip
    if measured.kernel == "product":
        batch, m, n, k = measured.shape
        flops, moved, launch = 2 * batch * m * n * k, 2 * batch * (m * k + k * n + m * n), 2.5e-6
    elif measured.kernel == "attention":
        sequences, length, heads, kv_heads, head_dim, _ = measured.shape
        flops = 2 * sequences * length * (length + 1) * heads * head_dim
        moved, launch = 4 * sequences * length * head_dim * (heads + kv_heads), 10e-6
    else:
        return None
    return launch + np.maximum(flops / chip.peak / 0.8, moved / chip.bandwidth / 0.85)


def table(measured: Sequence[Measured]) -> list[str]:
    """A line for each kernel and device, and the rows that are furthest off."""
    lines = ["| kernel, device | median | nine in ten | bias | measurements |", "|---|---|---|---|---|"]
    worst: list[tuple[float, str]] = []
    for each in measured:
        curves = curves_of(each.device)
        if curves is None:
            continue
        predicted, name = each.predicted(curves), f"{each.kernel}, {each.device.name}"
        by_hand = roofline(each)
        if by_hand is not None:
            lines.append(f"| {name}: roofline by hand | {described(by_hand, each.seconds)} |")
        if each.device.name in GENERATIONS.values():
            held_out = each.held_out
            lines.append(f"| {name}: fitted to | {described(predicted[~held_out], each.seconds[~held_out])} |")
            lines.append(f"| {name}: shapes held out | {described(predicted[held_out], each.seconds[held_out])} |")
        else:
            lines.append(f"| {name}: device not fitted to | {described(predicted, each.seconds)} |")
        errors = predicted / each.seconds - 1
        for place in np.argsort(-np.abs(np.log1p(errors)))[:10]:
            shape = " ".join(f"{value:.0f}" for value in each.shape[:, place])
            taken = f"{each.seconds[place] * 1e6:.1f} µs measured, {predicted[place] * 1e6:.1f} planned"
            worst.append((float(errors[place]), f"{name}: {shape}: {taken}"))
    lines += ["", "Furthest off:", ""]
    lines += [f"- {error:+.0%} {what}" for error, what in worst]
    return lines


def transferred(measured: Sequence[Measured]) -> list[str]:
    """The curves of each generation on the device of the other, from the datasheet alone."""
    lines = ["| kernel, from, to | median | nine in ten | bias | measurements |", "|---|---|---|---|---|"]
    for name, device in GENERATIONS.items():
        other = next(each for each in kernel_curves() if each in GENERATIONS and each != name)
        for each in measured:
            if each.device.name == device:
                predicted = each.predicted(kernel_curves()[other])
                lines.append(f"| {each.kernel}, {other}'s curves, {device} | {described(predicted, each.seconds)} |")
    return lines


def write_table(found: dict[str, KernelCurves]) -> None:
    """hardware/kernel_curves.toml."""
    lines = [
        "# Constants of the seconds of single kernels: napkin.hardware.kernel_curves explains them.",
        "# Written by `python benchmarks/kernel_seconds.py FOLDER --fit`. Seconds, bytes/s, shares of the datasheet.",
    ]
    for name, curves in found.items():
        lines += ["", f"[{name}]", f"source = {_toml(curves.source)}"]
        lines.append(f"compute_capabilities = {[list(each) for each in curves.compute_capabilities]}")
        for part in ("product", "attention", *OPERATIONS.values()):
            lines += ["", f"[{name}.{part}]"]
            values = dataclasses.asdict(getattr(curves, part))
            lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {TABLE}")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=existing, help="folder of CSV files")
    parser.add_argument("--fit", action="store_true", help="fit the constants and write them")
    parser.add_argument("--transfer", action="store_true", help="one generation's curves on the other's devices")
    arguments = parser.parse_args()
    head = heading("Seconds of single kernels, by curves beside tables of AIConfigurator")
    measured = read_measured(arguments.measured)
    if arguments.fit:
        known = kernel_curves()
        found = known | {name: fit_generation(name, measured, known[name]) for name in GENERATIONS}
        write_table(found | {"blackwell": blackwell_of(found["hopper"], known["blackwell"])})
        kernel_curves.cache_clear()
    lines = transferred(measured) if arguments.transfer else table(measured)
    print("\n".join(lines))
    if not arguments.transfer:
        write_result("kernel-seconds", [*head, *lines])


if __name__ == "__main__":
    main()
