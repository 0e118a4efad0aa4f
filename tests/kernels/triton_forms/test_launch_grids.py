"""Only the first axis of a grid holds more than 65,535 programs: launches of kernels are caught and not run."""

# pyright: reportMissingImports=false

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from napkin.kernels.attention import triton_decode, triton_flash
from napkin.kernels.pointwise import triton_pointwise

MANY = 70_000
"""Sequences, whose tensors are on the meta device."""


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def grids(launch: Any) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []

    class Caught:
        def __init__(self, grid: tuple[int, ...]) -> None:
            found.append(grid)

        def __call__(self, *args: Any, **kwargs: Any) -> None: ...

    with patch.object(InterpretedFunction, "__getitem__", lambda self, grid: Caught(grid)):
        launch()
    return found


def attention() -> None:
    query, key = meta(MANY, 4, 16, 64), meta(MANY, 2, 16, 64)
    settings = (0.125, 0.0, 0, True, 0)
    mixed, logsumexp = triton_flash.attend(query, key, key, None, *settings)
    triton_flash.attend_backward(query, query, key, key, None, mixed, logsumexp, *settings)


def decode() -> None:
    query, key = meta(MANY, 4, 1, 64), meta(MANY, 2, 16, 64)
    counts, table = meta(MANY, dtype=torch.int64), meta(MANY, 1, dtype=torch.int64)
    triton_decode.attend_to_slots(query, key, key, counts, table, 16, None, None, 0.125, 0.0, 0)


def rotation() -> None:
    table = meta(1, 16, 64, dtype=torch.float32)
    triton_pointwise.rotate(meta(MANY, 16, 6, 64), table, table, False, False)


@pytest.mark.parametrize("launch", [attention, decode, rotation])
def test_more_than_65_535_sequences_are_launched(launch: Any) -> None:
    found = grids(launch)
    assert found
    for first, *others in found:
        assert first >= MANY
        assert max(others, default=1) <= 65_535
