"""Scratch that no formula tells is measured: what a kernel takes while it runs, by running each distinct call alone.

Libraries pack operands, make copies without gaps and add up in buffers for each thread, by rules of their own that
differ between processors, versions and numbers of threads. So each call that is traced on fake tensors, and is not
known to take nothing, is run once on tensors of the same layouts, and the allocator is watched. Where that would take
too long, it is run on fewer rows, three times, and extrapolated. What was measured is kept in the cache, for this
machine. What cannot be measured is named.
"""

import contextlib
import hashlib
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from napkin.accounting.allocator_events import allocator_events
from napkin.accounting.microbenchmark import call_of, make_arguments
from napkin.cached_json import cache_path, read_cached, write_cached
from napkin.errors import NapkinError
from napkin.hardware.host import cpu_name

aten = torch.ops.aten

# The arguments whose first dimension can be cut, all alike, and leave a smaller call of the same kind.
_ROWS: dict[torch._ops.OpOverloadPacket, tuple[int, ...]] = {
    aten.convolution: (0,),
    aten.convolution_backward: (0, 1),
    aten.mm: (0,),
    aten.addmm: (0, 1),
    aten.addmm_: (0, 1),
    aten.bmm: (0, 1),
    aten.baddbmm: (0, 1, 2),
    aten.baddbmm_: (0, 1, 2),
}

DEPENDS_ON_VALUES = frozenset({aten.linalg_matrix_exp, aten.linalg_pinv, aten._embedding_bag_backward})
"""Operators whose scratch depends on numbers that fake tensors do not have."""

MOST_WORK = 2e10
"""FLOPs of a call that is run in full."""
MOST_SECONDS = 0.5
"""Seconds that a call takes that is run in full, at the speed at which a small part of it runs."""
MOST_BYTES = 2**30
"""Bytes of the operands and results of a call that is run, in full or on some of its rows."""
_BYTES_OF_SOME_ROWS = 2**27
_SMALL_WORK = 2e7
_ALIGNED = 64
"""Elements to whose multiples libraries want columns aligned."""
_MOST_KEPT = 100_000
"""Calls in the file; the oldest are dropped."""


Measured = list[int]
"""Bytes of scratch at their largest; then those of the storages of its results, where these are known."""


def measured_scratch(
    operator: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor], flops: int
) -> Measured | None:
    """What one call on fake tensors takes; None where it cannot be measured."""
    if not isinstance(inputs[0], FakeTensor) or torch._C._autograd._profiler_enabled():  # pyright: ignore
        return None
    call = call_of(operator, args, kwargs)
    if call is None:
        return None
    key = hashlib.sha256(repr((call, _settings())).encode()).hexdigest()[:16]
    known = _known()
    if key not in known.calls:
        known.calls[key] = _measure(operator, args, kwargs, inputs, outputs, flops or _unknown_work(operator, inputs))
        known.grown = True
    return known.calls[key]


def resize_results(measured: Measured, inputs: list[Tensor], outputs: list[Tensor]) -> None:
    """Give the storages of fake results the sizes that they were measured to have: some kernels shrink what they have
    allocated, and leave the storage as large as it was.
    """
    given = {tensor.untyped_storage()._cdata for tensor in inputs}
    if len(measured) - 1 == len(outputs):
        for tensor, size in zip(outputs, measured[1:], strict=True):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage.nbytes() < size:
                storage.resize_(size)


def keep_measured() -> None:
    """Write what was measured since to the cache, for other processes; a cache that cannot be written is left alone."""
    for known in _by_machine.values():
        if known.grown:
            known.grown = False
            told = {key: measured for key, measured in known.calls.items() if measured is not None}
            newest = list({**_read(known.path), **told}.items())[-_MOST_KEPT:]
            with contextlib.suppress(OSError, NapkinError):
                write_cached(known.path, _Kept(dict(newest)))


@dataclass(frozen=True)
class _Kept:
    """The file."""

    calls: dict[str, Measured]


def _read(path: Path) -> dict[str, Measured]:
    kept = read_cached(path, _Kept)
    return {} if kept is None else kept.calls


@dataclass
class _Known:
    path: Path
    calls: dict[str, Measured | None]
    """By call; None where it could not be measured."""
    grown: bool = False


_by_machine: dict[tuple[str, ...], _Known] = {}


def _known() -> _Known:
    machine = (str(cache_path("scratch", "")), *_machine())
    if machine not in _by_machine:
        path = cache_path("scratch", machine[1:])
        _by_machine[machine] = _Known(path, {**_read(path)})
    return _by_machine[machine]


def _machine() -> tuple[str, ...]:
    # The variables cap which instructions the libraries use.
    caps = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
    capability = torch.backends.cpu.get_cpu_capability()
    return (cpu_name(), capability, str(torch.__version__), *(os.environ.get(name, "") for name in caps))


def _settings() -> tuple[Any, ...]:
    return torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()


def _unknown_work(operator: Any, inputs: list[Tensor]) -> float:
    """FLOPs of a factorization that iterates, at most; of anything else nothing is known, nor is it much."""
    if "linalg" not in operator.overloadpacket.__name__:
        return 0
    return max(30 * tensor.numel() * tensor.shape[-1] for tensor in inputs if tensor.dim()) if inputs[0].dim() else 0


