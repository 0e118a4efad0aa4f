"""Attention of one new token per sequence to keys and values in blocks: problems for every form of it."""

import torch
from torch import Tensor

from napkin.kernels.attention.decode import Slots


def _randn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def problem_of_slots(
    heads: int, kv_heads: int, width: int, block_size: int, counts: list[int], *, kv: str, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], Slots]:
    """Blocks in any order; what no sequence has is NaN, or with int8 a scale of NaN."""
    n_blocks = [-(-count // block_size) for count in counts]
    order = torch.randperm(sum(n_blocks), generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.zeros(len(counts), max(n_blocks), dtype=torch.int64)
    for row, n in enumerate(n_blocks):
        table[row, :n] = torch.tensor([order.pop() for _ in range(n)])
    shape = (sum(n_blocks), kv_heads, block_size, width)
    queries = _randn(len(counts), heads, 1, width, seed=0, dtype=dtype)
    if kv == "int8":
        draw = torch.Generator().manual_seed(1)
        keys, values = (torch.randint(-127, 128, shape, generator=draw, dtype=torch.int8) for _ in range(2))
        factors = [_randn(*shape[:-1], 1, seed=seed, dtype=torch.float32).abs() / 100 for seed in (4, 5)]
        scales = hidden = (factors[0], factors[1])
    else:
        keys, values = (_randn(*shape, seed=seed, dtype=dtype) for seed in (1, 2))
        scales, hidden = None, (keys, values)
    for row, count in enumerate(counts):
        if count % block_size:
            for each in hidden:
                each[table[row, n_blocks[row] - 1], :, count % block_size :] = float("nan")
    return (queries, keys, values), Slots(torch.tensor(counts), table, max(counts), scales)
