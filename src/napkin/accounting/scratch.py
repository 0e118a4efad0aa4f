"""Scratch memory: bytes that an operator of torch's CPU takes from the allocator and gives back within one call.

Modelled is what torch's own kernels take, which grows with the tensors: operands copied to a common format, terms of a
sum of exponentials, a gradient copied to attention's layout; attention's tiles, which grow with the threads; and, where
the processor has AMX, the keys and values that attention packs for its tiles. Known to take nothing are operators that
make views, and those that compute or move elements one by one. All others are measured (`measured_scratch`),
by running each distinct call alone.
"""

import contextlib
import hashlib
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from napkin.accounting.memory import allocator_events
from napkin.accounting.microbenchmark import call_of, make_arguments
from napkin.accounting.operators import OWN_COMPUTING, is_pointwise, is_view
from napkin.errors import NapkinError
from napkin.json_files import cache_path, read_cached, write_cached
from napkin.kernels.attention.by_rows import scratch_bytes as compiled_attention_scratch
from napkin.kernels.products.linear import product_scratch_bytes as int8_scratch
from napkin.machine_code.processor import cpu_name, has_amx

aten = torch.ops.aten

NARROW = (torch.bfloat16, torch.float16)


def scratch_bytes(operator: torch._ops.OpOverload, args: tuple, kwargs: dict, inputs: list[Tensor]) -> int | None:
    """Bytes of scratch at their largest, for one call on tensors of the CPU; `inputs` are all of them, in order.

    None without a formula. Products inside attention in narrow formats have none: there the result is what the rest of
    attention takes.
    """
    formula = SCRATCH.get(operator.overloadpacket)
    # Narrow numbers are added up in fp32, booleans as integers: some kernels make a copy first.
    if formula in (_summed, _averaged) and inputs[0].dtype not in (torch.float32, torch.float64):
        return None
    if formula is not None:
        return formula(inputs, (*args, *kwargs.values()))
    return 0 if _takes_none(operator, inputs) else None


def hides_products(operator: torch._ops.OpOverload, inputs: list[Tensor]) -> bool:
    """True if a call whose scratch has a formula also calls products of a library, which take some of their own."""
    return operator.overloadpacket in _WITH_PRODUCTS and any(tensor.dtype in NARROW for tensor in inputs)


def _takes_none(operator: torch._ops.OpOverload, inputs: list[Tensor]) -> bool:
    name = operator.overloadpacket.__name__.removesuffix("_")
    if operator.namespace != "aten":
        return operator.namespace != "napkin" or name in OWN_COMPUTING or name in _OWN_SENDING
    if is_view(operator) or name in _MAKING:
        return True
    if (is_pointwise(operator) and not _reduces(operator)) or name.startswith("_foreach_"):
        return len({tensor.dtype for tensor in inputs if tensor.dim()}) <= 1
    if name in _PRODUCTS:
        return _in_blas(inputs)
    return name in _DIRECT and all(tensor.is_contiguous() for tensor in inputs)


def _reduces(operator: torch._ops.OpOverload) -> bool:
    # Losses are among the operators that torch calls pointwise, and may add up what they compute.
    return any(argument.name == "reduction" for argument in operator._schema.arguments)


def _in_blas(inputs: list[Tensor]) -> bool:
    """True if a product is one of BLAS's: in a format that it knows, of matrices as it takes them."""
    if platform.machine() not in ("x86_64", "AMD64") or torch.get_float32_matmul_precision() != "highest":
        return False
    return all(tensor.dtype in (torch.float32, torch.float64) and _has_unit_stride(tensor) for tensor in inputs)


def _has_unit_stride(tensor: Tensor) -> bool:
    if tensor.dim() < 2:
        return tensor.dim() == 0 or tensor.stride(0) == 1
    (rows, columns), (row, column) = tensor.shape[-2:], tensor.stride()[-2:]
    whole = tensor.dim() == 2 or tensor.is_contiguous() or tensor.mT.is_contiguous()
    return whole and ((column == 1 and row >= columns) or (row == 1 and column >= rows))


def _promoted(inputs: list[Tensor], arguments: tuple) -> int:
    return sum(_copied_to(_common(inputs), tensor) for tensor in inputs)


def _promoted_in_place(inputs: list[Tensor], arguments: tuple) -> int:
    # The result too is made in the common format, before it is written.
    return _promoted([inputs[0], *inputs], arguments)


def _promoted_choice(inputs: list[Tensor], arguments: tuple) -> int:
    return _promoted(inputs[1:], arguments)


def _summed(inputs: list[Tensor], arguments: tuple) -> int:
    return _copied_to(_asked_dtype(arguments) or inputs[0].dtype, inputs[0])


def _averaged(inputs: list[Tensor], arguments: tuple) -> int:
    return _copied_to(_asked_dtype(arguments) or inputs[0].dtype, inputs[0])


