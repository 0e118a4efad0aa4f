"""What one new token per sequence computes: products of a matrix with one vector, attention of one query.

`linear` takes compiled loops for bf16 on a CPU in inference mode, where they are worth being loaded, see
napkin.kernels.compiled; all else is torch's. `attend_to_slots` is such a loop for bf16, fp32 and int8. Both are
operators, which a meter sees: what is computed does not depend on whether it is metered.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int8
from torch import Tensor

from napkin.kernels.compiled.loading import KERNELS, float_bits
from napkin.kernels.cpu_operator import cpu_operator
from napkin.kernels.rows_on_threads import on_threads, worker_threads

if TYPE_CHECKING:
    from napkin.machine_code.compiled_function import CompiledFunction

_SMALLEST_MATRIX = 2**18
"""Numbers of a matrix from which the compiled product is used; the products of smaller models are soon done."""
_SMALLEST_SHARED = 2**23
"""Numbers of a matrix, such as a head, from which the rows are divided among torch's number of threads: a millisecond
of reading, beside which it is short to wake one."""
_SMALLEST_WIDTH = 256
"""Numbers of a token's keys from which the compiled attention is used, for the same reason."""
_MODULES = ("decode_product", "decode_attention", "decode_int8_attention", "decode_wide_attention")


Scales = Float[Tensor, "n_blocks kv_heads slot 1"]
Blocks = Float[Tensor, "block kv_heads slot head_dim"] | Int8[Tensor, "block kv_heads slot head_dim"]


@dataclass(frozen=True)
class Slots:
    """Where the keys are that the one new token of each sequence sees.

    Sequence b sees the first counts[b] slots of its blocks, which are numbers table[b] of keys and values
    [block, kv_heads, slot, head_dim]; counts are at least 1.
    """

    counts: Int[Tensor, " batch"]
    table: Int[Tensor, "batch block"]
    longest: int
    """The largest of the counts."""
    scales: tuple[Scales, Scales] | None = None
    """By which keys and values are multiplied that are held in int8."""


def linear(
    x: Float[Tensor, "*batch in_features"],
    weight: Float[Tensor, "out_features in_features"],
    bias: Float[Tensor, " out_features"] | None = None,
) -> Float[Tensor, "*batch out_features"]:
    """x · weightᵀ + bias: torch's, but for one vector in inference on a CPU in bf16. Sums in fp32, result in bf16."""
    # torch.compile cannot trace the question for inference mode, and is for training.
    if torch.compiler.is_compiling() or not _may_be_compiled() or x.numel() != x.shape[-1] or not _suits(weight, x):
        return F.linear(x, weight, bias)
    return _multiply_vector(x, weight, bias)


