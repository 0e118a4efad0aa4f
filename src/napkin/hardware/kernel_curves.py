"""Seconds of single kernels by shape: products, attention of prompts, collectives within a node.

A curve has a generation's constants (kernel_curves.toml, fitted to published measurements by
`benchmarks/kernel_seconds.py`) and takes all else from the datasheet: FLOP/s, bytes/s, multiprocessors, cache, link. So
it holds for devices of a generation that were not measured.

A product [m × k] @ [k × n] is cut into tiles, and its k into parts; each tile is computed by one multiprocessor. For
each size of tile and number of parts

    seconds = launch + ‖ tiles, memory ‖ + sum over parts
    tiles   = ‖ waves · FLOPs of a tile / FLOP/s, bytes of operands / bytes/s, iterations · latency ‖ + waves · fill

where ‖ ‖ is a norm that lies between the sum and the largest; the library is taken to choose the fastest.
"""

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from napkin.hardware.device import Device
from napkin.toml_files import packaged_toml

if TYPE_CHECKING:
    import numpy as np

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1.2)]

TILES = (
    *((16, 16), (16, 32), (16, 64), (16, 128), (32, 32), (32, 64), (32, 128), (64, 32), (64, 64), (64, 128), (64, 256)),
    *((128, 32), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128)),
)
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
DEPTH = 64
"""The part of k that one iteration multiplies."""
LARGE_TILE = 128 * 256
SMALL_TILE = 64 * 128
MEASURED_REUSE = 6
"""The number of products after which published measurements read the same weights again, cached if all fit."""
FORMATS = ("bf16", "fp16")
"""Formats of the products that were measured, and those that take equally long."""


@dataclass(frozen=True)
class Chip:
    """The figures of a datasheet that curves take, or arrays of them."""

    peak: float
    """FLOP/s in the format of the products."""
    bandwidth: float
    """Bytes/s of the memory."""
    multiprocessors: int
    cache_bytes: float


@dataclass(frozen=True)
class ProductCurve:
    """Constants of a product's seconds; those by multiprocessor are of one."""

    launch_seconds: _Positive
    vector_launch_seconds: _Positive
    """Launch of the product of a matrix and a vector, which has kernels of its own."""
    vector_iteration_seconds: _Positive
    """Seconds of such kernels per number along k."""
    peak_share: _Share
    """Share of the dense peak that large tiles reach."""
    sustained_share: _Share
    """Share of that which remains in a kernel that computes much longer than `sustained_seconds`: the power limit
    lowers the clock."""
    sustained_seconds: _Positive
    tile_loss: _Positive
    """A tile [a × b] reaches 1 / (1 + loss · (1/a + 1/b)) of that."""
    idle_share: _Share
    """Share of the multiprocessors' idle time in the last wave that counts: clocks rise meanwhile."""
    fill_seconds: _Positive
    """Seconds per wave of the largest tiles for loading the first operands and storing the result."""
    fill_exponent: _Positive
    """Exponent with which these seconds fall with the area of a tile."""
    iteration_seconds: _Positive
    residency: _Positive
    """Tiles of 64 × 128 that are resident on a multiprocessor at a time."""
    operand_bandwidth: _Positive
    """Bytes/s into a multiprocessor's shared memory, of operands."""
    cached_bandwidth: _Positive
    """Bytes/s of a multiprocessor from the cache of the device."""
    memory_bandwidth: _Positive
    """Bytes/s that one multiprocessor reads from memory when few of them read."""
    memory_share: _Share
    """Fraction of the memory bandwidth that is reached when all of them read."""
    memory_seconds: _Positive
    """Latency of the memory."""
    cache_share: _Positive
    """Share of the cache's bytes within which half of what was read before is found again."""
    cache_sharpness: _Positive
    sharpness: _Positive
    """Exponent of the norm."""
    split_seconds: _Positive
    """Seconds of summing the parts of k."""
    split_traffic: _Positive
    """Factor of the bytes of the parts there."""