def _normed_one_by_one(inputs: list[Tensor], arguments: tuple) -> int:
    return max(_summed([tensor], arguments) for tensor in inputs)


def _log_of_sum_of_exponentials(inputs: list[Tensor], arguments: tuple) -> int:
    return inputs[0].nbytes


def _attention(inputs: list[Tensor], arguments: tuple) -> int:
    query, key = inputs[:2]
    # The only boolean among the arguments is `is_causal`.
    packed = _packs(query, key, is_causal=any(value is True for value in arguments))
    # Besides the scores: the rows of the output, their maxima and their sums.
    tiles = _attention_tiles(query, key, tiles=1, numbers_per_row=query.shape[-1] + 2, packed=packed)
    return tiles + (_packed_keys_and_values(query, key) if packed else 0)


def _attention_backward(inputs: list[Tensor], arguments: tuple) -> int:
    gradient, query, key = inputs[:3]
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.nbytes
    return copied + _attention_tiles(query, key, tiles=2, numbers_per_row=0, packed=False)


def _compiled_attention(inputs: list[Tensor], arguments: tuple) -> int:
    return compiled_attention_scratch(*inputs[:3], backward=False)


def _compiled_attention_backward(inputs: list[Tensor], arguments: tuple) -> int:
    return compiled_attention_scratch(*inputs[1:4], backward=True)


def _int8_product(inputs: list[Tensor], arguments: tuple) -> int:
    return int8_scratch(*inputs[:2])


def _asked_dtype(arguments: tuple) -> torch.dtype | None:
    return next((value for value in arguments if isinstance(value, torch.dtype)), None)


def _common(inputs: list[Tensor]) -> torch.dtype:
    # Numbers of no dimension do not widen the format of others.
    return reduce(torch.promote_types, (tensor.dtype for tensor in inputs if tensor.dim()), inputs[0].dtype)


def _copied_to(dtype: torch.dtype, tensor: Tensor) -> int:
    return tensor.numel() * dtype.itemsize if tensor.dim() and tensor.dtype != dtype else 0


def _attention_tiles(query: Tensor, key: Tensor, *, tiles: int, numbers_per_row: int, packed: bool) -> int:
    """Tiles of queries × keys in fp32, once more in the format of the inputs where that is narrower."""
    rows, columns = _tile(query, key)
    wide = max(4, query.element_size())
    narrow = query.element_size() if query.element_size() < 4 else 0
    padded = _even(columns) if packed else columns
    per_thread = tiles * rows * (columns * wide + padded * narrow) + rows * numbers_per_row * wide
    return torch.get_num_threads() * per_thread


def _tile(query: Tensor, key: Tensor) -> tuple[int, int]:
    """The kernel's own choice of tile, by number of queries: (queries, keys)."""
    queries, keys = query.shape[-2], key.shape[-2]
    return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32), min(keys, 512)


def _packs(query: Tensor, key: Tensor, *, is_causal: bool) -> bool:
    """True if attention packs keys and values for AMX: where it can, and multiplies with them often enough."""
    if query.dtype not in NARROW or not torch.backends.mkldnn.enabled:
        return False
    if not has_amx("bf16" if query.dtype == torch.bfloat16 else "fp16"):
        return False
    # The kernel's own thresholds: without packing, its products of bf16 are faster than those of fp16.
    shortest, reuse = (64, 4) if query.dtype == torch.bfloat16 else (16, 1)
    queries, keys = query.shape[-2], key.shape[-2]
    rows, _ = _tile(query, key)
    tiles = query.shape[:-2].numel() * ceil(queries / rows)
    rows_per_thread = rows * ceil(tiles / torch.get_num_threads())
    products = rows_per_thread * (min(queries, keys) if is_causal else keys)
    return min(queries, keys) >= shortest and products >= reuse * key.shape[:-1].numel()


def _packed_keys_and_values(query: Tensor, key: Tensor) -> int:
    """Keys and values in pairs, an odd dimension padded, and a buffer per thread for a transposed tile of keys."""
    rows, columns = _tile(query, key)
    heads, keys, head_dim = key.shape[:-2].numel(), key.shape[-2], key.shape[-1]
    whole_tiles = (keys - 1) // columns
    padded_keys = whole_tiles * _even(columns) + _even(keys - whole_tiles * columns)
    numbers = heads * (_even(head_dim) * keys + padded_keys * head_dim)
    padded_queries = rows * _even(head_dim) if head_dim % 2 else 0
    return (numbers + torch.get_num_threads() * (columns * head_dim + padded_queries)) * key.element_size()


def _even(number: int) -> int:
    return number + number % 2


_ARITHMETIC = ("add", "sub", "mul", "div", "addcmul", "addcdiv")
_COMPARISON = ("maximum", "minimum", "pow", "eq", "ne", "lt", "le", "gt", "ge")

