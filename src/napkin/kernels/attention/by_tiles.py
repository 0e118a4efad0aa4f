"""Causal attention for a CPU in bf16, each head in the cache of one thread: compiled loops (numba_tiles.py).

A block of 32 queries is multiplied with the keys that one of them sees, up to its last query's own; its scores become
weights in cache and are multiplied with the values. Nothing is taken from torch's allocator but the results, and scores
are rounded to bf16 only as weights.
"""

import functools

import torch
from torch import Tensor

from napkin.kernels.operator_forms import fastest_form
from napkin.kernels.operators import on_threads

MULTIPLE = 32
"""Widths of heads must be multiples of this."""
MOST_KEYS = 8192
"""Keys up to which a head and its scores are held in a thread's buffer: of 21 MB with heads of 128."""


def takes_tiles(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """True if attention of those heads is computed here: if these loops support them and are the fastest form; if
    nothing was timed, on a processor with AVX512-BF16 but without AMX."""
    if not (query.dtype == key.dtype == value.dtype == torch.bfloat16 and key.shape[2] <= MOST_KEYS):
        return False
    if any(each.shape[-1] % MULTIPLE or not _is_paired(each) for each in (query, key, value)):
        return False
    shape_class = (*query.shape, key.shape[1], key.shape[2], value.shape[-1])
    return fastest_form("compiled_attention", shape_class, "tiles" if multiplies_pairs() else "rows") == "tiles"


@functools.cache
def multiplies_pairs() -> bool:
    """True if this processor multiplies pairs of bf16 in vectors, and has no unit for tiles of them."""
    # These helpers are private to torch: a missing one counts as False.
    pairs, tiles = (
        bool(getattr(torch.cpu, name, lambda: False)())
        for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    )
    return pairs and not tiles


def _is_paired(x: Tensor) -> bool:
    """True if each position's numbers follow each other, and begin at a multiple of 4 bytes."""
    return x.stride(-1) == 1 and not any(stride % 2 for stride in x.stride()[:-1]) and not x.storage_offset() % 2


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_keys: Tensor,
    mixed: Tensor,
    logsumexps: Tensor,
    scale: float,
    cap: float,
) -> None:
    """Write the values that each query mixes, and the logsumexp of its scores."""
    before = *_with_strides(query, key, value), first_keys, *_with_strides(mixed), logsumexps
    _on_heads("attend_in_tiles", before, query, key, value, first_keys, scale, cap)


def differentiate(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_keys: Tensor,
    logsumexps: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    scale: float,
    cap: float,
) -> None:
    """Write the gradients of queries, keys and values."""
    gradient = gradient if _is_paired(gradient) else gradient.contiguous()
    before = *_with_strides(gradient, query, key, value), first_keys, logsumexps, *_with_strides(*gradients)
    _on_heads("differentiate_in_tiles", before, query, key, value, first_keys, scale, cap)


def _with_strides(*tensors: Tensor) -> list[Tensor | int]:
    """Each tensor, and the bytes from one sequence, head and position to the next."""
    return [part for x in tensors for part in (x, *(stride * x.element_size() for stride in x.stride()[:3]))]


def _on_heads(
    loop: str,
    before: tuple[Tensor | int, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_keys: Tensor,
    scale: float,
    cap: float,
) -> None:
    batch, n_kv_heads, n_keys, width = key.shape
    group, n_queries, value_width = query.shape[1] // n_kv_heads, query.shape[2], value.shape[-1]
    # One row for all sequences, or one per sequence.
    firsts_per_sequence = n_queries if len(first_keys) > 1 else 0
    sizes = n_kv_heads, group, n_queries, n_keys, width, value_width, firsts_per_sequence
    # Packed keys and values, a block's rows, scores and results; in the backward pass their gradients too.
    n, widths = -(-n_keys // MULTIPLE) * MULTIPLE, width + value_width
    forward = n * widths // 2 + 16 * width + 24 * n + 32 * value_width + n
    backward = n * widths // 2 + n * width // 2 + n * widths + 64 * n + 32 * widths + 32 * width + 2 * n
    on_threads(
        f"attention.numba_tiles.{loop}",
        before,
        (*sizes, scale, cap),
        n_rows=batch * n_kv_heads,
        n_columns=group * n_queries * n_keys,
        buffer_size=forward if loop == "attend_in_tiles" else backward,
    )