def _like_rows(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty((*input.shape[:-1], len(weight)))


@cpu_operator("multiply_vector(Tensor input, Tensor weight, Tensor? bias) -> Tensor", _like_rows)
def _multiply_vector(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    KERNELS.load(*_MODULES)
    from napkin.kernels.compiled.decode_product import matrix_vector

    n_rows, n_columns = weight.shape
    wide, result = x.float().contiguous(), torch.empty(*x.shape[:-1], n_rows)
    first, x_at, y_at = weight.data_ptr(), wide.data_ptr(), result.data_ptr()
    n_threads = torch.get_num_threads() if weight.numel() >= _SMALLEST_SHARED else 1
    ends = [n_rows * part // n_threads for part in range(n_threads + 1)]
    parts = [(first + 2 * n_columns * a, x_at, y_at + 4 * a, b - a, n_columns) for a, b in pairwise(ends)]
    others = [worker_threads(n_threads).submit(matrix_vector, *part) for part in parts[1:]]
    matrix_vector(*parts[0])
    for other in others:
        other.result()
    return (result if bias is None else result.add_(bias)).to(x.dtype)


def _may_be_compiled() -> bool:
    # Fake tensors have no data that the loops could read.
    faked = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return torch.is_inference_mode_enabled() and not faked


def _suits(weight: Tensor, x: Tensor) -> bool:
    return (
        weight.dtype == x.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and weight.numel() >= _SMALLEST_MATRIX
        and weight.is_contiguous()
    )


def reads_slots(dtype: torch.dtype, device: torch.device, width: int) -> bool:
    """Whether `attend_to_slots` is faster than torch for keys of that kind, `width` numbers per token."""
    return (
        dtype in (torch.bfloat16, torch.float32, torch.int8)
        and device.type == "cpu"
        and width >= _SMALLEST_WIDTH
        and _may_be_compiled()
    )


def attend_to_slots_reference(
    queries: Float[Tensor, "batch heads 1 head_dim"],
    keys: Blocks,
    values: Blocks,
    slots: Slots,
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "batch heads 1 head_dim"]:
    """The formula, one sequence after another, in fp32."""
    if slots.scales is not None:
        keys, values = (
            each.float() * scales.float() for each, scales in zip((keys, values), slots.scales, strict=True)
        )
    rows = []
    for query, count, blocks in zip(queries.float(), slots.counts.tolist(), slots.table, strict=True):
        seen_keys, seen_values = (
            each[blocks]
            .transpose(0, 1)
            .flatten(1, 2)[:, :count]
            .float()
            .repeat_interleave(len(query) // each.shape[1], 0)
            for each in (keys, values)
        )
        scores = query @ seen_keys.mT * scale
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        rows.append(scores.softmax(dim=-1) @ seen_values)
    return torch.stack(rows).to(queries.dtype)


def attend_to_slots(
    queries: Float[Tensor, "batch heads 1 head_dim"],
    keys: Blocks,
    values: Blocks,
    slots: Slots,
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "batch heads 1 head_dim"]:
    """The same, compiled, for a CPU.

    Keys and values are bf16 or fp32 with the same strides, the last two contiguous; or int8 without gaps, and so their
    scales.
    """
    key_scales, value_scales = (None, None) if slots.scales is None else slots.scales
    where = slots.counts, slots.table, slots.longest
    return _attend(queries, keys, values, *where, key_scales, value_scales, scale, softcap or 0.0)


def _like_queries(query: Tensor, *others: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@cpu_operator(
    "attend_to_slots(Tensor query, Tensor key, Tensor value, Tensor counts, Tensor table, int longest, "
    "Tensor? key_scales, Tensor? value_scales, float scale, float cap) -> Tensor",
    _like_queries,
)
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: Tensor,
    table: Tensor,
    longest: int,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    scale: float,
    cap: float,
) -> Tensor:
    n_sequences, n_heads, _, width = query.shape
    (n_kv_heads, block_size), n_blocks = key.shape[1:3], table.shape[1]
    wide = query.float().contiguous()
    mixed = torch.empty_like(wide)
    assert key.dtype == value.dtype
    assert key.stride() == value.stride()
    assert key.stride()[2:] == (width, 1)
    sizes = (n_kv_heads, n_heads // n_kv_heads, width, n_blocks, block_size)
    if key_scales is not None and value_scales is not None:
        assert all(each.is_contiguous() for each in (key, key_scales, value_scales))
        read = [each.data_ptr() for each in (key, key_scales, value, value_scales)]
    else:
        read, sizes = [key.data_ptr(), value.data_ptr()], (*sizes, key.stride(0), key.stride(1))
    scaling = (longest, float_bits(scale), float_bits(cap))

    def arguments(start: int, stop: int, buffer: int) -> tuple[int, ...]:
        row = 4 * start * n_heads * width
        places = (mixed.data_ptr() + row, counts.data_ptr() + 8 * start, table.data_ptr() + 8 * start * n_blocks)
        return (wide.data_ptr() + row, *read, *places, stop - start, *sizes, *scaling, buffer)

    read_numbers = 2 * n_kv_heads * longest * width
    on_threads(_kernel(key.dtype), arguments, n_sequences, read_numbers, n_heads // n_kv_heads * (longest + 1))
    return mixed.to(query.dtype)


def _kernel(dtype: torch.dtype) -> "CompiledFunction":
    """That for keys and values of a format."""
    KERNELS.load(*_MODULES)
    if dtype == torch.int8:
        from napkin.kernels.compiled.decode_int8_attention import attend_int8

        return attend_int8
    if dtype == torch.bfloat16:
        from napkin.kernels.compiled.decode_attention import attend

        return attend
    assert dtype == torch.float32
    from napkin.kernels.compiled.decode_wide_attention import attend_wide

    return attend_wide