# Operators that make, copy, draw or pick numbers, or pass over them one by one: no scratch, whatever the layout.
_MAKING = frozenset(
    """
    _to_copy _unsafe_view arange bernoulli cat clone copy detach empty empty_like empty_strided exponential fill full
    full_like lift_fresh_copy new_empty new_empty_strided new_full new_ones new_zeros normal ones ones_like rand
    rand_like randint randint_like randn randn_like random resize scalar_tensor set uniform zero zeros zeros_like
    _local_scalar_dense _fused_adam _fused_adamw _fused_sgd _fused_adagrad
    """.split()
)
# The same where all tensors are contiguous.
_DIRECT = frozenset(
    """
    _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data constant_pad_nd embedding
    embedding_dense_backward flip gather index index_select masked_fill native_dropout native_layer_norm
    nll_loss_backward nll_loss_forward repeat roll select_backward slice_backward stack tril triu
    """.split()
)
_PRODUCTS = frozenset("mm addmm bmm baddbmm mv addmv dot".split())
# napkin's own that send to other ranks, or to the host, and cannot be run alone.
_OWN_SENDING = frozenset("host_copy ring_attention ring_attention_backward".split())
_WITH_PRODUCTS = frozenset(
    {
        torch.ops.napkin.compiled_attention,
        torch.ops.napkin.compiled_attention_backward,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention_for_cpu_backward,
    }
)

SCRATCH: dict[torch._ops.OpOverloadPacket, Callable[[list[Tensor], tuple], int]] = {
    **{getattr(aten, name): _promoted for name in (*_ARITHMETIC, *_COMPARISON)},
    **{getattr(aten, name + "_"): _promoted_in_place for name in _ARITHMETIC},
    aten.where: _promoted_choice,
    aten.sum: _summed,
    aten.cumsum: _summed,
    aten.linalg_vector_norm: _summed,
    aten._foreach_norm: _normed_one_by_one,
    aten.mean: _averaged,
    aten.logsumexp: _log_of_sum_of_exponentials,
    torch.ops.napkin.compiled_attention: _compiled_attention,
    torch.ops.napkin.compiled_attention_backward: _compiled_attention_backward,
    torch.ops.napkin.int8_product: _int8_product,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


# Libraries pack operands, make copies without gaps and add up in buffers for each thread, by rules of their own that
# differ between processors, versions and numbers of threads. So each call that is traced on fake tensors, and is not
# known to take nothing, is run once on tensors of the same layouts, and the allocator is watched. Where that would take
# too long, it is run on fewer rows, three times, and extrapolated. What was measured is kept in the cache, for this
# machine. What cannot be measured is named.

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
"""The longest call that is run in full, in seconds, estimated from the speed of a small part of it."""
MOST_BYTES = 2**30
"""Bytes of the operands and results of a call that is run, in full or on some of its rows."""
_BYTES_OF_SOME_ROWS = 2**27
_SMALL_WORK = 2e7
_ALIGNED = 64
"""Libraries want columns aligned to multiples of this number of elements."""
_MOST_KEPT = 100_000
"""Calls in the file; the oldest are dropped."""


Measured = list[int]
"""Bytes of scratch at their largest; then those of the storages of its results, where these are known."""


def measured_scratch(
    operator: Any, args: tuple, kwargs: dict, inputs: list[Tensor], outputs: list[Tensor], flops: int
) -> Measured | None:
    """The scratch and seconds of one call on fake tensors; None where it cannot be measured."""
    if not isinstance(inputs[0], FakeTensor) or torch._C._autograd._profiler_enabled():  # pyright: ignore
        return None
    call = call_of(operator, args, kwargs)
    if call is None:
        return None
    settings = torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()
    key = hashlib.sha256(repr((call, settings)).encode()).hexdigest()[:16]
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
    """Write new measurements to the cache, for other processes; a cache that cannot be written is left alone."""
    for known in _by_machine.values():
        if known.grown:
            known.grown = False
            measurements = {key: measured for key, measured in known.calls.items() if measured is not None}
            newest = list({**_read(known.path), **measurements}.items())[-_MOST_KEPT:]
            with contextlib.suppress(OSError, NapkinError):
                write_cached(known.path, _Kept(dict(newest)))


@dataclass(frozen=True)
class _Kept:
    """The file that keeps measured calls."""

    calls: dict[str, Measured]


def _read(path: Path) -> dict[str, Measured]:
    kept = read_cached(path, _Kept)
    return {} if kept is None else kept.calls


@dataclass
class _Known:
    path: Path
    calls: dict[str, Measured | None]
    """The measurement of each call; None where it could not be measured."""
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


def _unknown_work(operator: Any, inputs: list[Tensor]) -> float:
    """An upper bound on the FLOPs of an iterative factorization; 0 for all other operators, whose work is unknown and
    small."""
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
    # A buffer of a fixed size stops growing once it is full, so the smaller of both slopes is taken. A single row may
    # be a special case.
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
    """Bytes that the allocator gives a call besides its results, and its seconds; None where the call fails when run
    alone."""
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