def _measure(
    operator: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor], flops: float
) -> Measured | None:
    """Run the call, in full or on so many of its rows as `MOST_WORK`, `MOST_SECONDS` and `MOST_BYTES` leave."""
    positions = _cut_positions(operator, args)
    rows = args[positions[0]].shape[0] if positions else 0
    with_rows = [args[at] for at in positions] + [out for out in outputs if rows and out.shape[:1] == (rows,)]
    bytes_of_rows = sum(map(_bytes, with_rows))
    bytes_left = MOST_BYTES - (sum(map(_bytes, (*inputs, *outputs))) - bytes_of_rows)
    if bytes_left < 0 or (rows and bytes_left * rows < 4 * bytes_of_rows):
        return None
    if bytes_of_rows > bytes_left:
        bytes_left = min(bytes_left, max(_BYTES_OF_SOME_ROWS, 4 * bytes_of_rows // max(1, rows)))
    share = min(1.0, bytes_left / max(1, bytes_of_rows), MOST_WORK / max(1, flops))
    if rows and flops > 10 * _SMALL_WORK:
        few = max(1, int(rows * _SMALL_WORK / flops))
        _, seconds = _run(operator, *_with_rows(args, kwargs, positions, few))
        share = min(share, MOST_SECONDS / seconds * few / rows)
    if share >= 1:
        return _run(operator, args, kwargs)[0]
    many = int(share * rows)
    if many < 4:
        many = 4 if rows > 4 and MOST_WORK * rows > flops else 0
    if not many:
        return None
    points = [n * many // 4 for n in (2, 3, 4)]
    found = [_run(operator, *_with_rows(args, kwargs, positions, n))[0] for n in points]
    if any(measured is None for measured in found):
        return None
    less, more, most = (measured[0] for measured in found if measured)
    # What has filled a buffer of some size grows no more: the flatter of both slopes. A single row may be special.
    slope = min((more - less) / (points[1] - points[0]), (most - more) / (points[2] - points[1]))
    return [round(most + max(0.0, slope) * (rows - many))]


def _cut_positions(operator: Any, args: tuple) -> tuple[int, ...]:
    positions = _ROWS.get(operator.overloadpacket, ())
    if not positions:
        return ()
    rows = args[positions[-1]].shape[0]
    # The sum of a product may be added to one row, or to a number.
    return tuple(at for at in positions if args[at].dim() == args[positions[-1]].dim() and args[at].shape[0] == rows)


def _with_rows(args: tuple, kwargs: dict, positions: tuple[int, ...], rows: int) -> tuple[tuple, dict]:
    cut = {name: _first_rows(value, rows) if name == "out" else value for name, value in kwargs.items()}
    return tuple(_first_rows(arg, rows) if at in positions else arg for at, arg in enumerate(args)), cut


def _first_rows(tensor: Tensor, rows: int) -> Tensor:
    """A tensor of fewer rows that lies in memory as the whole one does: its columns move together where they are
    stored one after the other, and stay aligned as they are.
    """
    whole, own = tensor.shape[0], tensor.stride(0)
    strides = [own]
    for stride in tensor.stride()[1:]:
        closer = stride * rows // whole
        strides.append(closer + (stride - closer) % _ALIGNED if stride >= whole * own > 0 else stride)
    return tensor.new_empty_strided((rows, *tensor.shape[1:]), strides)


def _bytes(tensor: Tensor) -> int:
    """Bytes of the memory that the elements of a view span, or of its elements where they repeat."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(tensor.nbytes, (reach + 1) * tensor.itemsize)


def _run(operator: Any, args: tuple, kwargs: dict) -> tuple[Measured | None, float]:
    """What the allocator gives a call besides its results, and its seconds; None where the call fails alone."""
    call = call_of(operator, args, kwargs)
    assert call is not None
    generator = torch.Generator().manual_seed(0)
    # A recurrent layer does what it does in training where gradients are enabled; no tensor here needs one.
    with _disable_current_modes(), torch.enable_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made, keywords = make_arguments(call, generator, "cpu")
        _fill_integers(operator, made, keywords)
        try:
            # The first call of its kind may prepare what later ones find.
            operator(*made, **keywords)
            # Other programs do not make a call too long to be run.
            begin = time.process_time()
            with allocator_events() as growth:
                results = operator(*made, **keywords)
            seconds = max(1e-9, (time.process_time() - begin) / torch.get_num_threads())
        except (RuntimeError, NotImplementedError, ValueError, IndexError):
            return None, 1e-9
    if not growth:
        return None, seconds
    given = {tensor.untyped_storage()._cdata for tensor in _tensors((made, keywords))}
    storages = [tensor.untyped_storage() for tensor in _tensors(results)]
    made_here = {storage._cdata: storage.nbytes() for storage in storages if storage._cdata not in given}
    scratch = max(0, growth[0] - sum(made_here.values()))
    return [scratch, *(storage.nbytes() for storage in storages)], seconds


def _fill_integers(operator: Any, args: list[Any], keywords: dict[str, Any]) -> None:
    """Give integers that say where something is the values that they have in a run; they are zeros, as indices may be.

    Each group of a grouped product has equally many rows; rows are swapped with themselves.
    """
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **keywords}
    if isinstance(given.get("pivots"), Tensor):
        given["pivots"].copy_(torch.arange(1, given["pivots"].shape[-1] + 1))
    left, right = given.get(names[0]), given.get(names[1]) if len(names) > 1 else None
    bounds = given.get("offs", given.get("starts"))
    if isinstance(bounds, Tensor) and isinstance(left, Tensor) and isinstance(right, Tensor):
        # The dimension that is divided is that which the other operand has not, or the one that is summed over.
        in_torch = "offs" in given
        columns = right.shape[-1] if left.dim() == 3 else left.shape[-1] if in_torch and right.dim() == 2 else 0
        whole = columns or left.shape[0]
        first = whole / len(bounds) if in_torch else 0
        bounds.copy_((torch.linspace(first, whole, len(bounds)) / 8).round() * 8)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