@dataclass(frozen=True)
class AttentionCurve:
    """Constants of the seconds of causal attention over prompts, with what is written to the KV cache."""

    launch_seconds: _Positive
    """Launches of all its kernels, the preparation of sequences of unequal length included."""
    sequence_seconds: _Positive
    peak_share: _Share
    """Share of the dense peak that is reached at a head dimension of 128."""
    head_dim_factors: dict[str, _Positive] = field(hash=False)
    """Factors of that fraction at other head dimensions; interpolated between these."""
    idle_share: _Share
    tail_share: _Positive
    """Share of the last tile of queries, which has the most keys, that is waited for."""
    fill_seconds: _Positive
    """Seconds per wave of tiles."""
    key_seconds: _Positive
    """Seconds per wave for each 128 keys of a tile."""
    residency: _Positive
    query_tiles: dict[str, int] = field(hash=False)
    """Rows of queries in a tile, by head dimension."""
    key_tile: _Positive
    packs_groups: bool
    """True if queries of several heads share a tile where sequences are short; else only single queries do."""
    memory_share: _Share
    sharpness: _Positive
    write_share: _Share
    """Share of the memory bandwidth at which keys and values are written to the KV cache."""
    write_token_seconds: _Positive
    """Seconds of a multiprocessor for each token that is written."""
    write_head_seconds: _Positive
    """Seconds of a multiprocessor for each KV head of such a token."""
    fp8_seconds: _Positive = 1e-6
    """Launch of casting queries, where the KV cache is fp8."""
    fp8_query_bytes: _Positive = 4.0
    """Bytes that the cast moves for each number of the queries."""
    fp8_cache_bytes: _Positive = 8.0
    """Bytes that are moved for each number of keys and values."""
    fp8_factor: _Positive = 1.0
    """FLOP/s of attention with an fp8 cache, relative to those without."""


@dataclass(frozen=True)
class CollectiveCurve:
    """Constants of one collective's seconds: those of three protocols, the fastest of which is taken."""

    start_seconds: _Positive
    hop_seconds: _Positive
    """Seconds of a step between neighbours in the two protocols for short messages."""
    simple_hop_seconds: _Positive
    """Seconds of one hop in the protocol for long messages."""
    low_latency_share: _Share
    """Fraction of the link's bandwidth that the protocol with a flag beside each 4 bytes reaches."""
    low_latency_128_share: _Share
    """Share of the link's bandwidth with a flag for each 128 bytes."""
    simple_share: _Share
    """Share of the link's bandwidth without flags."""
    low_latency_128_seconds: _Positive
    """Seconds beyond those of the first protocol."""
    simple_seconds: _Positive
    """Seconds of the synchronisation that replaces flags."""
    own_share: _Positive
    """Factor of a rank's own part, which is copied and not sent."""
    switch_share: _Share | None = None
    """Share of the link's bandwidth where the switch sums for 8 ranks or more (NVLink SHARP)."""


@dataclass(frozen=True)
class KernelCurves:
    """The curves of a generation of devices."""

    product: ProductCurve
    attention: AttentionCurve
    all_gather: CollectiveCurve
    reduce_scatter: CollectiveCurve
    all_reduce: CollectiveCurve
    all_to_all: CollectiveCurve
    compute_capabilities: tuple[tuple[int, int], ...] = field(default=())
    source: str = ""

    def collective_seconds(
        self,
        operation: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"],
        data_bytes: float,
        ranks: int,
        link_bandwidth: float,
        *,
        in_switch: bool = True,
    ) -> float:
        """Seconds of a collective among ranks on one link, with nothing else running; `data_bytes` is the whole tensor,
        as in `napkin.hardware.Interconnect.seconds`. `in_switch` is whether the switch may compute the sum: it cannot
        sum integers.
        """
        if ranks == 1 or not data_bytes:
            return 0.0
        curve: CollectiveCurve = getattr(self, operation)
        around = 2 if operation == "all_reduce" else 1
        # An all-to-all passes through no neighbours; more peers still take longer.
        hops = (ranks - 1) ** 0.5 if operation == "all_to_all" else around * (ranks - 1)
        sent = data_bytes * (around * (ranks - 1) + curve.own_share) / ranks / link_bandwidth
        seconds = [
            curve.hop_seconds * hops + sent / curve.low_latency_share,
            curve.low_latency_128_seconds + 1.3 * curve.hop_seconds * hops + sent / curve.low_latency_128_share,
            curve.simple_seconds + curve.simple_hop_seconds * hops + sent / curve.simple_share,
        ]
        if curve.switch_share is not None and in_switch and ranks >= 8:
            whole = data_bytes / link_bandwidth / curve.switch_share
            seconds.append(curve.simple_seconds + 4 * curve.simple_hop_seconds + whole)
        return curve.start_seconds + min(seconds)


@functools.cache
def kernel_curves() -> dict[str, KernelCurves]:
    """The curves by the name of the generation."""
    return packaged_toml("napkin.hardware", "kernel_curves.toml", dict[str, KernelCurves])


