"""Bit-for-bit reproducible results on a GPU: torch's deterministic algorithms, and workspaces of cuBLAS that do not
vary.

With them cuDNN's attention is replaced by flash attention, whose backward pass then adds in a fixed order, and sums by
index (index_add, index_put, scatter_add) sort first; torch.compile does not choose kernels by timing. An operator
without a deterministic form raises an error. napkin's own Triton kernels and compiled loops add in a fixed order
anyway.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from napkin.errors import NapkinError, first_line

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_ACCEPTED = (":4096:8", ":16:8")
"""Sizes of cuBLAS's workspaces with which it computes the same bits, by its documentation."""


def fix_cublas_workspace() -> None:
    """Let cuBLAS use workspaces of a fixed size in this process; it asks before its first product, and never again."""
    if os.environ.get(CUBLAS_WORKSPACE) not in _ACCEPTED:
        os.environ[CUBLAS_WORKSPACE] = _ACCEPTED[0]


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """While it lasts, and if enabled, operators of torch compute the same bits each time.

    Raises NapkinError where one cannot.
    """
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Else every new tensor is filled with NaN, a pass over memory, to show what reads it before it is written.
    settings.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        raise _refusal(error) or error from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def _refusal(error: RuntimeError) -> NapkinError | None:
    said = str(error)
    if CUBLAS_WORKSPACE in said:
        return NapkinError(
            f"training.deterministic is true, but this process had multiplied on the GPU before: set "
            f"{CUBLAS_WORKSPACE}={_ACCEPTED[0]} before Python starts, or start the run with `napkin train`"
        )
    if "does not have a deterministic implementation" not in said:
        return None
    operator = first_line(error).split(" does not have")[0]
    return NapkinError(
        f"training.deterministic is true, but torch's {operator} has no form that computes the same bits each time: "
        "leave out --training.deterministic, or set deterministic = false in the recipe.toml of the run"
    )


def cumulative_sums(weights: Float[Tensor, "row n"]) -> Float[Tensor, "row n"]:
    """The sums of each row up to each column; torch's own, which on a GPU adds in an order that varies, unless
    deterministic algorithms are wanted there."""
    wanted = torch.are_deterministic_algorithms_enabled() and weights.is_cuda
    return ordered_sums(weights) if wanted else weights.cumsum(dim=-1)


def ordered_sums(weights: Float[Tensor, "row n"]) -> Float[Tensor, "row n"]:
    """The sums of each row up to each column by products with triangles of ones: within parts of the row, then over
    the parts before."""
    n = weights.shape[-1]
    size = math.isqrt(n) + 1
    parts = F.pad(weights, (0, size * size - n)).view(-1, size, size)
    ones = torch.ones(size, size, dtype=weights.dtype, device=weights.device)
    within = parts @ ones.triu()
    before = within[:, :, -1] @ ones.triu(1)
    return (within + before[:, :, None]).flatten(1)[:, :n]