def curves_of(device: Device) -> KernelCurves | None:
    """The curves of a device's generation; None where nothing was measured, or the datasheet lacks a figure."""
    if device.multiprocessors is None or device.cache_bytes is None:
        return None
    return next(
        (each for each in kernel_curves().values() if device.compute_capability in each.compute_capabilities), None
    )


def product_seconds(
    device: Device, m: int, n: int, k: int, *, batch: int = 1, format_name: str = "bf16", reuse: float = MEASURED_REUSE
) -> float | None:
    """Seconds of `batch` products [m × k] @ [k × n] in one kernel, alone on a device; None without a curve.

    `reuse` is the number of such products after which the same weights are read again; in a whole model, never (`inf`).

    >>> from napkin.hardware.device_file import find_device
    >>> f"{product_seconds(find_device('H200'), 4096, 4096, 4096) * 1e6:.0f} µs"
    '170 µs'
    """
    curves = curves_of(device)
    if curves is None or format_name not in FORMATS:
        return None
    return one_product_seconds(curves.product, chip_of(device, format_name), batch, m, n, k, reuse)


def prompt_attention_seconds(
    device: Device,
    sequences: int,
    length: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    *,
    fp8_cache: bool = False,
) -> float | None:
    """Seconds of causal bf16 attention over prompts of one length, alone on a device; None without a curve."""
    curves = curves_of(device)
    if curves is None or "bf16" not in device.peaks:
        return None
    import numpy as np

    shape = np.array([sequences, length, n_heads, n_kv_heads, head_dim, fp8_cache], float)[:, None]
    return float(attention_curve(shape, chip_of(device, "bf16"), curves.attention)[0])


def collective_seconds(
    device: Device,
    operation: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"],
    data_bytes: float,
    ranks: int,
    *,
    in_switch: bool = True,
) -> float | None:
    """Seconds of a collective among this many devices of one node, with nothing else running; None without a curve or a
    link."""
    curves = curves_of(device)
    if curves is None or device.link_bandwidth is None or "bridge" in (device.link or ""):
        return None
    return curves.collective_seconds(operation, data_bytes, ranks, device.link_bandwidth, in_switch=in_switch)


def chip_of(device: Device, format_name: str) -> Chip:
    """Return the datasheet figures of a device that `curves_of` has curves for."""
    assert device.multiprocessors is not None
    assert device.cache_bytes is not None
    return Chip(device.peak(format_name), device.memory_bandwidth, device.multiprocessors, device.cache_bytes)


@functools.lru_cache(maxsize=2**16)
def one_product_seconds(curve: ProductCurve, chip: Chip, batch: int, m: int, n: int, k: int, reuse: float) -> float:
    """Seconds of one shape, cached."""
    import numpy as np

    shape = np.array([[batch], [m], [n], [k]], float)
    # Splitting k adds tiles where there are too few: with many tiles, the other kernels need not be considered.
    many = batch * m * n > 16 * LARGE_TILE * chip.multiprocessors
    return float(product_curve(shape, chip, curve, reuse=reuse, parts_of_k=PARTS[:1] if many else PARTS)[0])


@functools.cache
def _choices(parts_of_k: tuple[int, ...]) -> "np.ndarray":
    """Rows and columns of a tile, and parts of k, of each kernel to choose from."""
    import numpy as np

    return np.array([(rows, columns, parts) for rows, columns in TILES for parts in parts_of_k], float).T


def product_curve(
    shape: "np.ndarray",
    chip: Chip,
    curve: ProductCurve,
    *,
    reuse: float = MEASURED_REUSE,
    parts_of_k: tuple[int, ...] = PARTS,
) -> "np.ndarray":
    """Seconds of products, whose batch, m, n and k are the rows of `shape`."""
    import numpy as np

    batch, m, n, k = (each[:, None] for each in shape)
    rows, columns, wanted = _choices(parts_of_k)
    sharp = curve.sharpness
    depth = np.ceil(k / DEPTH)
    iterations = np.ceil(depth / wanted)
    parts = np.ceil(depth / iterations)
    tiles = batch * np.ceil(m / rows) * np.ceil(n / columns) * parts
    waves = tiles / chip.multiprocessors
    counted = waves + curve.idle_share * (np.ceil(waves) - waves)
    rate = chip.peak / chip.multiprocessors * curve.peak_share / (1 + curve.tile_loss * (1 / rows + 1 / columns))
    computing = counted * iterations * (2 * DEPTH * rows * columns / rate)
    throttled = 1 / (1 + (curve.sustained_seconds / computing) ** 2)
    computing = computing * (1 + (1 / curve.sustained_share - 1) * throttled)
    operands = waves * iterations * (2 * DEPTH * (rows + columns) / curve.operand_bandwidth)
    resident = np.clip(curve.residency * SMALL_TILE / (rows * columns), 1, 8)
    turns = np.ceil(waves / resident)
    latency = turns * iterations * curve.iteration_seconds
    filling = turns * curve.fill_seconds * (rows * columns / LARGE_TILE) ** curve.fill_exponent
    busy = (computing**sharp + operands**sharp + latency**sharp) ** (1 / sharp) + filling

    inputs, others = 2 * batch * m * k, 2 * batch * (k * n + m * n)
    cold = inputs * _missed(inputs + others, chip, curve) + others * _missed(inputs + reuse * others, chip, curve)
    active = np.minimum(tiles, chip.multiprocessors)
    alone = active * min(curve.memory_bandwidth, curve.cached_bandwidth)
    reading = cold / np.minimum(chip.bandwidth * curve.memory_share, alone)
    reading = reading + (inputs + others - cold) / (active * curve.cached_bandwidth) + curve.memory_seconds

    moved = 8 * curve.split_traffic * parts * batch * m * n / (chip.multiprocessors * curve.cached_bandwidth)
    summing = np.where(parts > 1, curve.split_seconds + moved, 0.0)
    seconds = curve.launch_seconds + (busy**sharp + reading**sharp) ** (1 / sharp) + summing
    vector = curve.vector_launch_seconds + reading.min(1) + k[:, 0] * curve.vector_iteration_seconds
    fastest = seconds.min(1)
    return np.where(shape[1] == 1, np.minimum(fastest, vector), fastest)


def _missed(distance: Any, chip: Chip, curve: ProductCurve) -> Any:
    """The fraction of bytes that were evicted from the cache after this many other bytes were touched."""
    return 1 / (1 + (curve.cache_share * chip.cache_bytes / distance) ** curve.cache_sharpness)


def attention_curve(shape: "np.ndarray", chip: Chip, curve: AttentionCurve) -> "np.ndarray":
    """Seconds of attention; the rows of `shape` are sequences, their length, heads, KV heads, the head dimension and
    whether the KV cache is fp8."""
    import numpy as np

    sequences, length, heads, kv_heads, head_dim, fp8 = shape
    group = heads / kv_heads
    rows = _by_head_dim(head_dim, curve.query_tiles)
    apart, packed = np.ceil(length / rows) * heads, np.ceil(length * group / rows) * kv_heads
    packs = packed < 0.9 * apart if curve.packs_groups else length == 1
    waves = sequences * np.where(packs, packed, apart) / chip.multiprocessors
    keys = np.ceil(length / curve.key_tile) * curve.key_tile
    span = np.where(packs & (packed < apart), rows / group, rows)
    mean_keys = np.minimum(keys, (length + span + curve.key_tile) / 2)
    share = curve.peak_share * _by_head_dim(head_dim, curve.head_dim_factors) * np.where(fp8, curve.fp8_factor, 1.0)
    per_key = 4 * rows * head_dim * chip.multiprocessors / (chip.peak * share)
    counted = waves + curve.idle_share * (np.ceil(waves) - waves)
    tail = curve.tail_share * (keys - mean_keys) * per_key / np.sqrt(np.maximum(waves, 1))
    resident = curve.residency * np.where(head_dim <= 64, 1.5, 1.0)
    filling = np.ceil(waves / resident) * (curve.fill_seconds + curve.key_seconds * mean_keys / 128) * rows / 128
    busy = counted * mean_keys * per_key + tail + filling
    numbers = sequences * length * head_dim
    reading = numbers * (4 * heads + 4 * kv_heads) / (chip.bandwidth * curve.memory_share)
    written = np.where(fp8, heads * curve.fp8_query_bytes + kv_heads * curve.fp8_cache_bytes, 8 * kv_heads)
    writing = numbers * written / (chip.bandwidth * curve.write_share)
    each = curve.write_token_seconds + kv_heads * curve.write_head_seconds
    writing = writing + sequences * length * each / chip.multiprocessors
    sharp = curve.sharpness
    launch = curve.launch_seconds + fp8 * curve.fp8_seconds + sequences * curve.sequence_seconds
    return launch + writing + (busy**sharp + reading**sharp) ** (1 / sharp)


def _by_head_dim(head_dim: "np.ndarray", values: dict[str, Any]) -> "np.ndarray":
    import numpy as np

    known = sorted((int(name), float(value)) for name, value in values.items())
    return np.interp(head_dim, [name for name, _ in known], [value for _, value in known])
